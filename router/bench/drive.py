"""Sends jobs to a target: so many at a time, or at random times. Knows neither HTTP nor engines."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.router.bench.figures import Record
from paceline.router.bench.workloads import Job, draw

WARM_UP_LEN = 8  # ids of an answer that only warms up


class Target(Protocol):
    async def ask(self, job: Job) -> Record:
        """One request to its end. What goes wrong is in the record, not raised."""

    async def close(self) -> None: ...


IsLost = Callable[[Record], bool]  # told of each request as it ends: whether that decides the run


def never(record: Record) -> bool:
    return False


async def closed_loop(
    target: Target, jobs: Sequence[Job], concurrency: int, is_lost: IsLost = never
) -> tuple[list[Record], float]:
    """``concurrency`` requests are always open, as long as there are jobs. Records, and the seconds of the run.

    Once ``is_lost``, no more are sent.
    """
    waiting, records, lost = iter(jobs), list[Record](), False

    async def client() -> None:
        nonlocal lost
        while not lost and (job := next(waiting, None)):
            records.append(await target.ask(job))
            lost = lost or is_lost(records[-1])

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
    return records, time.perf_counter() - began


async def open_loop(
    target: Target, jobs: Sequence[Job], rate: float, seed: int | str, is_lost: IsLost = never
) -> tuple[list[Record], float]:
    """A Poisson process: the times between requests are exponential, ``rate`` a second on average, whatever the target
    does, until ``is_lost`` as above. Each is sent at its own time of the clock, so that a late one does not make all
    later ones late."""
    records, lost = list[Record](), False

    async def ask(job: Job) -> None:
        nonlocal lost
        record = await target.ask(job)
        records.append(record)
        lost = lost or is_lost(record)

    rng = random.Random(f"arrivals/{seed}")
    began = due = time.perf_counter()
    asking = []
    for job in jobs:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if lost:
            break
        asking.append(asyncio.create_task(ask(job)))
        due += rng.expovariate(rate)
    await asyncio.gather(*asking)
    return records, time.perf_counter() - began


async def warm_up(target: Target, workload: str, num_jobs: int, seed: int | str, vocab_size: int) -> None:
    """Jobs of the same shape and other ids, one by one."""
    for prompt_ids, num_wanted in draw(workload, num_jobs, f"warm-up/{seed}", vocab_size):
        await target.ask(Job(prompt_ids, min(num_wanted, WARM_UP_LEN)))
