"""The ten lines of issue 1: a token."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

from tests.bench import simulate
from tests.e2e.server import free_port, our_processes
from tests.prove.lines import ROOT, Line, load, passed, run_pytest, server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEST_LIMIT = 600  # seconds


def fresh_env() -> dict[str, str]:
    """Without what the `make prove` above us would hand down: its ARGS are not theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}


@contextmanager
def fresh_clone():
    """An empty folder with a clone in it and nothing else."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-clone-"))
    try:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "paceline")], check=True)
        yield folder / "paceline"
    finally:
        shutil.rmtree(folder)


def fresh_serve() -> str:
    port = free_port()
    with fresh_clone() as clone, (clone.parent / "log").open("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            ["make", "serve", f"ARGS=--port {port}"], cwd=clone, stdout=log, stderr=log, env=fresh_env()
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            ready = time.monotonic() - began
            body = {"model": "smollm2", "temperature": 0, "messages": QUESTION}
            curl = ["curl", "-sS", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
            whole = subprocess.run([*curl, json.dumps(body)], capture_output=True, text=True, timeout=60).stdout
            assert "Paris" in json.loads(whole)["choices"][0]["message"]["content"], whole
            lines = subprocess.run(
                [*curl, json.dumps(body | {"stream": True})], capture_output=True, text=True, timeout=60
            ).stdout.splitlines()
            events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
            assert "Paris" in "".join(e["choices"][0]["delta"].get("content") or "" for e in events), lines
            assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]", lines[-2:]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
            stream = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert "Paris" in streamed
            assert streamed == answer.choices[0].message.content
        finally:
            process.send_signal(signal.SIGINT)
            subprocess.run(["pkill", "-INT", "-f", f"serve --port {port}"])
            process.wait(30)
    return f"Paris by curl and openai, streamed and whole; `make serve` from nothing to ready in {ready:.0f} s"


def _wait_ready(url: str, process: subprocess.Popen, log) -> None:
    for _ in range(3000):
        try:
            if httpx.get(url + "/health/ready", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.2)
    log.seek(0)
    raise AssertionError(f"make serve did not come up: {log.read()[-2000:]}")


def fresh_test() -> str:
    with fresh_clone() as clone:
        began = time.monotonic()
        setup = ["make", "setup-dev"]
        subprocess.run(setup, cwd=clone, check=True, capture_output=True, timeout=1200, env=fresh_env())
        ready = time.monotonic()
        done = subprocess.run(
            ["make", "test"], cwd=clone, capture_output=True, text=True, timeout=1800, env=fresh_env()
        )
        took = time.monotonic() - ready
        if done.returncode:
            print(done.stdout[-4000:])
            raise AssertionError("make test fails in a fresh clone")
        assert took <= TEST_LIMIT, f"make test took {took:.0f} s"
    return f"{passed(done.stdout)} in {took:.0f} s, after {ready - began:.0f} s of set-up"


def same_as_transformers() -> str:
    output = run_pytest("-s", "tests/e2e/test_same_as_transformers.py")
    said = [line for line in output.splitlines() if "ids equal" in line or "differs at" in line]
    run_pytest("tests/e2e/test_serve.py", "-k", "korean")
    return "; ".join(said) + "; Korean streams without U+FFFD"


def same_as_itself() -> str:
    return passed(run_pytest("tests/e2e/test_same_as_itself.py"))


def batching() -> str:
    requests = simulate.skewed(2000)
    ideal = sum(r.params.max_tokens for r in requests) / 16
    steps = simulate.steps_with_free_seats(requests, 16)
    whole = simulate.steps_with_whole_batches(requests, 16)
    assert steps <= 1.05 * ideal
    assert whole >= 7 * steps
    run_pytest("tests/cluster/engine/test_scheduler.py", "-k", "arrives_while_there_is_room")
    return f"{steps} steps = {steps / ideal:.3f} x sum/16; whole batches {whole / steps:.2f} x as many"


def paging() -> str:
    full = {"num_blocks": 2048, "steps": 4000, "warm_up": 2000}
    paged, reserved = simulate.page(seats=512, **full), simulate.reserve(**full)
    assert paged.live_share >= 0.98
    assert paged.running >= 3.5 * reserved.running
    seats = simulate.page(seats=48, num_blocks=4096, steps=3000, warm_up=1000, n=6)
    cached = simulate.page(seats=512, n=6, caching=True, **full)
    assert min(seats.shared_share, cached.shared_share) >= 0.22
    run_pytest("tests/cluster/engine/test_scheduler.py", "-k", "n_choices_compute_the_prompt_once")
    return (
        f"live {paged.live_share:.3f} (reserving {reserved.live_share:.3f}), running {paged.running:.1f} = "
        f"{paged.running / reserved.running:.2f} x; n = 6 saves {seats.shared_share:.0%} of blocks, in a full pool "
        f"with the prefix cache {cached.shared_share:.0%}; 40 tokens 5 copies, 48 none"
    )


def prefix_cache() -> str:
    with server("--max-model-len", "4096") as running:
        cached = asyncio.run(_shared_prompts(running.url))
        with_cache = load(running, "shared", concurrency=16, requests=64, seed=3)
    with server("--max-model-len", "4096", "--no-enable-prefix-caching") as running:
        without = load(running, "shared", concurrency=16, requests=64, seed=3)
    assert min(cached[16:]) >= 1024, cached
    ratio = with_cache["ttft_50_ms"] / without["ttft_50_ms"]
    assert ratio <= 0.3
    return (
        f"cached_tokens >= {min(cached[16:])} after the first wave of 16 (in it: {sorted(set(cached[:16]))}); "
        f"TTFT p50 {with_cache['ttft_50_ms']:.0f} ms against {without['ttft_50_ms']:.0f} = {ratio:.2f} x"
    )


async def _shared_prompts(url: str) -> list[int]:
    """The workload `shared`, with each answer's cached_tokens: 48 requests, 16 at once."""
    rng = random.Random(11)
    prefix = [rng.randrange(1000, 49152) for _ in range(1024)]
    async with httpx.AsyncClient(timeout=300) as client:

        async def one() -> int:
            prompt = prefix + [rng.randrange(1000, 49152) for _ in range(32)]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
            answer = await client.post(url + "/v1/completions", json=body)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        return [cached for _ in range(3) for cached in await asyncio.gather(*(one() for _ in range(16)))]


