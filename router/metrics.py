"""What the router counts, and what replicas count as their loads tell it, for Prometheus. One registry, passed around.

No label holds anything that a client may choose. A metric that fails is logged and never touches a request.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.proto.request import Usage
from paceline.router.link import Link

log = logging.getLogger("paceline.router")

GAUGES = {
    "requests_running": ("running", "Sequences in the batch."),
    "requests_waiting": ("waiting", "Sequences that wait for a place."),
    "queued_tokens": ("queued_tokens", "Tokens that waiting and prefilling sequences still need computed."),
    "kv_blocks_used": ("blocks_used", "KV blocks that a sequence holds; cached ones are not among them."),
    "kv_blocks_total": ("blocks_total", "KV blocks in the pool."),
}
RANK_GAUGES = {
    "rank_weight_bytes": ("weight_bytes", "Weights that a rank holds."),
    "rank_kv_bytes": ("kv_bytes", "KV cache that a rank holds: its share of the whole pool."),
    "rank_kv_bytes_per_token": ("kv_bytes_per_token", "KV cache that a token takes on a rank."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of admitted requests, once per prompt."),
    "cached_prompt_tokens": ("cached_prompt_tokens_total", "Prompt tokens taken from the prefix cache."),
    "generation_tokens": ("generation_tokens_total", "Tokens generated, all choices."),
    "computed_tokens": ("computed_tokens_total", "Tokens that went through the model."),
    "recomputed_tokens": ("recomputed_tokens_total", "Tokens computed again after a preemption."),
    "preemptions": ("preemptions_total", "Sequences that lost their blocks for a while."),
    "block_copies": ("block_copies_total", "KV blocks copied when choices part."),
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class EngineCollector:
    """Reads the replicas' last loads, and what they said of their ranks, when it is scraped."""

    def __init__(self, links: Callable[[], Sequence[Link]], start_seconds: Mapping[str, float]):
        self._links = links
        self._start_seconds = start_seconds  # of this process and what it started

    def describe(self) -> list[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        loads = [([link.card.name, link.replica_id], link.load) for link in self._links()]
        labels = ["model_name", "replica_id"]
        for name, (attribute, about) in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"paceline_engine_{name}", about, labels=labels), loads, attribute)
        for name, (attribute, about) in COUNTERS.items():
            yield _filled(CounterMetricFamily(f"paceline_engine_{name}", about, labels=labels), loads, attribute)
        ranks = [
            ([link.card.name, link.replica_id, str(rank.rank)], rank) for link in self._links() for rank in link.ranks
        ]
        for name, (attribute, about) in RANK_GAUGES.items():
            yield _filled(
                GaugeMetricFamily(f"paceline_engine_{name}", about, labels=[*labels, "rank"]), ranks, attribute
            )
        started = GaugeMetricFamily(
            "paceline_start_seconds", "Seconds that each phase of a start took.", labels=["replica_id", "phase"]
        )
        starts = [("", self._start_seconds), *((link.replica_id, link.start_seconds) for link in self._links())]
        for replica_id, phases in starts:
            for phase, seconds in phases.items():
                started.add_metric([replica_id, phase], seconds)
        yield started
        ready = GaugeMetricFamily("paceline_router_replica_ready", "1: it takes requests. 0: it drains.", labels=labels)
        for link in self._links():
            ready.add_metric([link.card.name, link.replica_id], link.usable)
        yield ready
        usable = sum(link.usable for link in self._links())
        yield GaugeMetricFamily("paceline_router_replicas_ready", "Replicas that take requests.", value=usable)


def _filled(family: Any, rows: list[tuple[list[str], Any]], attribute: str) -> Metric:
    for labels, row in rows:
        family.add_metric(labels, getattr(row, attribute))
    return family


class Metrics:
    """The router's own. Times are seconds."""

    def __init__(self, links: Callable[[], Sequence[Link]], num_open: Callable[[], int] = lambda: 0):
        self.registry = prometheus_client.CollectorRegistry()
        self._start_seconds: dict[str, float] = {}
        self.registry.register(EngineCollector(links, self._start_seconds))
        registry = self.registry
        self._requests = prometheus_client.Counter(
            "paceline_router_requests", "Requests answered.", ["route", "code"], registry=registry
        )
        self._in_flight = prometheus_client.Gauge(
            "paceline_router_in_flight", "Requests being answered.", registry=registry
        )
        self._ttft = prometheus_client.Histogram(
            "paceline_router_ttft_seconds", "To the first text.", ["route"], buckets=_SECONDS, registry=registry
        )
        self._itl = prometheus_client.Histogram(
            "paceline_router_itl_seconds", "Between news of one request.", ["route"], buckets=_GAPS, registry=registry
        )
        self._e2e = prometheus_client.Histogram(
            "paceline_router_e2e_seconds", "To the last byte.", ["route"], buckets=_SECONDS, registry=registry
        )
        self._tokens = prometheus_client.Counter(
            "paceline_router_tokens", "Tokens of finished requests.", ["kind"], registry=registry
        )
        self._broken = prometheus_client.Counter(
            "paceline_router_broken_streams", "Streams that ended with an error event.", ["code"], registry=registry
        )

        open_choices = prometheus_client.Gauge(
            "paceline_router_open_choices", "Choices of requests that were let in.", registry=registry
        )
        open_choices.set_function(num_open)
        self._shed = prometheus_client.Counter(
            "paceline_router_shed", "Requests ended for want of place or time.", ["reason"], registry=registry
        )
        self._moved = prometheus_client.Counter(
            "paceline_router_moved", "Prompts that another replica took over.", registry=registry
        )

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def started(self, phase: str, seconds: float) -> None:
        """A phase of this process's own start is done."""
        self._start_seconds[phase] = seconds

    def began(self) -> None:
        self._safely(self._in_flight.inc)

    def ended(self, route: str, status: int, seconds: float) -> None:
        self._safely(self._in_flight.dec)
        self._safely(lambda: self._requests.labels(route, str(status)).inc())
        self._safely(lambda: self._e2e.labels(route).observe(seconds))

    def first_text(self, route: str, seconds: float) -> None:
        self._safely(lambda: self._ttft.labels(route).observe(seconds))

    def gaps(self, route: str, seconds: Sequence[float]) -> None:
        """All of one request at once: this is not worth doing per token."""
        self._safely(lambda: [*map(self._itl.labels(route).observe, seconds)])

    def finished(self, usage: Usage) -> None:
        self._safely(lambda: self._tokens.labels("prompt").inc(usage.num_prompt))
        self._safely(lambda: self._tokens.labels("cached").inc(usage.num_cached))
        self._safely(lambda: self._tokens.labels("generated").inc(usage.num_generated))

    def broke(self, code: str) -> None:
        self._safely(lambda: self._broken.labels(code).inc())

    def shed(self, reason: str) -> None:
        self._safely(lambda: self._shed.labels(reason).inc())

    def moved(self, num_prompts: int) -> None:
        self._safely(lambda: self._moved.inc(num_prompts))

    @staticmethod
    def _safely(record: Callable[[], object]) -> None:
        try:
            record()
        except Exception:
            log.exception("a metric could not be recorded")
