"""From what happened to each request to figures of a run. Pure; times are seconds of one clock, figures milliseconds.

ttft   time to first token: sent until the first chunk came
itl    inter-token latency: from each chunk to the next one of its request
e2e    sent until the answer was whole
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request: when it was sent, when each chunk came, and when it ended. ``num_ids`` came of ``num_wanted``."""

    prompt_len: int
    num_wanted: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_ids: int = 0
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or not self.arrivals

    @property
    def short(self) -> bool:
        return not self.failed and self.num_ids < self.num_wanted


class Spread(msgspec.Struct, frozen=True):
    """Of one kind of time, in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second of the run, over requests that did not fail. A spread is None where there was none."""

    requests: int
    failed: int
    short: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None

    @property
    def is_whole(self) -> bool:
        return not self.failed and not self.short


def figures_of(records: Sequence[Record], wall_s: float) -> Figures:
    whole = [record for record in records if not record.failed]
    output = sum(record.num_ids for record in whole)
    prompts = sum(record.prompt_len for record in whole)
    return Figures(
        requests=len(records),
        failed=len(records) - len(whole),
        short=sum(record.short for record in records),
        wall_s=wall_s,
        requests_per_s=len(whole) / wall_s,
        output_tokens_per_s=output / wall_s,
        total_tokens_per_s=(output + prompts) / wall_s,
        ttft_ms=spread_of(ttfts(whole)),
        itl_ms=spread_of(itls(whole)),
        e2e_ms=spread_of(e2es(whole)),
    )


def ttfts(records: Sequence[Record]) -> list[float]:
    return [1e3 * (record.arrivals[0] - record.sent) for record in records if not record.failed]


def itls(records: Sequence[Record]) -> list[float]:
    return [1e3 * (b - a) for record in records if not record.failed for a, b in pairwise(record.arrivals)]


def e2es(records: Sequence[Record]) -> list[float]:
    return [1e3 * (record.ended - record.sent) for record in records if not record.failed]


def num_above_p99(count: int) -> int:
    """How many of so many values have to be above a limit for p99 to be."""
    return count - _place(99, count)


def spread_of(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    in_order = sorted(values)
    p50, p90, p99 = (in_order[_place(percent, len(in_order))] for percent in PERCENTILES)
    return Spread(p50, p90, p99, in_order[-1])


def _place(percent: int, count: int) -> int:
    """Of a percentile among so many values in order."""
    return min(count - 1, count * percent // 100)


def cost_per_million(tokens_per_s: float, price_per_hour: float) -> float:
    """Of a machine that is kept as busy as it was in the run."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6
