"""The loads under which servers are compared, one a row of the table, and what counts of each."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from paceline.router.bench.drive import closed_loop, open_loop, warm_up
from paceline.router.bench.figures import Record, figures_of
from paceline.router.bench.goodput import highest_rate, parse_slo
from paceline.router.bench.server import ServerTarget
from paceline.router.bench.workloads import draw
from tests.bench.servers import NAME, Running

VOCAB_SIZE = 49_152
WEAR_SECONDS, WEAR_PROMPTS = 30, 66
SLO = parse_slo("ttft=1s,itl=100ms")

Values = dict[str, float]  # by the figure's name


@dataclass(frozen=True)
class Row:
    """One load. ``figures``: what counts of it, with the text of the table and whether more is better."""

    name: str
    workload: str
    concurrency: int
    num_requests: int
    figures: tuple[tuple[str, str, bool], ...]

    def measure(self, server: Running, number: int) -> Values:
        records, seconds = uvloop.run(self._run(server, f"{self.name}/{number}"))
        figures = figures_of(records, seconds)
        if not figures.is_whole:
            told = next((record.error for record in records if record.error), "short answers")
            raise RuntimeError(f"{self.name} on {server.name}: {figures.failed} failed, {figures.short} short: {told}")
        known = {
            "output": figures.output_tokens_per_s,
            "total": figures.total_tokens_per_s,
            "requests": figures.requests_per_s,
            "itl_p99": figures.itl_ms.p99 if figures.itl_ms else 0.0,
            "itl_max": figures.itl_ms.max if figures.itl_ms else 0.0,
        }
        return {name: known[name] for name, _, _ in self.figures}

    async def _run(self, server: Running, seed: str) -> tuple[list[Record], float]:
        target = ServerTarget(server.url, NAME)
        await warm_up(target, self.workload, 2, seed, VOCAB_SIZE)
        records, seconds = await closed_loop(
            target, draw(self.workload, self.num_requests, seed, VOCAB_SIZE), self.concurrency
        )
        await target.close()
        return records, seconds


def wear_in(server: Running) -> None:
    """Prompts for half a minute, or as many as fill the cache of ours once: its memory comes from the system when it is
    first used, that of others at their start, and a server that has run for a minute is what is compared."""

    async def ask_for_all() -> None:
        target = ServerTarget(server.url, NAME)
        with suppress(TimeoutError):
            async with asyncio.timeout(WEAR_SECONDS):
                await closed_loop(target, draw("prefill", WEAR_PROMPTS, "wear", VOCAB_SIZE), 8)
        # Its answer ends the last step of those that were given up: vLLM takes a paused step for one that hangs.
        await warm_up(target, "prefill", 1, "worn", VOCAB_SIZE)
        await target.close()

    uvloop.run(ask_for_all())


class Goodput(Row):
    """The most requests a second within SLO."""

    def measure(self, server: Running, number: int) -> Values:
        return {"goodput": uvloop.run(self._search(server, number))}

    async def _search(self, server: Running, number: int) -> float:
        target = ServerTarget(server.url, NAME)
        tried = 0

        async def meets(rate: float) -> bool:
            nonlocal tried
            tried += 1
            seed = f"{self.name}/{number}/{tried}"
            jobs = draw(self.workload, self.num_requests, seed, VOCAB_SIZE)
            records, seconds = await open_loop(target, jobs, rate, seed, SLO.watch(jobs))
            return SLO.is_met(figures_of(records, seconds))

        await warm_up(target, self.workload, 2, f"{self.name}/{number}", VOCAB_SIZE)
        rate = await highest_rate(meets, start=1.0, limit=self.num_requests)
        await target.close()
        return rate


ROWS = (
    Row("decode-1", "decode", 1, 2, (("output", "decode, 1 stream, tokens/s", True),)),
    Row("decode-16", "decode", 16, 16, (("output", "decode, 16 streams, tokens/s", True),)),
    Row("prefill", "prefill", 4, 12, (("total", "prefill of 1,024-token prompts, 4 at once, tokens/s", True),)),
    Row("steady-16", "steady", 16, 48, (("output", "steady, 16 streams, output tokens/s", True),)),
    Row("steady-64", "steady", 64, 96, (("output", "steady, 64 streams, output tokens/s", True),)),
    Row("shared", "shared", 16, 64, (("output", "shared prefix, 16 streams, output tokens/s", True),)),
    Row(
        "mixed",
        "mixed",
        16,
        48,
        (
            ("output", "mixed, 16 streams, output tokens/s", True),
            ("itl_p99", "mixed, between tokens, p99, ms", False),
            ("itl_max", "mixed, between tokens, longest, ms", False),
        ),
    ),
    Goodput("goodput", "steady", 0, 24, (("goodput", f"goodput, {SLO}, requests/s", True),)),
)
BY_NAME = {row.name: row for row in ROWS}

# In process, for OpenVINO GenAI has no server here, in the order of what its script prints:
# (which tokens count, text, workload, requests at once).
IN_PROCESS = (
    ("output", "decode, 1 sequence, tokens/s", "decode", 1),
    ("output", "decode, 16 sequences, tokens/s", "decode", 16),
    ("total", "prefill, 4 prompts, tokens/s", "prefill", 4),
)
