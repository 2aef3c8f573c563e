"""How much load a target takes while it stays good: what good is, and the search for the most. Sends nothing."""

import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from paceline.proto.errors import StartupError
from paceline.router.bench.figures import Figures, Record, e2es, itls, num_above_p99, ttfts
from paceline.router.bench.workloads import Job

KINDS = ("ttft", "itl", "e2e")
UNITS = {"": 1.0, "ms": 1.0, "s": 1e3}
PRECISION = 1.1  # a rate is found when the next one known to be too much is no more than this many times as much
LEAST_SHARE = 1 / 4  # of the rate to start with, below which nobody searches: slow rates take long to try


class Slo(msgspec.Struct, frozen=True):
    """Most milliseconds of the 99th percentile, by kind of time. Without failures and short answers, too."""

    limits: dict[str, float]

    def is_met(self, figures: Figures) -> bool:
        if not figures.is_whole:
            return False
        spreads = {kind: getattr(figures, f"{kind}_ms") for kind in self.limits}
        return all(spread is None or spread.p99 <= self.limits[kind] for kind, spread in spreads.items())

    def watch(self, jobs: Sequence[Job]) -> Callable[[Record], bool]:
        """Of a run of these jobs: told of each record as it ends, says whether the limits cannot be met any more,
        however fast the others are."""
        times = {"ttft": ttfts, "itl": itls, "e2e": e2es}
        most = {"ttft": len(jobs), "itl": sum(job.num_wanted - 1 for job in jobs), "e2e": len(jobs)}
        left = {kind: num_above_p99(most[kind]) for kind in self.limits}  # values above the limit, until it is lost

        def is_lost(record: Record) -> bool:
            for kind, limit in self.limits.items():
                left[kind] -= sum(value > limit for value in times[kind]([record]))
            return record.failed or record.short or min(left.values()) <= 0

        return is_lost

    def __str__(self) -> str:
        return ", ".join(f"p99 of {kind} within {limit:g} ms" for kind, limit in self.limits.items())


def parse_slo(text: str) -> Slo:
    """From ``ttft=1s,itl=100ms``; a number alone is milliseconds. Raises StartupError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(\w*)\s*", part)
        if not found or found[1] not in KINDS or found[3] not in UNITS or found[1] in limits:
            raise StartupError(f"--slo takes limits of {', '.join(KINDS)}, each once, such as ttft=1s,itl=100ms")
        limits[found[1]] = float(found[2]) * UNITS[found[3]]
    return Slo(limits)


async def highest_rate(meets: Callable[[float], Awaitable[bool]], start: float, limit: float) -> float:
    """Requests a second. Doubles or halves from ``start``, then bisects. 0 where not even a quarter of ``start`` meets;
    at most ``limit``."""
    low = high = min(start, limit)
    if await meets(high):
        while low < limit and await meets(high := min(2 * low, limit)):
            low = high
    else:
        low = high / 2
        while not await meets(low):
            high, low = low, low / 2
            if low < start * LEAST_SHARE:
                return 0.0
    while high > PRECISION * low:
        middle = (low + high) / 2
        if await meets(middle):
            low = middle
        else:
            high = middle
    return low


async def most_streams(meets: Callable[[int], Awaitable[bool]], limit: int) -> int:
    """Open at once. Doubles from one, then bisects to the last. 0 where not even one meets, at most ``limit``."""
    low, high = 0, 1
    while low < limit and await meets(high):
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if await meets(middle):
            low = middle
        else:
            high = middle
    return low
