"""One rank: everything it takes to execute plans, put together once at start. It obeys plans and decides nothing.

Construction, warm-up and steps run on one thread: nobody else touches torch in this process.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.proto.errors import StartupError
from paceline.proto.load import RankMemory
from paceline.proto.paging import Paging
from paceline.proto.request import SamplingParams
from paceline.proto.step import TAKE_SAMPLE, TOKEN_IN_TABLE, SlotInit, StepPlan, column
from paceline.proto.units import GIB, size_text
from paceline.worker import threads
from paceline.worker.attention.base import select
from paceline.worker.card import make_card
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.config import RankConfig
from paceline.worker.dump import DumpHeader, write_dump
from paceline.worker.grammar import Grammars
from paceline.worker.graph import layers_of
from paceline.worker.kv_cache import KVCache, bytes_per_token
from paceline.worker.kv_groups import kv_groups
from paceline.worker.loader import load_weights, narrow_layers, weight_bytes
from paceline.worker.memory import check_weights, fit_length, free_memory, plan_pool
from paceline.worker.models import model_class
from paceline.worker.parallel import Groups
from paceline.worker.pending import PendingStep
from paceline.worker.quant.product import has_kernel, why_no_kernel
from paceline.worker.runner import Runner
from paceline.worker.sampler import Sampler
from paceline.worker.table import SlotTable

KEPT_PLANS = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger("paceline.worker")
OnPhase = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank holds. Bytes and tokens."""

    weight_bytes: int
    block_bytes: int
    num_kv_blocks: int
    paging: Paging
    max_model_len: int

    @property
    def block_size(self) -> int:
        return self.paging.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_kv_blocks * self.block_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """That a token takes while every layer sees it: a part of one block in each group."""
        return self.block_bytes // self.block_size * len(self.paging.windows)

    @property
    def full_length_requests(self) -> int:
        """Requests of max_model_len tokens that the pool holds at once."""
        return self.num_kv_blocks // self.paging.num_blocks(self.max_model_len)


