"""The six lines of issue 5: the contract with clients."""

import asyncio
import re
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx

from paceline.worker.sources import resolve
from tests.bench import router as router_bench
from tests.bench.grammar import grammar_cost
from tests.cases.stack import Stack, stack
from tests.e2e.engine import Bench
from tests.e2e.equality import eighty_requests
from tests.e2e.schemas import schemas
from tests.e2e.server import PACELINE
from tests.e2e.structured import obey
from tests.e2e.test_structured import noise
from tests.models import tiny_llama_folder
from tests.prove.issue_2 import with_grpc
from tests.prove.lines import Line, passed, run_pytest, server

CASES = {1, 2, 4, 5, 6, 8, 9, 11, 12, 14, 15, 16, 18, 20, 21, 23, 24, 26, 27, 30, 33, 34, 35, 36, 37, 38}
REFUSED = ({"max_tokens": -1}, {"max_tokens": 10**9}, {"max_tokens": "5"}, {"n": 0}, {"n": 10**6}, {"n": -1})
HOSTILE = ("(a{1,999}){1,999}", "foo**", "(.{1,90}a.{1,90}b){1,90}", "((x+x+)+y){50}", "(?s:.*)a(?s:.{5000})")


def cases() -> str:
    output = run_pytest("tests/cases", "-rp")
    counts: dict[int, int] = {}
    for number in re.findall(r"^PASSED .*::test_case_(\d+)_", output, re.MULTILINE):
        counts[int(number)] = counts.get(int(number), 0) + 1
    assert set(counts) >= CASES, CASES - set(counts)
    with tiny() as running:
        slowest = max(_refusal(running, fields) for fields in REFUSED)
    assert slowest < 0.1, f"a refusal took {1000 * slowest:.0f} ms"
    shown = f"{len(counts)} cases, {sum(counts.values())} tests"
    return f"{shown}; the slowest refusal of case 23 took {1000 * slowest:.1f} ms"


def tiny() -> Stack:
    folder = Path(tempfile.mkdtemp())
    return Stack(tiny_llama_folder(folder / "tiny", seed=3), None, 1, {}, {}, {})


def _refusal(running: Stack, fields: dict) -> float:
    began = time.monotonic()
    running.refused("/v1/completions", prompt=[5], **fields)
    return time.monotonic() - began


def clients() -> str:
    return passed(run_pytest("tests/clients"))


def anything() -> str:
    output = run_pytest("tests/router/test_fuzz.py", "-s", env={"PACELINE_EXAMPLES": "10000"})
    live = re.search(r"slowest answer of /health/live: \d+ ms", output)
    assert live
    return f"10,000 requests over HTTP and gRPC: no 5xx, no traceback, nothing left; {live[0]}"


def equality() -> str:
    with with_grpc() as (running, address):
        return asyncio.run(eighty_requests(running.url, address))


def structured() -> str:
    with server("--max-model-len", "1024") as running:
        real = asyncio.run(obey(running.url, schemas(200), max_tokens=200, temperature=0.7))
    folder = Path(tempfile.mkdtemp())
    with stack(tiny_llama_folder(folder / "tiny"), script=noise, rank={"num_kv_blocks": 128}) as running:
        noisy = asyncio.run(obey(running.url, schemas(200), max_tokens=150, temperature=1))
        running.at_rest()
    bench = Bench(resolve("smollm2"), dtype="bfloat16", num_threads=2, num_kv_blocks=1024)
    cost = grammar_cost(bench.loaded)
    bench.close()
    return f"SmolLM2: {real}. Noise: {noisy}. Masks at 16 streams: {cost}. {hostile()}"


def hostile() -> str:
    """Sixteen streams go on while expressions come that are made to cost."""
    with server("--max-model-len", "1024") as running:
        times: list[list[float]] = [[] for _ in range(16)]
        readers = [threading.Thread(target=_read, args=(running.url, seen)) for seen in times]
        for reader in readers:
            reader.start()
        while not all(times):
            time.sleep(0.01)
        took, statuses, began = [], [], time.monotonic()
        for expression in HOSTILE * 3:
            asked = time.monotonic()
            body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": expression}}
            statuses.append(httpx.post(running.url + "/v1/completions", json=body, timeout=30).status_code)
            if statuses[-1] == 400:
                took.append(time.monotonic() - asked)
        ended = time.monotonic()
        for reader in readers:
            reader.join()
    gaps = [b - a for seen in times for a, b in pairwise(seen) if began <= b <= ended]
    quiet = [b - a for seen in times for a, b in pairwise(seen) if b > ended]
    assert statuses[0] == statuses[1] == 400, statuses
    assert set(statuses) <= {200, 400}, statuses
    assert max(took) < 3, took
    assert max(gaps) < 1, max(gaps)
    return (
        f"Hostile: {statuses.count(400)} of {len(statuses)} refused, the slowest in {max(took):.2f} s; the streams' "
        f"longest gap {1000 * max(gaps):.0f} ms, median {1000 * statistics.median(gaps):.0f} "
        f"({1000 * statistics.median(quiet):.0f} without)"
    )


def _read(url: str, times: list[float]) -> None:
    body = {"model": "smollm2", "prompt": [1000] * 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line:
                times.append(time.monotonic())


def router_cost() -> str:
    told, rates = [], []
    for pace, name in ((router_bench.BUSY, "a write for each token"), (0, "flat out")):
        with router_bench.replica(pace) as address, router_bench.router(address, [PACELINE]) as running:
            router_bench.throughput(running, 64, 100)
            rounds = [router_bench.throughput(running, 64, 1000) for _ in range(5)]
        middle = sorted(rounds, key=lambda one: one.tokens_per_second)[2]
        rates.append(middle.tokens_per_second)
        told.append(f"{name}: {middle}")
    with router_bench.replica(router_bench.CALM) as address, router_bench.router(address, [PACELINE]) as running:
        for num in (1, 64):
            rates.append(statistics.median(router_bench.first_token(running, num, 300 if num == 1 else 2000)))
            told.append(f"first token at {num} streams p50 {rates[-1]:.1f} ms")
    told_all = "; ".join(told)
    assert min(rates[:2]) >= 8000, told_all
    assert max(rates[2:]) <= 5, told_all
    return told_all


LINES = [
    Line("5.1", "every case", cases),
    Line("5.2", "real clients", clients),
    Line("5.3", "anything at all", anything),
    Line("5.4", "eighty requests, four ways", equality),
    Line("5.5", "structured output", structured),
    Line("5.6", "what the router costs", router_cost),
]
