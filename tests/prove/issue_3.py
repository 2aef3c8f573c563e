"""The seven lines of issue 3: many ranks."""

import asyncio
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx

from paceline.worker.config import RankConfig
from paceline.worker.sources import resolve
from tests.bench import pipeline
from tests.bench.overhead import Overhead, overhead
from tests.e2e.engine import Bench, load
from tests.e2e.gangs import PROMPT, break_a_rank, ids_of
from tests.e2e.layouts import CELLS, LAYOUTS, Cell, compare, even_folder, reference, uneven_folder
from tests.e2e.nodes import node_of, nodes
from tests.e2e.server import run_to_its_end
from tests.models import tiny_llama_folder
from tests.prove.lines import ROOT, Line, metric, metrics, passed, run_pytest, server

SMOLLM2_CELLS = {
    "TP 2": (2, 1, Cell()),
    "TP 2, seeded, among eight": (2, 1, Cell(crowd=True, seeded=True)),
    "TP 3": (3, 1, Cell(chunk=7)),
    "TP 3, preempted": (3, 1, Cell(crowd=True, tight=True)),
    "PP 2": (1, 2, Cell()),
    "PP 2, warm cache, among eight": (1, 2, Cell(warm=True, crowd=True)),
    "TP 2 x PP 2": (2, 2, Cell(crowd=True)),
    "TP 2 x PP 2, chunks of 7, preempted, seeded": (2, 2, Cell(chunk=7, crowd=True, tight=True, seeded=True)),
}
BLOCK_SIZE_32 = (2, 2)  # the layout that runs with it too


@contextmanager
def gang(model: Path, tp: int, pp: int, **config):
    with closing(Bench(model, tensor_parallel_size=tp, pipeline_parallel_size=pp, **config)) as bench:
        yield bench


def equality() -> str:
    num_cells, difference = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("even", even_folder), ("uneven", uneven_folder)):
            model = make(Path(folder) / name)
            expected = reference(Bench(model))
            for tp, pp in LAYOUTS:
                for block_size in (16, 32) if (tp, pp) == BLOCK_SIZE_32 else (16,):
                    with gang(model, tp, pp, block_size=block_size) as bench:
                        for cell in CELLS:
                            difference = max(difference, compare(bench, expected, cell))
                            num_cells += 1
    return f"{num_cells} cells equal, logprobs differ by {difference:.1e} at most"


def smollm2_equality() -> str:
    model, difference = resolve("smollm2"), 0.0
    expected = reference(Bench(model, num_kv_blocks=2048))
    layouts: dict[tuple[int, int], list[Cell]] = {}
    for tp, pp, cell in SMOLLM2_CELLS.values():
        layouts.setdefault((tp, pp), []).append(cell)
    for (tp, pp), cells in layouts.items():
        with gang(model, tp, pp, num_kv_blocks=2048) as bench:
            for cell in cells:
                difference = max(difference, compare(bench, expected, cell))
    return f"SmolLM2: {len(SMOLLM2_CELLS)} cells equal, logprobs differ by {difference:.1e} at most"


def logits() -> str:
    """Of the ranks themselves, without an engine."""
    out = run_pytest("tests/worker/test_parallel.py", "-s", "-k", "logits or quarter or smallest or too_large")
    largest = max(map(float, re.findall(r"largest difference ([\d.e+-]+)", out)))
    return f"logits differ by {largest:.1e} at most"


def equal() -> str:
    return f"{equality()}; {smollm2_equality()}; {logits()}"


# -- memory ------------------------------------------------------------------------------------------------------------


def held(running) -> dict[str, dict[int, float]]:
    """By metric, what each rank of the server's replica holds."""
    found: dict[str, dict[int, float]] = {}
    for name, rank, value in re.findall(
        r'^paceline_engine_rank_(\w+)\{.*rank="(\d+)".*\} (\S+)$', metrics(running), re.MULTILINE
    ):
        found.setdefault(name, {})[int(rank)] = float(value)
    return found


