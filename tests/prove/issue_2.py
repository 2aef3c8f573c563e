"""The eight lines of issue 2: a service."""

import asyncio
import os
import signal
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import httpx
import psutil

from tests.e2e import disconnects, overload
from tests.e2e.equality import eighty_requests
from tests.e2e.server import Server, free_port
from tests.models import tiny_llama_folder
from tests.prove.lines import Line, metric, run_pytest, server

LONG = {"model": "smollm2", "prompt": [1000] * 16, "max_tokens": 600, "ignore_eos": True, "temperature": 0}


@contextmanager
def with_grpc(*flags: str):
    port = free_port()
    with server("--grpc-port", str(port), "--grpc-reflection", "--num-threads", "1", *flags) as running:
        yield running, f"127.0.0.1:{port}"


def replica_processes(running: Server) -> list[psutil.Process]:
    """The Ray actors that hold the replicas of this server, oldest first."""
    children = psutil.Process(running.process.pid).children(recursive=True)
    found = [p for p in children if "ray::Replica" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.create_time())


def controller_process(running: Server) -> psutil.Process:
    children = psutil.Process(running.process.pid).children(recursive=True)
    return next(p for p in children if "ray::Controller" in " ".join(p.cmdline()))


def ready(running: Server) -> int:
    return httpx.get(running.url + "/health/ready", timeout=5).status_code


def wait_for(what: str, condition, seconds: float) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


class Stream(threading.Thread):
    """One streamed completion; afterwards: how many ids' chunks came, whether it ended well, and the error if not."""

    def __init__(self, running: Server, **fields):
        super().__init__(daemon=True)
        self.url, self.body = running.url, LONG | fields | {"stream": True}
        self.chunks, self.done, self.error, self.status = 0, False, None, 0
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=120) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data:") and '"error"' in line:
                        self.error = line
                    elif line.startswith("data:"):
                        self.chunks += 1
        except httpx.HTTPError as error:
            self.error = repr(error)


def equality() -> str:
    run_pytest("tests/router/test_rpc_server.py", "-k", "grpcurl")
    with with_grpc("--max-model-len", "2048", "--dtype", "float32") as (running, address):
        return asyncio.run(eighty_requests(running.url, address))


