"""What a step costs beside the model: the engine's loop, from one step's news to the next, less what the rank spent."""

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.executor import Executor, Loaded
from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto.request import TokenDelta
from paceline.proto.step import StepPlan, StepResult
from tests.cluster.engine.fakes import make_request
from tests.e2e.engine import engine_config

WARM_UP = 20  # steps that do not count


@dataclass(frozen=True)
class Overhead:
    """Medians over the steps, in milliseconds."""

    loop: float
    model: float
    beside: float  # of the differences

    def __str__(self) -> str:
        return f"{self.beside:.2f} ms beside {self.model:.1f}"


class _Timed:
    def __init__(self, executor: Executor):
        self.seconds: list[float] = []
        self._executor = executor

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self.seconds.append(result.model_seconds)
        return result

    def close(self) -> None:
        """The ranks are used again."""


def overhead(loaded: Loaded, batch: int, depth: int, steps: int = 120) -> Overhead:
    """``batch`` sequences decode together, ``depth`` plans in flight, through ``Engine.run`` on this thread."""
    executor = _Timed(loaded.executor)
    scheduler = Scheduler(
        engine_config(loaded, max_num_seqs=batch, max_num_batched_tokens=max(2048, 16 * batch), depth=depth)
    )
    news: list[float] = []

    def publish(deltas: list[TokenDelta]) -> None:
        news.append(time.perf_counter())
        if not scheduler.has_work:
            engine.stop()

    engine = Engine(scheduler, executor, publish)
    for i in range(batch):
        request = make_request(f"r{i}", 16, WARM_UP + steps, named=False, ignore_eos=True)
        engine.submit(request, lambda error: None)
    engine.run()
    loops = [after - before for before, after in pairwise(news)][WARM_UP:-2]
    models = executor.seconds[WARM_UP + 1 : WARM_UP + 1 + len(loops)]
    beside = [loop - model for loop, model in zip(loops, models, strict=True)]
    return Overhead(*(1e3 * statistics.median(values) for values in (loops, models, beside)))
