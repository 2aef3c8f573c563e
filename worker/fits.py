"""Whether a model fits, before it is started: weights, KV pool and full-length requests from its config alone.

Counted by the functions that a start itself uses, on models without memory. Reads no weights and asks no device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from paceline.proto.errors import StartupError
from paceline.proto.paging import Paging
from paceline.proto.units import GIB
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.config import RankConfig
from paceline.worker.hf_files import read_json, read_spec
from paceline.worker.kv_cache import bytes_per_token
from paceline.worker.kv_groups import kv_groups
from paceline.worker.loader import narrow_layers, weight_bytes
from paceline.worker.memory import FreeMemory, check_weights, fit_length, plan_pool
from paceline.worker.models import model_class
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups, Place
from paceline.worker.rank import DTYPES, Memory
from paceline.worker.shards import Shards

# GiB as torch sees them on a card of that name; of A100 and H100 the ones with 80 GB.
GPUS = {"H200": 139.8, "H100": 79.1, "A100": 79.2, "L40S": 44.4}
CONTEXT = 0.6  # GiB that CUDA and its libraries take before the first weight
# Of suggestions. Tensor ranks are the GPUs of one node, which has a power of two of them.
TENSOR_RANKS = (1, 2, 4, 8)
STAGES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank: its weights, its part of one KV block, and what a token takes while every layer sees it."""

    weights: int
    block: int
    token: int


@dataclass(frozen=True, slots=True)
class Fit:
    """``needs``: by rank. ``memory``: what the rank with the least room for blocks holds; None where ``reason`` says
    why none can start. ``suggestion``: tensor ranks and stages, the fewest with which a request of ``wanted_len``
    tokens fits, where these are too few and there are such."""

    gpu: str
    tp: int
    pp: int
    needs: tuple[Need, ...]
    block_size: int
    wanted_len: int
    memory: Memory | None = None
    reason: str | None = None
    suggestion: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        return self.memory is not None and self.memory.max_model_len == self.wanted_len


def read_model(path: Path) -> ModelSpec:
    """Of a folder with a config.json, of that file itself, or of a GGUF file. Raises StartupError where there is none,
    and where it describes a model that is not known."""
    if path.suffix == ".gguf":
        return open_checkpoint(path).spec
    path = path if path.suffix == ".json" else path / "config.json"
    return read_spec(read_json(path, needed_for="the count"), path)


def fits(spec: ModelSpec, config: RankConfig, gpu: str, device: str = "cuda") -> Fit:
    """``config``: ranks, dtype, lengths and block size as a start would have them; its model is not looked at.

    ``gpu``: a name of `GPUS`, or GiB that a rank may take for weights and KV, as --rank-memory. ``device`` is cuda or
    cpu, dtype auto bf16.
    Raises StartupError for what is not known, and for more ranks than the model can be cut to.
    """
    if device not in ("cuda", "cpu"):
        raise StartupError(f"--device {device} is not known; cuda and cpu are.")
    fit = _fit(spec, config, gpu, torch.device(device))
    if fit.is_whole:
        return fit
    for tp, pp in _larger(config.num_ranks):
        more = msgspec.structs.replace(config, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        try:
            if _fit(spec, more, gpu, torch.device(device)).is_whole:
                return replace(fit, suggestion=(tp, pp))
        except StartupError:  # the model cannot be cut so
            continue
    return fit


def _fit(spec: ModelSpec, config: RankConfig, gpu: str, device: torch.device) -> Fit:
    wanted = config.max_model_len or spec.max_position
    paging = Paging(config.block_size, tuple(group.window for group in kv_groups(spec)), config.plan_budget)
    needs = _needs(spec, config, device, len(paging.windows))
    fit = Fit(gpu, config.tensor_parallel_size, config.pipeline_parallel_size, needs, config.block_size, wanted)
    # Of a GPU a start takes its usual share, of a limit all that the weights leave.
    free, share = (GPUS[gpu] - CONTEXT, config.kv_memory_share) if gpu in GPUS else (_gib(gpu), 1.0)
    try:
        blocks = [_num_blocks(need, config.block_size, int(free * GIB), share) for need in needs]
        length = fit_length(wanted, None, paging.longest(min(blocks), wanted))
    except StartupError as error:
        return replace(fit, reason=str(error))
    fullest = needs[blocks.index(min(blocks))]
    return replace(fit, memory=Memory(fullest.weights, fullest.block, min(blocks), paging, length))


def _num_blocks(need: Need, block_size: int, free: int, share: float | None) -> int:
    """That one rank can hold, as it works it out at its start."""
    check_weights(need.weights, need.block, None, FreeMemory(free, is_host=False))
    return plan_pool(need.block, block_size, None, share, FreeMemory(free - need.weights, is_host=False))


def _needs(spec: ModelSpec, config: RankConfig, device: torch.device, num_groups: int) -> tuple[Need, ...]:
    """Ranks whose shares are equally large weigh the same, so that few models are built."""
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise StartupError(f"--dtype {config.dtype} is not known; auto, {', '.join(DTYPES)} are.")
    dtype = DTYPES.get(config.dtype, torch.bfloat16)
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    shards = Shards.of(spec, tp, pp)
    weights: dict[tuple, int] = {}
    needs = []
    for place in (Place.of(rank, tp, pp) for rank in range(tp * pp)):
        shard = shards.of_rank(place.tp_rank, place.pp_rank)
        sizes = (part.size for part in (shard.heads, shard.kv_heads, shard.mlp, shard.vocab, shard.layers))
        share = (*sizes, place.is_first_stage, place.is_last_stage)
        if share not in weights:
            model = model_class(spec)(spec, dtype, Groups(place))
            narrow_layers(model, {}, config.quantization, device)
            weights[share] = weight_bytes(model, device)
        token = bytes_per_token(spec, shard, dtype)
        needs.append(Need(weights[share], config.block_size * token, num_groups * token))
    return tuple(needs)


def _larger(num_ranks: int) -> Iterator[tuple[int, int]]:
    """Tensor ranks and stages that make more ranks, the fewest first, of as many those with fewer stages."""
    sizes = sorted(((tp, pp) for pp in STAGES for tp in TENSOR_RANKS), key=lambda size: (math.prod(size), size[1]))
    return (size for size in sizes if math.prod(size) > num_ranks)


def _gib(gpu: str) -> float:
    try:
        gib = float(gpu)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise StartupError(f"--gpu {gpu} is not known; {', '.join(GPUS)} or a number of GiB are.")
    return gib