def replicas_that_die() -> str:
    flags = ("--replicas", "2", "--num-threads", "1", "--num-kv-blocks", "2048", "--step-timeout", "5")
    with server(*flags) as running:
        wait_for("two replicas", lambda: metric(running, "paceline_router_replicas_ready") == 2, 30)
        streams = [Stream(running) for _ in range(8)]
        wait_for("all stream", lambda: all(s.chunks for s in streams), 30)
        victim = replica_processes(running)[0]
        victim.kill()
        began = time.monotonic()
        statuses = set()
        while any(s.is_alive() for s in streams) and time.monotonic() - began < 90:
            statuses.add(ready(running))
            time.sleep(0.2)
        broken = [s for s in streams if s.error]
        assert 0 < len(broken) < 8, [s.error for s in streams]
        assert not any(s.done for s in broken)
        assert all(s.done for s in streams if not s.error)
        assert statuses == {200}, statuses
        back = wait_for("back to two", lambda: metric(running, "paceline_router_replicas_ready") == 2, 30)
        back = max(back, time.monotonic() - began) if back > 1 else time.monotonic() - began
        stopped = replica_processes(running)[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        noticed = wait_for("SIGSTOP noticed", lambda: metric(running, "paceline_router_replicas_ready") < 2, 12)
        wait_for("back to two again", lambda: metric(running, "paceline_router_replicas_ready") == 2, 60)
        streams = [Stream(running, max_tokens=200) for _ in range(8)]
        wait_for("all stream", lambda: all(s.chunks for s in streams), 30)
        controller_process(running).kill()
        for stream in streams:
            stream.join(90)
        assert all(s.done and not s.error for s in streams), [s.error for s in streams]
    with server("--num-threads", "1", "--num-kv-blocks", "512") as running:
        replica_processes(running)[0].kill()
        not_ready = wait_for("503", lambda: ready(running) == 503, 5)
        wait_for("200 again", lambda: ready(running) == 200, 30)
    return (
        f"{len(broken)} of 8 streams ended with an error event, the others went on, ready stayed 200, two again within "
        f"{back:.0f} s; SIGSTOP noticed in {noticed:.1f} s; controller killed under load: 8 of 8 whole; alone: 503 in "
        f"{not_ready:.1f} s"
    )


def three_hundred_disconnects() -> str:
    return asyncio.run(_three_hundred())


async def _three_hundred() -> str:
    """A tiny model, so that states change fast; wide enough that they last long enough to be met."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 1024}
        model = tiny_llama_folder(Path(folder) / "model", **shape)
        with with_grpc("--model", str(model), *disconnects.FLAGS) as (running, address):
            http = await disconnects.disconnects(disconnects.Http(running.url), 300)
            async with grpc.aio.insecure_channel(address) as channel:
                over_grpc = await disconnects.disconnects(disconnects.Grpc(running.url, channel), 300)
    return f"HTTP: {http}. gRPC: {over_grpc}"


def overloaded() -> str:
    with server(*overload.FLAGS) as running:
        seconds = asyncio.run(overload.overload(running.url))
    assert seconds.refusal < 0.1, f"a refusal took {1000 * seconds.refusal:.0f} ms"
    assert seconds.live < 0.1, f"live took {1000 * seconds.live:.0f} ms"
    return (
        f"6 x 200, 14 x 429 with Retry-After, the slowest refusal {1000 * seconds.refusal:.0f} ms, the slowest live "
        f"{1000 * seconds.live:.0f} ms; expired in the queue after {1000 * seconds.queued:.0f} ms: 504 queue_timeout, "
        "no token computed"
    )


def drain() -> str:
    with server("--max-num-seqs", "1", "--num-threads", "1", "--max-model-len", "2048") as running:
        first = Stream(running, max_tokens=300)
        wait_for("it runs", lambda: first.chunks > 5, 20)
        queued = Stream(running, max_tokens=50)
        time.sleep(0.3)
        running.process.send_signal(signal.SIGTERM)
        not_ready = wait_for("503", lambda: ready(running) == 503, 2)
        refused = httpx.post(running.url + "/v1/completions", json=LONG, timeout=5)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        code = running.process.wait(60)
        first.join(5)
        queued.join(5)
        assert first.done, first.error
        assert not first.error
        assert code == 0
    ending = "ended normally too" if queued.done else f"got {queued.status} {queued.error}"
    return f"ready 503 after {not_ready * 1e3:.0f} ms, the running one ended normally, the queued one {ending}; exit 0"


def long_submit() -> str:
    flags = ("--max-num-seqs", "17", "--max-model-len", "8192", "--num-threads", "1")
    with server(*flags) as running:
        gaps: dict[str, list[float]] = {"quiet": [], "busy": []}
        phase = ["quiet"]

        async def stream(client: httpx.AsyncClient, ready_event: asyncio.Event) -> None:
            body = LONG | {"max_tokens": 500, "stream": True}
            async with client.stream("POST", running.url + "/v1/completions", json=body) as response:
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            gaps[phase[0]].append(now - last)
                        last = now
                        ready_event.set()

        async def main() -> None:
            async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
                events = [asyncio.Event() for _ in range(16)]
                tasks = [asyncio.create_task(stream(client, event)) for event in events]
                await asyncio.gather(*(event.wait() for event in events))
                await asyncio.sleep(3)
                phase[0] = "busy"
                text = "token " * 100_000
                for _ in range(4):
                    answer = await client.post(
                        running.url + "/v1/completions", json={"model": "smollm2", "prompt": text, "max_tokens": 1}
                    )
                    assert answer.status_code == 400, answer.text[:200]
                    assert (await client.get(running.url + "/metrics")).status_code == 200
                    await asyncio.sleep(0.3)
                phase[0] = "after"
                gaps["after"] = []
                await asyncio.gather(*tasks)

        asyncio.run(main())
    quiet, busy = max(gaps["quiet"]), max(gaps["busy"])
    assert busy < 1.0, busy
    return (
        f"16 streams: longest gap {busy * 1e3:.0f} ms while 4 x 100,000 tokens were submitted and metrics scraped, "
        f"{quiet * 1e3:.0f} ms before (medians {statistics.median(gaps['busy']) * 1e3:.0f} and "
        f"{statistics.median(gaps['quiet']) * 1e3:.0f})"
    )


def idle() -> str:
    with server() as running:
        assert running.ready_seconds <= 15, running.ready_seconds
        processes = [psutil.Process(running.process.pid)]
        processes += processes[0].children(recursive=True)
        time.sleep(5)

        def cpu() -> float:
            return sum(sum(p.cpu_times()[:2]) for p in processes if p.is_running())

        before, began = cpu(), time.monotonic()
        time.sleep(30)
        share = (cpu() - before) / (time.monotonic() - began)
        sizes = {}
        for process in processes:
            name = (process.cmdline() or ["?"])[0].rsplit("/", 1)[-1][:24]
            if name.startswith("python"):
                name = next((a.rsplit("/", 1)[-1] for a in process.cmdline()[1:] if not a.startswith("-")), name)
            sizes[name] = sizes.get(name, 0) + process.memory_info().rss // 2**20
        assert share < 0.06, share
    rss = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
    return f"ready in {running.ready_seconds:.1f} s; idle {share:.1%} of a core over 30 s; RSS in MB: {rss}"


def router_alone_and_chart() -> str:
    run_pytest("tests/router/test_cli.py", "tests/deploy")
    return "router starts without torch and ray; chart lints, renders and validates; its config starts paceline serve"


LINES = [
    Line("2.1", "HTTP and gRPC give the same", equality),
    Line("2.2", "replicas and controller that die", replicas_that_die),
    Line("2.3", "300 disconnects in each state", three_hundred_disconnects),
    Line("2.4", "overload", overloaded),
    Line("2.5", "SIGTERM drains", drain),
    Line("2.6", "a 100,000-token submit stalls nobody", long_submit),
    Line("2.7", "start, idle, memory", idle),
    Line("2.8", "router alone; chart", router_alone_and_chart),
]
