"""`paceline bench`: measures a target, prints a table, writes JSON and a plot. What it measures is handed to it.

Every run has prompts of its own, so that no prefix cache knows them; a warm-up comes before the first.
"""

import itertools
import json
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.proto.errors import StartupError
from paceline.router.bench.config import BenchConfig
from paceline.router.bench.drive import IsLost, Target, closed_loop, never, open_loop, warm_up
from paceline.router.bench.figures import PERCENTILES, Figures, Record, Spread, cost_per_million, figures_of
from paceline.router.bench.goodput import Slo, highest_rate, most_streams, parse_slo
from paceline.router.bench.plot import plot_goodput, plot_run, require_matplotlib
from paceline.router.bench.workloads import Job, draw

DEFAULT_VOCAB_SIZE = 32_000  # nearly every model has as many ids
RATE, STREAMS = "requests a second", "streams"


def check(config: BenchConfig) -> None:
    """Before a model is loaded. Raises StartupError for what cannot be done."""
    if config.slo:
        parse_slo(config.slo)
    if config.plot:
        require_matplotlib()


class Bench:
    """``run`` returns the exit status: 1 where a request failed or an answer was short, or nothing met the limits.

    ``model`` is its name, for the table. ``vocab_size``: of the model, where it is known; the config's goes first.
    """

    def __init__(
        self, config: BenchConfig, console: Console, target: Target, model: str, vocab_size: int | None = None
    ):
        self._config = config
        self._console = console
        self._target = target
        self._model = model
        self._vocab_size = config.vocab_size or vocab_size or DEFAULT_VOCAB_SIZE
        self._slo = parse_slo(config.slo) if config.slo else None
        self._numbers = itertools.count(1)  # of runs: each has its own prompts
        self._probes: list[tuple[str, float, Figures]] = []

    async def run(self) -> int:
        config = self._config
        try:
            await warm_up(self._target, config.workload, config.num_warmups, config.seed, self._vocab_size)
            return await (self._measure() if self._slo is None else self._search(self._slo))
        finally:
            await self._target.close()

    async def _measure(self) -> int:
        config = self._config
        if config.rate is None:
            figures, records = await self._closed(config.concurrency)
        else:
            figures, records = await self._open(config.rate)
        self._console.print(self._table(figures))
        if told := next((record.error or "no token came" for record in records if record.failed), None):
            self._console.print(f"first error: {told}", markup=False, soft_wrap=True)
        self._write_json({"figures": self._builtins(figures)})
        if config.plot:
            plot_run(config.plot, self._title(), records)
        return 0 if figures.is_whole else 1

    async def _search(self, slo: Slo) -> int:
        config = self._config

        async def rate_meets(rate: float) -> bool:
            figures, _ = await self._open(rate)
            return self._judge(slo, RATE, rate, figures)

        async def streams_meet(count: int) -> bool:
            figures, _ = await self._closed(count)
            return self._judge(slo, STREAMS, count, figures)

        streams = await most_streams(streams_meet, limit=config.num_requests)
        alone = self._probes[0][2].requests_per_s  # one at a time
        rate = await highest_rate(rate_meets, start=alone, limit=config.num_requests) if streams else 0.0
        for kind, amount in ((RATE, rate), (STREAMS, streams)):
            for figures in [f for name, tried, f in self._probes if (name, tried) == (kind, amount)]:
                self._console.print(self._table(figures, f"{amount:.3g} {kind}"))
        self._console.print(f"goodput with {slo}: {rate:.3g} {RATE}; {streams} {STREAMS} at once")
        probes = [
            {"load": kind, "amount": amount, "meets": slo.is_met(figures), "figures": self._builtins(figures)}
            for kind, amount, figures in self._probes
        ]
        found = {"limits_ms": slo.limits, "requests_per_s": rate, "streams": streams, "probes": probes}
        self._write_json({"goodput": found})
        if config.plot:
            plot_goodput(config.plot, self._title(), slo, self._probes)
        return 0 if rate and streams else 1

    def _judge(self, slo: Slo, kind: str, amount: float, figures: Figures) -> bool:
        self._probes.append((kind, amount, figures))
        met = slo.is_met(figures)
        tails = ", ".join(f"{name} {_ms(getattr(figures, f'{name}_ms'), 'p99')} ms" for name in slo.limits)
        self._console.print(f"{amount:.3g} {kind}: p99 {tails}: {'met' if met else 'not met'}")
        return met

    async def _closed(self, concurrency: int) -> tuple[Figures, list[Record]]:
        jobs = self._jobs()
        records, seconds = await closed_loop(self._target, jobs, concurrency, self._is_lost(jobs))
        return figures_of(records, seconds), records

    async def _open(self, rate: float) -> tuple[Figures, list[Record]]:
        jobs = self._jobs()
        records, seconds = await open_loop(self._target, jobs, rate, self._config.seed, self._is_lost(jobs))
        return figures_of(records, seconds), records

    def _is_lost(self, jobs: list[Job]) -> IsLost:
        """A search goes on as soon as a probe is decided."""
        return self._slo.watch(jobs) if self._slo else never

    def _jobs(self) -> list[Job]:
        config = self._config
        return draw(config.workload, config.num_requests, f"{config.seed}/{next(self._numbers)}", self._vocab_size)

    # -- what is told ----------------------------------------------------------------------------------------------

    def _title(self) -> str:
        config = self._config
        load = f"{config.rate:g} {RATE}" if config.rate else f"{config.concurrency} {STREAMS}"
        where = "engine in this process" if config.engine else config.url
        return f"{self._model} on {where}: {config.workload}" + ("" if self._slo else f", {load}")

    def _table(self, figures: Figures, load: str = "") -> Table:
        table = Table(title=load or self._title(), title_justify="left")
        for name in ("ms", *(f"p{p}" for p in PERCENTILES), "max"):
            table.add_column(name, justify="left" if name == "ms" else "right")
        spreads = {
            "time to first token": figures.ttft_ms,
            "between tokens": figures.itl_ms,
            "whole answer": figures.e2e_ms,
        }
        for name, spread in spreads.items():
            table.add_row(name, *(_ms(spread, column) for column in ("p50", "p90", "p99", "max")))
        table.caption = "\n".join(self._lines(figures))
        table.caption_justify = "left"
        return table

    def _lines(self, figures: Figures) -> list[str]:
        lines = [
            f"{figures.requests} requests in {figures.wall_s:.1f} s, {figures.failed} failed, {figures.short} short",
            f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} output tokens/s, "
            f"{figures.total_tokens_per_s:.1f} with prompts",
        ]
        if costs := self._costs(figures):
            lines.append(f"{costs['output']:.2f} per million output tokens, {costs['total']:.2f} with prompts")
        return lines

    def _costs(self, figures: Figures) -> dict[str, float] | None:
        """Of a million tokens; None without a price, and without a token."""
        price = self._config.price_per_hour
        if price is None or not figures.output_tokens_per_s:
            return None
        rates = {"output": figures.output_tokens_per_s, "total": figures.total_tokens_per_s}
        return {name: cost_per_million(rate, price) for name, rate in rates.items()}

    def _builtins(self, figures: Figures) -> dict[str, Any]:
        return msgspec.to_builtins(figures) | {"cost_per_million_tokens": self._costs(figures)}

    def _write_json(self, found: dict[str, Any]) -> None:
        path = self._config.json
        if not path:
            return
        told = {"model": self._model, "config": msgspec.to_builtins(self._config)} | found
        try:
            with open(path, "w") as file:
                json.dump(told, file, indent=1)
        except OSError as error:
            raise StartupError(f"--json {path} cannot be written: {error.strerror}") from error


def _ms(spread: Spread | None, column: str) -> str:
    return "-" if spread is None else f"{getattr(spread, column):,.1f}"