class Rank:
    """Loads its share of what ``config`` names and then executes plans, in the order in which they are handed in.

    card: the ModelCard. memory: `Memory`. num_kv_blocks: size of the pool, blocks 1 .. num_kv_blocks; with
    max_model_len it is the same on all ranks of the gang. The ranks of a gang start and execute plans in lock-step:
    ``groups`` wait for each other. Raises StartupError where the model, the memory or a setting does not allow a start.
    ``on_phase`` is told each phase of the start and its seconds.
    """

    def __init__(self, config: RankConfig, on_phase: OnPhase | None = None, groups: Groups | None = None):
        self.config = config
        self.groups = groups or Groups()
        self._plans: deque[StepPlan] = deque(maxlen=KEPT_PLANS)
        self._on_phase = on_phase or (lambda phase, seconds: None)
        threads.apply(config.num_threads)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        with torch.inference_mode():
            self._start()
        log.info("%s", self.describe())

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueues the step.

        An exception means that the cache may be half written: the plans are dumped, and the rank is of no more use.
        """
        self._plans.append(plan)
        began = time.perf_counter()
        try:
            outcome = self.runner.run(plan)
            return PendingStep(plan, outcome, time.perf_counter() - began)
        except Exception as error:
            self._dump(error)
            raise

    @property
    def num_kv_blocks(self) -> int:
        return self.memory.num_kv_blocks

    @property
    def held(self) -> RankMemory:
        """For others: what this rank holds."""
        memory = self.memory
        return RankMemory(
            rank=self.groups.place.rank,
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.pool_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
        )

    def describe(self) -> str:
        """One line: what share of the model, weights, KV bytes per token, blocks, and how many full requests fit."""
        memory = self.memory
        return (
            f"{self.config.served_model_name}{self._way()}{self._share()} on {self.device.type} "
            f"in {_name(self.dtype)}{self._format()}, attention by {self.backend_name}, "
            f"{torch.get_num_threads()} threads: "
            f"weights {size_text(memory.weight_bytes)}, KV {memory.kv_bytes_per_token} bytes per token, "
            f"{memory.num_kv_blocks} blocks of {memory.block_size} tokens ({size_text(memory.pool_bytes)}), "
            f"{memory.full_length_requests} requests of {memory.max_model_len} tokens fit"
        )

    def _way(self) -> str:
        spec = self.runner.model.spec
        return f", architecture {spec.architecture} through transformers (fallback)," if spec.config else ""

    def _format(self) -> str:
        """How weights are held, where that is not the dtype; and why that brings no speed here, where it does not."""
        if self.config.quantization is None:
            return ""
        slow = why_no_kernel()
        return f" with {self.config.quantization} weights" + (f" (computed as plain ones: {slow})" if slow else "")

    def _share(self) -> str:
        """Which part of the model this is, where there are several."""
        place, shard = self.groups.place, self.runner.model.shard
        if place.num_ranks == 1:
            return ""
        told = [
            f"{noun} {part.start}-{part.stop - 1} of {part.whole}"
            for noun, part in (("layers", shard.layers), ("heads", shard.heads), ("KV heads", shard.kv_heads))
        ]
        return f", rank {place.rank} of {place.num_ranks} (stage {place.pp_rank}: {', '.join(told)})"

    def _start(self) -> None:
        config = self.config
        with self._phase("open"):
            checkpoint = open_checkpoint(Path(config.model))
            spec = checkpoint.spec
            backend = select(config.attention_backend, self.device, self.dtype, spec.head_dim)
            self.backend_name = type(backend).__name__.removesuffix("Attention").lower()
            model = model_class(spec)(spec, self.dtype, self.groups)
            narrow_layers(model, checkpoint.kinds(), config.quantization, self.device)
            block_bytes = config.block_size * bytes_per_token(spec, model.shard, self.dtype)
            windows = tuple(group.window for group in kv_groups(spec))
            paging = Paging(config.block_size, windows, config.plan_budget)
            limit = None if config.rank_memory is None else int(config.rank_memory * GIB)
            needed = weight_bytes(model, self.device)
            check_weights(needed, block_bytes, limit, free_memory(self.device, self.groups.num_on_host))
            self.groups.barrier()  # nobody loads before all have seen what is free
        with self._phase("weights"):
            held_bytes = load_weights(model, checkpoint, self.device)
            self.groups.barrier()
        with self._phase("kv pool"):
            num_blocks = plan_pool(
                block_bytes,
                config.block_size,
                config.num_kv_blocks,
                config.kv_memory_share,
                free_memory(self.device, self.groups.num_on_host),
                None if limit is None else limit - held_bytes,
            )
            num_blocks = self.groups.smallest(num_blocks)
            longest = paging.longest(num_blocks, config.max_model_len or spec.max_position)
            max_model_len = fit_length(spec.max_position, config.max_model_len, longest)
            model.serve_up_to(max_model_len)
            cache = KVCache(spec, model.shard, num_blocks, config.block_size, self.dtype, self.device)
            table = SlotTable(config.max_num_seqs, max_model_len, config.block_size, len(windows), self.device)
        with self._phase("card"):
            self.card = make_card(
                checkpoint,
                name=config.served_model_name,
                dtype=_name(self.dtype),
                quantization=config.quantization,
                max_model_len=max_model_len,
                block_size=config.block_size,
            )
            beside = self.device.type == "cuda"
            samples = self.groups.place.samples
            grammars = Grammars(self.card, torch.get_num_threads(), beside) if samples else None
        self.memory = Memory(held_bytes, block_bytes, num_blocks, paging, max_model_len)
        sampler = Sampler(self.card.vocab_size, self.card.eos_ids)
        layers = layers_of(model, config.max_num_batched_tokens, self.device, self.groups)
        self.runner = Runner(model, layers, cache, backend, sampler, table, self.groups, grammars)
        with self._phase("warm-up"):
            self._warm_up()

    def _warm_up(self) -> None:
        """Makes kernels, allocators and the ways between ranks ready for the smallest and the largest steps.

        Writes go to the null block.
        """
        longest = min(self.config.max_num_batched_tokens, self.memory.max_model_len - 1)
        for rows, length in ((1, longest), (1, 1), (self.config.max_num_seqs, 1)):
            plan = warm_up_plan(rows, length)
            PendingStep(plan, self.runner.run(plan)).result()
            self.runner.run(StepPlan(step_id=0, releases=plan.chunk_slots))

    @contextmanager
    def _phase(self, name: str):
        began = time.perf_counter()
        yield
        self._on_phase(name, time.perf_counter() - began)

    def _dump(self, error: Exception) -> None:
        if self.config.dump_dir is None:
            return
        path = Path(self.config.dump_dir) / f"plans-{os.getpid()}-{self._plans[-1].step_id}.dump"
        header = DumpHeader(
            config=self.config,
            num_kv_blocks=self.memory.num_kv_blocks,
            max_model_len=self.memory.max_model_len,
            error=f"{type(error).__name__}: {error}",
        )
        write_dump(path, header, self._plans)
        log.error("step %d failed; the last %d plans are in %s", self._plans[-1].step_id, len(self._plans), path)


def warm_up_plan(rows: int, length: int) -> StepPlan:
    """``rows`` sequences of ``length`` ids, all 0, that each draw one."""
    params = SamplingParams(seed=0, temperature=1.0, top_p=0.9)
    slots = range(rows)
    return StepPlan(
        step_id=0,
        admissions=[
            SlotInit(slot=slot, epoch=0, token_ids=column([0] * length), num_prompt=length, choice=0, params=params)
            for slot in slots
        ],
        chunk_slots=column(slots),
        chunk_epochs=column([0] * rows),
        chunk_starts=column([0] * rows),
        chunk_lens=column([length] * rows),
        chunk_tokens=column([TOKEN_IN_TABLE] * rows),
        chunk_takes=column([TAKE_SAMPLE] * rows),
        chunk_writes=column([0] * rows),
        num_drafts=column([0] * rows),
    )


def resolve_device(name: str) -> torch.device:
    """Raises StartupError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"--device {name} is not a device torch knows.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"--device {name}: torch sees no CUDA device here; --device cpu would work.")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the device or our kernel computes in it, else fp32."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise StartupError(f"--dtype {name} is not known; auto, {', '.join(DTYPES)} are.")
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported()
    else:
        native = has_kernel(device) or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