def chunked_prefill() -> str:
    """Three rounds of each, in turn; the ratio of the medians."""
    longest: dict[str, list[float]] = {"256": [], "1000000": []}
    for seed in (1, 2, 3):
        for budget, seen in longest.items():
            with server("--max-model-len", "4096", "--max-num-batched-tokens", budget) as running:
                seen.append(load(running, "mixed", concurrency=16, requests=40, seed=seed)["itl_max_ms"])
    chunked, unlimited = (sorted(seen)[1] for seen in longest.values())
    assert chunked <= 0.35 * unlimited, longest
    run_pytest("tests/cluster/engine/test_scheduler.py", "-k", "decode_in_every_step")
    return f"itl_max {chunked:.0f} ms against {unlimited:.0f} unlimited = {chunked / unlimited:.2f} x"


def batching_pays() -> str:
    with server("--max-model-len", "4096", "--dtype", "bfloat16") as running:
        one = [load(running, "decode", concurrency=1, requests=2, seed=s)["out_tok_s"] for s in (1, 2, 3)]
        many = [load(running, "decode", concurrency=16, requests=32, seed=s)["out_tok_s"] for s in (1, 2, 3)]
    c1, c16 = sorted(one)[1], sorted(many)[1]
    assert c1 >= 40
    assert c16 >= 250
    assert c16 >= 5 * c1
    return f"c1 {c1:.0f}, c16 {c16:.0f} tok/s = {c16 / c1:.1f} x (medians of 3)"


def scheduler_cost() -> str:
    few, many = simulate.decode_cost(256, 100), simulate.decode_cost(1024, 60)
    hot = simulate.decode_cost(256, 100, evict=False)
    assert few <= 1.0e-3
    assert many / 1024 <= 1.3 * few / 256
    return (
        f"256: {few * 1e3:.2f} ms ({hot * 1e3:.2f} with hot caches), 1,024: {many * 1e3:.2f} ms = "
        f"{many / few / 4:.2f} x per sequence"
    )


def sigint() -> str:
    before = our_processes()
    with server("--replicas", "2", "--num-threads", "1", "--num-kv-blocks", "256") as running:
        assert len(our_processes()) > len(before)
        began = time.monotonic()
        assert running.interrupt(10) == 0
        took = time.monotonic() - began
    assert our_processes() <= before
    subprocess.run(["make", "lint"], cwd=ROOT, check=True, capture_output=True)
    return f"exit 0 in {took:.1f} s with 2 replicas, no process left; lint clean"


LINES = [
    Line("1.1a", "fresh clone: make serve answers Paris", fresh_serve),
    Line("1.1b", "fresh clone: make test within 10 minutes", fresh_test),
    Line("1.2", "same ids as transformers", same_as_transformers),
    Line("1.3", "same ids as itself, every way", same_as_itself),
    Line("1.4", "step-level batching", batching),
    Line("1.5", "paging", paging),
    Line("1.6", "prefix cache", prefix_cache),
    Line("1.7", "chunked prefill", chunked_prefill),
    Line("1.8", "batching pays", batching_pays),
    Line("1.9", "scheduling is cheap", scheduler_cost),
    Line("1.10", "SIGINT leaves nothing; lint", sigint),
]
