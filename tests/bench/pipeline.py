"""A pipeline whose stages only take time, under the real scheduler and engine: steps a second by plans in flight.

In clock time (threads that sleep, the whole engine loop) for the prover; in virtual time, where nothing can be late,
for the tests.
"""

import queue
import threading
import time
from collections import deque

from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto.errors import PacelineError
from paceline.proto.request import Request, TokenDelta
from paceline.proto.step import StepPlan, StepResult
from tests.bench.simulate import result_of
from tests.cluster.engine.fakes import make_request, make_scheduler


def batch(num_requests: int, num_tokens: int) -> list[Request]:
    """Prompts of 16 ids, with answers of one length."""
    return [make_request(f"r{i}", 16, num_tokens, ignore_eos=True) for i in range(num_requests)]


def staged_scheduler(num_stages: int, depth: int) -> Scheduler:
    return make_scheduler(
        4096, num_stages=num_stages, depth=depth, max_num_seqs=64, max_num_batched_tokens=4096, check=False
    )


class VirtualStages:
    """An executor whose clock moves only with the work: a stage takes one unit a plan, and nothing else takes any."""

    def __init__(self, num_stages: int):
        self.now = 0.0
        self._free_at = [0.0] * num_stages
        self._done: deque[tuple[float, StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        at = self.now
        for stage, free_at in enumerate(self._free_at):
            at = self._free_at[stage] = max(at, free_at) + 1.0
        self._done.append((at, result_of(plan)))

    def collect(self) -> StepResult:
        at, result = self._done.popleft()
        self.now = max(self.now, at)
        return result

    def close(self) -> None:
        self._done.clear()


class SleepingStages:
    """An executor of as many threads as stages, each of which sleeps for ``seconds`` a plan and hands it on."""

    def __init__(self, num_stages: int, seconds: float):
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(num_stages + 1)]
        for stage in range(num_stages):
            threading.Thread(target=self._work, args=(stage, seconds), daemon=True).start()

    def _work(self, stage: int, seconds: float) -> None:
        while (plan := self._queues[stage].get()) is not None:
            time.sleep(seconds)
            self._queues[stage + 1].put(plan)
        self._queues[stage + 1].put(None)

    def submit(self, plan: StepPlan) -> None:
        self._queues[0].put(plan)

    def collect(self) -> StepResult:
        return result_of(self._queues[-1].get())

    def close(self) -> None:
        self._queues[0].put(None)


def virtual_rate(num_stages: int, depth: int, requests: list[Request]) -> float:
    """Steps per unit of time for a batch that arrives all at once."""
    scheduler, stages = staged_scheduler(num_stages, depth), VirtualStages(num_stages)
    for request in requests:
        scheduler.add(request, 0.0)
    num_steps = 0
    while scheduler.has_work or scheduler.num_in_flight:
        while scheduler.num_in_flight < depth and (plan := scheduler.schedule(stages.now)):
            stages.submit(plan)
            num_steps += 1
        scheduler.commit(stages.collect(), stages.now)
    return num_steps / stages.now


def clock_rate(num_stages: int, depth: int, requests: list[Request], seconds: float, apart: float = 0.0) -> float:
    """Steps a second of a whole engine; requests arrive ``apart`` seconds after each other."""
    scheduler, endings, done = staged_scheduler(num_stages, depth), [], threading.Event()
    times: list[float] = []

    def publish(deltas: list[TokenDelta]) -> None:
        times.append(time.perf_counter())
        endings.extend(delta for delta in deltas if delta.finish_reason)
        if len(endings) == len(requests):
            done.set()

    def refused(error: PacelineError | None) -> None:
        assert error is None, error

    engine = Engine(scheduler, SleepingStages(num_stages, seconds), publish)
    thread = threading.Thread(target=engine.run)
    if not apart:
        for request in requests:
            engine.submit(request, refused)
    thread.start()
    for request in requests if apart else ():
        engine.submit(request, refused)
        time.sleep(apart)
    assert done.wait(300)
    engine.stop()
    thread.join()
    middle = times[len(times) // 10 : -len(times) // 10]  # neither filling nor emptying
    return (len(middle) - 1) / (middle[-1] - middle[0])
