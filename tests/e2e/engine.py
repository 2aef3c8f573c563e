"""A whole engine in this process, without wire or router: ids in, ids out. One rank runs in it, several beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.executor import Executor, Loaded
from paceline.cluster.engine.scheduler import Scheduler
from paceline.cluster.local import load_local
from paceline.cluster.spawn import load_children
from paceline.proto import hashing
from paceline.proto.request import Request, SamplingParams, TokenDelta, TokenLogprobs
from paceline.proto.step import StepPlan
from paceline.worker.config import RankConfig


@dataclass
class Answer:
    """What one choice emitted, and how it ended."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ending: TokenDelta | None = None


def load(rank: RankConfig) -> Loaded:
    """In this process, or as child processes of it."""
    if rank.num_ranks == 1:
        return load_local(rank, _no_phase)
    return load_children(ReplicaConfig(rank=rank, start_timeout=300), _no_phase)


def engine_config(loaded: Loaded, **config) -> EngineConfig:
    card = loaded.card
    defaults = {
        "num_blocks": loaded.num_blocks,
        "block_size": card.block_size,
        "windows": card.windows,
        "max_model_len": card.max_model_len,
        "eos_ids": card.eos_ids,
        "depth": loaded.depth,
        "target_itl": 0.0,  # what is in a step then does not depend on the machine
    }
    return EngineConfig(**(defaults | config))


def _no_phase(phase: str, seconds: float) -> None:
    pass


class _Recording:
    """An executor that keeps the plans that went through it."""

    def __init__(self, executor: Executor):
        self.plans: list[StepPlan] = []
        self._executor = executor
        self.collect, self.close = executor.collect, executor.close

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._executor.submit(plan)


class Bench:
    """Ranks, loaded once; a fresh scheduler for each run, so that its cache starts cold.

    One thread each: two that spin beside another process that wants the core were seen to take ten times as long.
    """

    def __init__(self, model: Path, **config):
        defaults = {
            "dtype": "float32",
            "max_model_len": 1024,
            "num_kv_blocks": 512,
            "max_num_seqs": 16,
            "num_threads": 1,
        }
        rank = RankConfig(model=str(model), served_model_name="m", **(defaults | config))
        self.loaded = load(rank)
        self.card = self.loaded.card
        self._num_stages = rank.pipeline_parallel_size
        self.new()

    def close(self) -> None:
        self.loaded.executor.close()

    def new(self, free_ids: Sequence[int] | None = None, **config) -> "Bench":
        """A cold engine. ``num_blocks`` may be fewer than the ranks hold."""
        num_blocks = config.pop("num_blocks", self.loaded.num_blocks)
        config = {"num_blocks": num_blocks, "max_num_seqs": 16, "num_stages": self._num_stages, "check": True} | config
        self.scheduler = Scheduler(engine_config(self.loaded, **config), BlockPool(num_blocks, free_ids))
        self.executor = _Recording(self.loaded.executor)
        self.engine = Engine(self.scheduler, self.executor, publish=lambda deltas: None)
        return self

    def request(self, name: str, prompt_ids: list[int], max_tokens: int, **params) -> Request:
        root = hashing.root_of(self.card)
        defaults = {"seed": 1, "temperature": 0.0, "ignore_eos": True}
        return Request(
            request_id=name,
            prompt_ids=prompt_ids,
            params=SamplingParams(max_tokens=max_tokens, **(defaults | params)),
            cache_root=root,
            block_hashes=hashing.prompt_hashes(root, prompt_ids, self.card.block_size),
        )

    def run(self, *requests: Request) -> dict[tuple[str, int], Answer]:
        """All at once, to their ends."""
        answers: dict[tuple[str, int], Answer] = {}
        for request in requests:
            self.scheduler.add(request, 0.0)
        while self.scheduler.has_work:
            for delta in self.engine.step():
                answer = answers.setdefault((delta.request_id, delta.choice), Answer())
                answer.ids += delta.ids
                answer.logprobs += delta.logprobs or []
                answer.prompt_logprobs += delta.prompt_logprobs or []
                if delta.finish_reason:
                    answer.ending = delta
        while self.scheduler.num_in_flight:
            self.scheduler.commit(self.executor.collect(), 0.0)
        return answers
