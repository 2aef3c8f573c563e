"""Sends jobs to a target: so many at a time, or at random times. Knows neither HTTP nor engines."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Protocol

from paceline.router.bench.figures import Record
from paceline.router.bench.workloads import Job, draw

WARM_UP_LEN = 8  # ids of an answer that only warms up


class Target(Protocol):
    async def ask(self, job: Job) -> Record:
        """One request to its end. What goes wrong is in the record, not raised."""

    async def close(self) -> None: ...


async def closed_loop(target: Target, jobs: Sequence[Job], concurrency: int) -> tuple[list[Record], float]:
    """``concurrency`` requests are always open, as long as there are jobs. Records, and the seconds of the run."""
    waiting = iter(jobs)

    async def client() -> list[Record]:
        return [await target.ask(job) for job in waiting]

    began = time.perf_counter()
    shares = await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
    return [record for share in shares for record in share], time.perf_counter() - began


async def open_loop(target: Target, jobs: Sequence[Job], rate: float, seed: int | str) -> tuple[list[Record], float]:
    """A Poisson process: the times between requests are exponential, ``rate`` a second on average, whatever the target
    does. Each is sent at its own time of the clock, so that a late one does not make all later ones late."""
    rng = random.Random(f"arrivals/{seed}")
    began = due = time.perf_counter()
    asking = []
    for job in jobs:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.append(asyncio.create_task(target.ask(job)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*asking)), time.perf_counter() - began


async def warm_up(target: Target, workload: str, num_jobs: int, seed: int | str, vocab_size: int) -> None:
    """Jobs of the same shape and other ids, one by one."""
    for prompt_ids, num_wanted in draw(workload, num_jobs, f"warm-up/{seed}", vocab_size):
        await target.ask(Job(prompt_ids, min(num_wanted, WARM_UP_LEN)))
