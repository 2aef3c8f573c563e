"""Runs the real scheduler over thousands of requests with an executor that computes nothing, and counts.

Used at small counts by tests/bench and at full counts by the prover.
"""

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto.request import Request
from paceline.proto.step import TAKE_SAMPLE, StepPlan, StepResult
from tests.cluster.engine.fakes import make_request, make_scheduler

BLOCK = 16


def result_of(plan: StepPlan) -> StepResult:
    """What a model that always says 5 would answer."""
    num_ids = array("i", [int(take == TAKE_SAMPLE) for take in plan.chunk_takes])
    return StepResult(
        step_id=plan.step_id, epochs=plan.chunk_epochs, num_ids=num_ids, ids=array("i", [5] * sum(num_ids))
    )


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.commit(result_of(plan), 0.0)
    return plan


# -- iteration-level batching (Orca) -----------------------------------------------------------------------------------


def skewed(count: int, seed: int = 1) -> list[Request]:
    """The lengths of the load generator's workload of that name: prompt 32, output 8, every tenth 384."""
    rng = random.Random(seed)
    outputs = [384 if i % 10 == 9 else 8 for i in range(count)]
    return [
        make_request(f"{i:06d}", [rng.randrange(1000, 49152) for _ in range(32)], n, named=False)
        for i, n in enumerate(outputs)
    ]


def steps_with_free_seats(requests: list[Request], seats: int) -> int:
    """Everything is queued at once; whoever ends makes room in the next step."""
    scheduler = _batcher(seats)
    for request in requests:
        scheduler.add(request, 0.0)
    steps = 0
    while scheduler.has_work:
        step(scheduler)
        steps += 1
    return steps


def steps_with_whole_batches(requests: list[Request], seats: int) -> int:
    """The same scheduler, but requests are handed to it only when the batch before has ended."""
    scheduler, steps = _batcher(seats), 0
    for first in range(0, len(requests), seats):
        for request in requests[first : first + seats]:
            scheduler.add(request, 0.0)
        while scheduler.has_work:
            step(scheduler)
            steps += 1
    return steps


def _batcher(seats: int) -> Scheduler:
    return make_scheduler(seats * 32, max_num_seqs=seats, max_num_batched_tokens=4096, check=False)


# -- paging ------------------------------------------------------------------------------------------------------------


@dataclass
class Paging:
    """Means over steps of a pool that is always full."""

    live_share: float  # live tokens / (referenced blocks x 16)
    running: float
    shared_share: float  # blocks saved by sharing, of those that sequences list
    live_tokens: float


def exponential(rng: random.Random, mean: float, most: int) -> int:
    return min(most, max(1, round(rng.expovariate(1 / mean))))


def exponential_requests(seed: int, cap: int, n: int) -> Iterator[Request]:
    """Mean 161 tokens in, 338 out (the means of ShareGPT in Kwon et al. 2023), at most ``cap`` together."""
    rng, index = random.Random(seed), 0
    while True:
        prompt = exponential(rng, 161, cap - 1)
        ids = [rng.randrange(49152) for _ in range(prompt)]
        yield make_request(f"{index:06d}", ids, exponential(rng, 338, cap - prompt), n=n)
        index += 1


def page(
    *,
    num_blocks: int,
    seats: int,
    steps: int,
    warm_up: int,
    cap: int = 2048,
    n: int = 1,
    caching: bool = False,
    seed: int = 1,
) -> Paging:
    """Keeps more requests waiting than fit, and looks after every step."""
    scheduler = make_scheduler(
        num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=4096,
        max_model_len=cap,
        enable_prefix_caching=caching,
        check=False,
    )
    source = exponential_requests(seed, cap, n)
    shares, running, saved, tokens = [], [], [], []
    for index in range(warm_up + steps):
        while len(scheduler.waiting) < 32:
            scheduler.add(next(source), 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        if index >= warm_up:
            listed = sum(len(block_ids) for seq in scheduler.running for block_ids in seq.block_ids)
            live = sum(seq.num_planned for seq in scheduler.running)
            referenced = scheduler.pool.num_referenced
            shares.append(live / ((referenced if n == 1 else listed) * BLOCK))
            tokens.append(live)
            running.append(len(scheduler.running))
            saved.append(1 - referenced / max(listed, referenced))
        scheduler.commit(result_of(plan), 0.0)
    scheduler.check()
    return Paging(*map(statistics.fmean, (shares, running, saved, tokens)))


def reserve(*, num_blocks: int, steps: int, warm_up: int, cap: int = 2048, seed: int = 1) -> Paging:
    """The same requests where each holds ``cap`` tokens from its start: as many run as such reservations fit, so
    ``live_share`` counts against the whole pool."""
    seats = num_blocks * BLOCK // cap
    paged = page(num_blocks=num_blocks, seats=seats, steps=steps, warm_up=warm_up, cap=cap, seed=seed)
    return Paging(paged.live_tokens / (seats * cap), paged.running, 0.0, paged.live_tokens)


# -- the scheduler's own cost ------------------------------------------------------------------------------------------


def decode_cost(
    num_seqs: int, steps: int, *, evict: bool = True, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median seconds of schedule + commit with ``num_seqs`` sequences that all decode.

    Between the calls 64 MiB are copied, as a model's step in between would evict the scheduler's data from the caches.
    """
    scheduler = make_scheduler(
        num_seqs * 40, max_num_seqs=num_seqs, max_num_batched_tokens=max(8192, num_seqs), check=False
    )
    for i in range(num_seqs):
        scheduler.add(make_request(f"{i:05d}", 100, 500), 0.0)
    source, target = bytes(64 << 20), bytearray(64 << 20)
    costs = []
    while len(costs) < steps:
        if evict:
            target[:] = source
        started = clock()
        plan = scheduler.schedule(0.0)
        cost = clock() - started
        assert plan is not None
        result = result_of(plan)
        if evict:
            target[:] = source
        started = clock()
        scheduler.commit(result, 0.0)
        cost += clock() - started
        if len(plan.chunk_slots) == plan.num_tokens == num_seqs:
            costs.append(cost)
    return statistics.median(costs)
