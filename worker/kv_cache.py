"""The paged KV cache of one rank: its tensors, block copies, and how large it may be. Knows no sequences.

Blocks are numbered by the engine's pool, 1 .. num_blocks; block 0 is the null block, which takes writes that nobody
will read. Which block belongs to whom is the plan's affair.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.proto.errors import StartupError
from paceline.proto.step import StepPlan
from paceline.worker.models.spec import ModelSpec
from paceline.worker.table import column

GIB = 1 << 30
CPU_SHARE = 0.3  # of available memory, where none is given: a laptop has other work to do
CPU_LIMIT = 4 * GIB
GPU_SHARE = 0.9
ALIGNMENT = 4096  # bytes; a page

log = logging.getLogger("paceline.worker")


class KVCache:
    """keys[layer], values[layer]: [num_blocks + 1, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        shape = (num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        self.block_size = block_size
        # Zeros, not what memory held: masked entries still take part in products, where 0 * nan would be nan.
        self.keys = [zeros(shape, dtype, device) for _ in range(spec.num_layers)]
        self.values = [zeros(shape, dtype, device) for _ in range(spec.num_layers)]

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0] - 1

    def copy_blocks(self, plan: StepPlan) -> None:
        """The plan's copies, src over dst. All sources are read as they were before the first copy."""
        if not plan.copy_srcs:
            return
        device = self.keys[0].device
        srcs = torch.from_numpy(column(plan.copy_srcs)).to(device)
        dsts = torch.from_numpy(column(plan.copy_dsts)).to(device)
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, dsts, cache.index_select(0, srcs))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a host, memory that the system zeroes when it is first touched: writing 4 GiB of zeros took 8 s of a start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + raw.nbytes - ALIGNMENT]).view(dtype).view(shape)


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that the device could still give, with the weights loaded."""

    free: int
    is_host: bool

    def pool_bytes(self, share: float | None) -> int:
        """What the KV pool may take: ``share`` of what is free; unset, a modest default on a host."""
        if share is not None:
            return int(self.free * share)
        return min(int(self.free * CPU_SHARE), CPU_LIMIT) if self.is_host else int(self.free * GPU_SHARE)


def free_memory(device: torch.device) -> FreeMemory:
    if device.type == "cuda":
        return FreeMemory(torch.cuda.mem_get_info(device)[0], is_host=False)
    return FreeMemory(min(_meminfo_available(), _cgroup_available()), is_host=True)


def plan_pool(
    spec: ModelSpec,
    dtype: torch.dtype,
    block_size: int,
    num_kv_blocks: int | None,
    memory_share: float | None,
    memory: FreeMemory,
    max_model_len: int | None,
) -> tuple[int, int]:
    """(num_blocks, max_model_len). Explicit numbers win; the model's own length is lowered to what the pool holds.

    Raises StartupError, with the numbers, where no pool can be had.
    """
    block_bytes = block_size * bytes_per_token(spec, dtype)
    wanted = max_model_len or spec.max_position
    if num_kv_blocks is not None:
        num_blocks = num_kv_blocks
        if num_blocks < 1:
            raise StartupError(f"--num-kv-blocks is {num_blocks}; at least 1 is needed.")
        if num_blocks * block_bytes > memory.free:
            raise StartupError(
                f"--num-kv-blocks {num_blocks} needs {num_blocks * block_bytes / GIB:.2f} GiB for keys and values; "
                f"{memory.free / GIB:.2f} GiB is free after the weights."
            )
    else:
        num_blocks = memory.pool_bytes(memory_share) // block_bytes
        if num_blocks < 1:
            raise StartupError(
                f"The KV pool cannot hold one block: a block of {block_size} tokens takes {block_bytes} bytes, and the "
                f"pool may take {memory.pool_bytes(memory_share)} of {memory.free} that are free after the weights."
            )
    tokens = num_blocks * block_size
    if wanted <= tokens:
        return num_blocks, wanted
    if max_model_len is None:
        log.info("max_model_len is lowered from %d to %d tokens, which the KV pool holds", wanted, tokens)
        return num_blocks, tokens
    log.warning("max_model_len is %d, but the KV pool holds %d tokens: longer requests are refused", wanted, tokens)
    return num_blocks, wanted


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return CPU_LIMIT  # no /proc: assume a small machine rather than ask for all of a big one


def _cgroup_available() -> int:
    """What the container's limit leaves, page cache counted as free; huge where there is no limit."""
    for limit, used, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            bound, taken = (root / limit).read_text().strip(), int((root / used).read_text())
            fields = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if bound != "max":
            return max(0, int(bound) - taken + int(fields.get(cached, 0)))
    return 1 << 62