def memory() -> str:
    out = run_pytest("tests/worker/test_parallel.py", "-k", "quarter or smallest or too_large")
    with tempfile.TemporaryDirectory() as folder:
        model = even_folder(Path(folder) / "even")
        flags = ("--model", str(model), "--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "64")
        with server(*flags) as running:
            alone = held(running)["kv_bytes_per_token"][0]
        with server(*flags, "-tp", "2", "-pp", "2") as running:
            four = held(running)
            logged = running.log.read_text()
        assert all(value <= 0.27 * alone for value in four["kv_bytes_per_token"].values()), four
        assert sorted(four["weight_bytes"]) == [0, 1, 2, 3]
        assert all(f"rank {rank} of 4" in logged for rank in range(4)), "not every rank logged what it holds"
    limit = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024", "--rank-memory", "0.55")
    refused = run_to_its_end("serve", "--port", "0", *limit)
    assert refused.returncode == 1
    (told,) = (line for line in refused.stderr.splitlines() if line.startswith("paceline:"))
    numbers = re.search(r"needs ([\d.]+ GiB).*--rank-memory is ([\d.]+ GiB)", told)
    assert numbers, told
    with server(*limit, "-tp", "2") as running, httpx.Client(base_url=running.url, timeout=120) as http:
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        text = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        assert "Paris" in text, text
        two = held(running)
        total = metric(running, "paceline_engine_kv_blocks_total")
    for rank, size in two["kv_bytes"].items():
        assert size == total * 16 * two["kv_bytes_per_token"][rank]
        room = 0.55 * 2**30 - two["weight_bytes"][rank]
        assert size <= room
    share = max(four["kv_bytes_per_token"].values()) / alone
    weights = " + ".join(f"{size / 2**20:.0f}" for size in two["weight_bytes"].values())
    return (
        f"{passed(out)}; even model, TP 2 x PP 2: {share:.2f} of the KV bytes per token each; SmolLM2 refused on one "
        f"rank (needs {numbers[1]}, limit {numbers[2]}), answers on two ({weights} MiB of weights, {total:.0f} blocks "
        "on both)"
    )


# -- nodes and faults --------------------------------------------------------------------------------------------------

NODE_FLAGS = ("--num-threads", "1", "--dtype", "float32", "--num-kv-blocks", "512", "--max-num-seqs", "8")


@contextmanager
def two_nodes(*flags: str):
    """SmolLM2-sized work is not the point here: a tiny model, a stage on each of two Ray nodes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny_llama_folder(folder / "model", max_position_embeddings=4096)
        cluster = stack.enter_context(nodes([{"num_cpus": 1}, {"num_cpus": 1}]))
        running = stack.enter_context(
            cluster.serving(folder / "log", "--model", str(model), "-pp", "2", *NODE_FLAGS, *flags)
        )
        yield cluster, running, model


def over_two_nodes() -> str:
    with two_nodes() as (cluster, running, model):
        ranks = cluster.ranks()
        assert len({node_of(rank) for rank in ranks}) == 2
        with closing(Bench(model)) as bench:
            expected = bench.run(bench.request("a", PROMPT, 24))["a", 0].ids

        async def ask() -> list[int]:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
                return await ids_of(http, PROMPT, 24)

        assert asyncio.run(ask()) == expected
    with nodes([{"num_cpus": 1}, {"num_cpus": 1}]) as cluster, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ("--model", "smollm2", "-tp", "2", "-pp", "2", "--placement-timeout", "0.5")
        with cluster.trying(log, *flags) as process:
            line = _line_of(log, "cannot place: ", process)
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return f"stages on 2 nodes give the ids of one rank; impossible: {line[line.index('cannot place') :]}"


def _line_of(log: Path, said: str, process: subprocess.Popen) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        for line in log.read_text().splitlines():
            if said in line:
                return line
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def faults() -> str:
    """Each on a service of its own: deaths in a row make the controller wait longer."""
    told = []
    for name, number, stage in (("kill -9", signal.SIGKILL, 0), ("kill -9", signal.SIGKILL, 1),
                                ("SIGSTOP", signal.SIGSTOP, 0), ("SIGSTOP", signal.SIGSTOP, 1)):  # fmt: skip
        with two_nodes("--step-timeout", "3") as (cluster, running, _):
            harm = _harm(cluster.ranks()[stage].pid, number)
            broken = asyncio.run(break_a_rank(running.url, harm, num_streams=16))
        assert broken.num_errors == len(broken.endings) == 16, broken.endings
        assert broken.seconds_to_end <= 10, broken
        assert broken.seconds_back <= 30, broken
        ended, back = broken.seconds_to_end, broken.seconds_back
        told.append(f"{name} of stage {stage}: 16 of 16 ended in {ended:.1f} s, back in {back:.1f} s")
    return "; ".join(told)


def _harm(pid: int, number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(pid, number)


# -- speed -------------------------------------------------------------------------------------------------------------


def step_overhead() -> str:
    """One thread a rank. Medians of three rounds, both numbers of ranks in each."""
    seen: dict[tuple[int, int, int], list[Overhead]] = {}
    with ExitStack() as stack:
        gangs = {}
        for tp in (1, 2):
            gangs[tp] = load(
                RankConfig(
                    model=str(resolve("smollm2")), served_model_name="m", dtype="bfloat16", max_model_len=512,
                    num_kv_blocks=1500, max_num_seqs=64, max_num_batched_tokens=2048, num_threads=1,
                    tensor_parallel_size=tp,
                )
            )  # fmt: skip
            stack.callback(gangs[tp].executor.close)
        for _ in range(3):
            for tp, loaded in gangs.items():
                for batch in (1, 64):
                    for depth in (1, 2):
                        seen.setdefault((tp, batch, depth), []).append(overhead(loaded, batch, depth))
    beside = {key: statistics.median(each.beside for each in rounds) for key, rounds in seen.items()}
    model = {key: statistics.median(each.model for each in rounds) for key, rounds in seen.items()}
    told = ", ".join(
        f"{tp} rank{'s' * (tp > 1)} batch {batch} {'on' if depth == 2 else 'off'}: {beside[tp, batch, depth]:.2f} ms "
        f"(model {model[tp, batch, depth]:.1f})"
        for tp, batch, depth in seen
    )
    assert beside[1, 1, 1] <= 0.5, told
    assert beside[1, 64, 1] <= 1.5, told
    for batch in (1, 64):
        for depth in (1, 2):
            assert beside[2, batch, depth] - beside[1, batch, 1] <= 0.4, told
    return f"beside the model, overlap off and on: {told}"


def stages() -> str:
    requests, rates = pipeline.batch(32, 100), {}
    for apart in (0.0, 0.003):
        rates[apart] = [pipeline.clock_rate(2, depth, requests, 0.02, apart) for depth in (1, 2)]
        assert rates[apart][1] >= 1.9 * rates[apart][0], rates
    asleep = ", ".join(f"{two / one:.2f} x ({what})" for (one, two), what in zip(
        rates.values(), ("at once", "one after another"), strict=True))  # fmt: skip
    return f"stages that sleep: {asleep}; SmolLM2 on two cores: {real_stages()}"


def real_stages() -> str:
    """Tokens a second of 16 sequences: one rank, and two stages with one and two plans in flight; three rounds."""
    seen: dict[str, list[float]] = {}
    config = {"dtype": "bfloat16", "num_kv_blocks": 1024}
    with gang(resolve("smollm2"), 1, 1, **config) as one, gang(resolve("smollm2"), 1, 2, **config) as two:
        for _ in range(3):
            for name, bench, depth in (("one rank", one, 1), ("one plan", two, 1), ("two plans", two, 2)):
                bench.new(depth=depth, check=False, enable_prefix_caching=False)
                requests = [bench.request(f"r{i}", [100 + i] * 16, 64) for i in range(16)]
                began = time.perf_counter()
                bench.run(*requests)
                seen.setdefault(name, []).append(16 * 64 / (time.perf_counter() - began))
    rates = {name: statistics.median(values) for name, values in seen.items()}
    return ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items())


def readme() -> str:
    text = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(r"\*\*(NCCL with more than one GPU has not run here)\*\*", text)
    assert sentence
    return f"README: {sentence[1]}"


LINES = [
    Line("3.1", "every layout gives the ids of one rank", equal),
    Line("3.2", "memory is split", memory),
    Line("3.3", "two Ray nodes", over_two_nodes),
    Line("3.4", "a rank is lost", faults),
    Line("3.5", "step overhead", step_overhead),
    Line("3.6", "stages work at the same time", stages),
    Line("3.7", "what has not run", readme),
]
