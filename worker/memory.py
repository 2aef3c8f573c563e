"""How much one rank may hold: what its device has left, whether its weights fit, and how large its KV pool becomes.

Numbers only: what is there to be held, loader.py and kv_cache.py say.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.proto.errors import StartupError
from paceline.proto.units import GIB, size_text

CPU_SHARE = 0.3  # of available memory, where none is given: a laptop has other work to do
CPU_LIMIT = 4 * GIB
GPU_SHARE = 0.9

log = logging.getLogger("paceline.worker")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that the device could still give. On a host, this rank's part of them."""

    free: int
    is_host: bool

    def pool_bytes(self, share: float | None) -> int:
        """What the KV pool may take: ``share`` of what is free; unset, a modest default on a host."""
        if share is not None:
            return int(self.free * share)
        return min(int(self.free * CPU_SHARE), CPU_LIMIT) if self.is_host else int(self.free * GPU_SHARE)


def free_memory(device: torch.device, num_on_host: int = 1) -> FreeMemory:
    """``num_on_host``: ranks that share the host's memory. GPUs they have one each."""
    if device.type == "cuda":
        return FreeMemory(torch.cuda.mem_get_info(device)[0], is_host=False)
    return FreeMemory(min(_meminfo_available(), _cgroup_available()) // num_on_host, is_host=True)


def check_weights(weight_bytes: int, block_bytes: int, rank_memory: int | None, memory: FreeMemory) -> None:
    """Raises StartupError where weights and one KV block are more than ``rank_memory`` (bytes), or than is free."""
    needed = weight_bytes + block_bytes
    if rank_memory is not None and needed > rank_memory:
        has = f"--rank-memory is {size_text(rank_memory)}"
    elif needed > memory.free:
        has = f"{size_text(memory.free)} of its memory is free"
    else:
        return
    raise StartupError(
        f"A rank of this model needs {size_text(needed)} ({size_text(weight_bytes)} of weights, and one KV block), "
        f"but {has}; a larger --tensor-parallel-size or --pipeline-parallel-size shares them among more ranks."
    )


def plan_pool(
    block_bytes: int,
    block_size: int,
    num_kv_blocks: int | None,
    memory_share: float | None,
    memory: FreeMemory,
    limit: int | None = None,
) -> int:
    """How many blocks this rank can hold. An explicit number wins, if it fits.

    ``memory`` is what is free with the weights loaded; ``limit``: bytes that --rank-memory leaves for the pool.
    Raises StartupError, with the numbers, where no pool can be had.
    """
    left = "is free after the weights"
    free, may_take = memory.free, memory.pool_bytes(memory_share)
    if limit is not None and limit < free:
        left = "is what --rank-memory leaves after the weights"
        free, may_take = limit, min(limit, may_take)
    if num_kv_blocks is not None:
        if num_kv_blocks < 1:
            raise StartupError(f"--num-kv-blocks is {num_kv_blocks}; at least 1 is needed.")
        if num_kv_blocks * block_bytes > free:
            raise StartupError(
                f"--num-kv-blocks {num_kv_blocks} needs {size_text(num_kv_blocks * block_bytes)} for keys and values; "
                f"{size_text(free)} {left}."
            )
        return num_kv_blocks
    num_blocks = may_take // block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"The KV pool cannot hold one block: a block of {block_size} tokens takes {block_bytes} bytes, the pool "
            f"may take {may_take}, and {free} {left}."
        )
    return num_blocks


def fit_length(max_position: int, max_model_len: int | None, num_tokens: int) -> int:
    """The longest sequence in tokens: as asked for, else the model's own, lowered to ``num_tokens``, for which the pool
    has room. Raises StartupError where that is none."""
    if num_tokens < 1:
        raise StartupError(
            "The KV pool holds no token: each takes a block in every group of the model's layers, and there are fewer "
            "blocks than groups; a larger --num-kv-blocks or --kv-memory-share would work."
        )
    wanted = max_model_len or max_position
    if wanted <= num_tokens:
        return wanted
    if max_model_len is None:
        log.info("max_model_len is lowered from %d to %d tokens, which the KV pool holds", wanted, num_tokens)
        return num_tokens
    log.warning("max_model_len is %d, but the KV pool holds %d tokens: longer requests are refused", wanted, num_tokens)
    return wanted


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
