"""A whole engine in this process: rank, scheduler, loop, without wire or router. Ids in, ids out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.scheduler import Scheduler
from paceline.cluster.local import LocalExecutor
from paceline.proto import hashing
from paceline.proto.request import Request, SamplingParams, TokenDelta
from paceline.proto.step import StepPlan
from paceline.worker.config import RankConfig
from paceline.worker.rank import Rank


@dataclass
class Answer:
    """What one choice emitted, and how it ended."""

    ids: list[int] = field(default_factory=list)
    ending: TokenDelta | None = None


class _Recording(LocalExecutor):
    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


class Bench:
    """One rank, loaded once; a fresh scheduler for each run, so that its cache starts cold.

    One thread: two that spin beside another process that wants the core were seen to take ten times as long.
    """

    def __init__(self, model: Path, **config):
        defaults = {
            "dtype": "float32",
            "max_model_len": 1024,
            "num_kv_blocks": 512,
            "max_num_seqs": 16,
            "num_threads": 1,
        }
        self.rank = Rank(RankConfig(model=str(model), served_model_name="m", **(defaults | config)))
        self.card = self.rank.card
        self.new()

    def new(self, free_ids: Sequence[int] | None = None, **config) -> "Bench":
        """A cold engine. ``num_blocks`` may be fewer than the rank holds."""
        num_blocks = config.pop("num_blocks", self.rank.num_kv_blocks)
        defaults = {
            "block_size": self.card.block_size,
            "max_model_len": self.card.max_model_len,
            "eos_ids": self.card.eos_ids,
            "max_num_seqs": 16,
            "check": True,
        }
        self.scheduler = Scheduler(
            EngineConfig(num_blocks=num_blocks, **(defaults | config)), BlockPool(num_blocks, free_ids)
        )
        self.executor = _Recording(self.rank)
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
                if delta.finish_reason:
                    answer.ending = delta
        while self.scheduler.num_in_flight:
            self.scheduler.commit(self.executor.collect(), 0.0)
        return answers
