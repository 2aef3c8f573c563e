"""What the router costs: one `paceline router` process as users start it, between a replica and clients that are cheap.

    python -m tests.bench.router [--streams N] [--tokens N] [--rounds N]

The replica is a process of its own that knows every token beforehand and speaks the real wire; the clients are raw
sockets in this process. Throughput is measured at a pace, where nearly every token is a write of its own, and flat out,
where the replica sends as fast as the router takes and what piles up goes out together. First-token latency: the
replica answers a submission at once, so all of the time until a client's first byte is the router's (and the sockets').
"""

import argparse
import asyncio
import heapq
import json
import multiprocessing
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from paceline.proto import codec, replica_pb2
from paceline.proto.load import ReplicaLoad
from tests.e2e.server import PACELINE
from tests.fakes import CORPUS, encode, tiny_card

SERVICE = "paceline.replica.v1.ReplicaService"
CARD = tiny_card(max_model_len=1_000_000)
IDS = encode(CORPUS)
BUSY = 1 / 240  # seconds a step, where throughput is measured at a pace: 15,360 tokens/s for 64 streams
CALM = 1 / 50  # and where latency is
LATE = 0.1  # seconds that steps may lag behind their pace, to catch up
EVENT = b"data: "
END = b"0\r\n\r\n"  # of a chunked body


# -- the replica -------------------------------------------------------------------------------------------------------


class Scripted:
    """ReplicaService at little cost. Each step gives every open choice its next id; the first one comes at once."""

    def __init__(self, step_seconds: float):
        self._step_seconds = step_seconds
        self._open: dict[int, list[int]] = {}  # handle -> [ids sent, ids to send]
        self._work = asyncio.Event()

    async def serve(self, port: Any) -> None:
        server = grpc.aio.server()
        handlers = {
            "GetModel": grpc.unary_unary_rpc_method_handler(self._model),
            "Attach": grpc.stream_stream_rpc_method_handler(
                self._attach, replica_pb2.AttachRequest.FromString, replica_pb2.AttachResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    async def _model(self, request: bytes, context: Any) -> bytes:
        return replica_pb2.GetModelResponse(card_json=codec.card_to_json(CARD)).SerializeToString()

    async def _attach(self, frames: Any, context: Any) -> None:
        lock = asyncio.Lock()

        async def write(**frame: Any) -> None:
            async with lock:
                await context.write(replica_pb2.AttachResponse(**frame))

        await anext(aiter(frames))
        await write(welcome=replica_pb2.Welcome(replica_id="scripted", protocol=1, fingerprint=CARD.fingerprint))
        tasks = [asyncio.create_task(self._beat(write)), asyncio.create_task(self._step(write))]
        async for frame in frames:
            if frame.WhichOneof("frame") == "submit":
                submit = frame.submit
                await write(accepted=replica_pb2.Accepted(handle=submit.handle))
                self._open[submit.handle] = [0, submit.params.max_tokens]
                await write(deltas=self._deltas([submit.handle]))
                self._work.set()
        for task in tasks:
            task.cancel()

    async def _beat(self, write: Any) -> None:
        while True:
            await write(heartbeat=replica_pb2.Heartbeat(load=codec.load_message(ReplicaLoad(blocks_total=100))))
            await asyncio.sleep(1)

    async def _step(self, write: Any) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while True:
            if not self._open:
                self._work.clear()
                await self._work.wait()
            due = max(due + self._step_seconds, loop.time() - LATE)
            await asyncio.sleep(max(0, due - loop.time()))
            if self._open:
                await write(deltas=self._deltas(list(self._open)))

    def _deltas(self, handles: list[int]) -> replica_pb2.Deltas:
        num = len(handles)
        offsets = [self._open[handle][0] for handle in handles]
        frame = replica_pb2.Deltas(
            handles=handles,
            choices=[0] * num,
            offsets=offsets,
            num_ids=[1] * num,
            ids=[IDS[at % len(IDS)] for at in offsets],
        )
        for row, handle in enumerate(handles):
            state = self._open[handle]
            state[0] += 1
            if state[0] == state[1]:
                frame.endings.add(row=row, finish_reason="length", num_prompt=1, num_generated=state[1])
                del self._open[handle]
        return frame


def _run_replica(port: Any, step_seconds: float) -> None:
    asyncio.run(Scripted(step_seconds).serve(port))


@contextmanager
def replica(step_seconds: float) -> Iterator[str]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_replica, args=(there, step_seconds), daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


# -- the router --------------------------------------------------------------------------------------------------------


@dataclass
class Router:
    process: psutil.Process
    port: int

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def router(address: str, command: list[str]) -> Iterator[Router]:
    with tempfile.NamedTemporaryFile("r+") as log:
        process = subprocess.Popen([*command, "router", "--port", "0", "--replica", address], stdout=log, stderr=log)
        try:
            yield Router(psutil.Process(process.pid), _port_of(Path(log.name), process))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def _port_of(log: Path, process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        if found := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text()):
            port = int(found[1])
            while b" 200 " not in _get(port, b"/health/ready").splitlines()[0]:
                time.sleep(0.02)
            return port
        time.sleep(0.02)
    raise RuntimeError(log.read_text()[-3000:])


def _get(port: int, path: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b""
        while more := connection.recv(65536):
            answer += more
    return answer


# -- the clients -------------------------------------------------------------------------------------------------------


class Client:
    """One connection, one request after another."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_events = self.num_reads = 0
        self.first_seconds: list[float] = []  # until the first byte, of each request
        self._sent_at = 0.0
        self._tail = b""

    def ask(self, num_tokens: int, chat: bool = True) -> None:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
        body = json.dumps(prompt | {"stream": True, "max_tokens": num_tokens, "ignore_eos": True}).encode()
        path = b"chat/completions" if chat else b"completions"
        head = b"POST /v1/%s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._tail = b""
        self._sent_at = time.perf_counter()
        self.socket.sendall(head % (path, len(body)) + body)

    def read(self) -> bool:
        """Takes what has come; True at the end of an answer."""
        new = self.socket.recv(65536)
        assert new, "the router closed a connection"
        if self._sent_at:
            self.first_seconds.append(time.perf_counter() - self._sent_at)
            self._sent_at = 0.0
            assert new.startswith(b"HTTP/1.1 200"), new
        piece = self._tail + new
        self.num_events += piece.count(EVENT)
        self.num_reads += 1
        self._tail = piece[1 - len(EVENT) :]
        return piece.endswith(END)


@contextmanager
def clients(port: int, num: int) -> Iterator[tuple[list[Client], selectors.BaseSelector]]:
    selector = selectors.DefaultSelector()
    everyone = [Client(port) for _ in range(num)]
    for client in everyone:
        selector.register(client.socket, selectors.EVENT_READ, client)
    try:
        yield everyone, selector
    finally:
        selector.close()
        for client in everyone:
            client.socket.close()


@dataclass(frozen=True)
class Throughput:
    tokens_per_second: float
    cpu_micros: float  # of the router's process, per token
    tokens_per_read: float  # by a client: how much went out together

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {self.cpu_micros:.1f} µs of CPU a token, "
            f"{self.tokens_per_read:.1f} tokens a read"
        )


def throughput(running: Router, num_streams: int, num_tokens: int, chat: bool = True) -> Throughput:
    """All streams at once, each of so many tokens, as fast as they come."""
    with clients(running.port, num_streams) as (everyone, selector):
        cpu, began = running.cpu_seconds(), time.perf_counter()
        for client in everyone:
            client.ask(num_tokens, chat)
        num_open = num_streams
        while num_open:
            for key, _ in selector.select():
                num_open -= key.data.read()
        seconds, cpu = time.perf_counter() - began, running.cpu_seconds() - cpu
        # Beside its tokens a stream has the reason and [DONE], and in a chat the role.
        num_seen = sum(client.num_events - (3 if chat else 2) for client in everyone)
    assert num_seen == num_streams * num_tokens, (num_seen, num_streams * num_tokens)
    num_reads = sum(client.num_reads for client in everyone)
    return Throughput(num_seen / seconds, 1e6 * cpu / num_seen, num_seen / num_reads)


def first_token(running: Router, num_streams: int, num_requests: int) -> list[float]:
    """Milliseconds to the first byte of each answer, while so many streams run.

    Each is followed by another after a moment, up to a step's length: users do not know when steps end.
    """
    dice = random.Random(0)
    with clients(running.port, num_streams) as (everyone, selector):
        due = [(time.perf_counter() + dice.uniform(0, 1), at) for at in range(num_streams)]
        heapq.heapify(due)
        num_open = 0
        while num_open or num_requests:
            wait = max(0, due[0][0] - time.perf_counter()) if due and num_requests else None
            for key, _ in selector.select(wait):
                if key.data.read():
                    num_open -= 1
                    heapq.heappush(due, (time.perf_counter() + dice.uniform(0, CALM), everyone.index(key.data)))
            while due and num_requests and due[0][0] <= time.perf_counter():
                everyone[heapq.heappop(due)[1]].ask(dice.randrange(10, 60) if num_streams > 1 else 5)
                num_open, num_requests = num_open + 1, num_requests - 1
        return [1e3 * seconds for client in everyone for seconds in client.first_seconds]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--tokens", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--command", default=PACELINE, help="what starts a router in the place of `paceline`")
    chosen = options.parse_args()
    command = chosen.command.split()
    for pace, name in ((BUSY, f"paced at {chosen.streams / BUSY:,.0f}"), (0, "flat out")):
        with replica(pace) as address, router(address, command) as running:
            throughput(running, chosen.streams, 100)
            for chat in (True, False):
                for _ in range(chosen.rounds):
                    told = throughput(running, chosen.streams, chosen.tokens, chat)
                    print(f"{name}, {'chat' if chat else 'completions'}: {told}", flush=True)
    with replica(CALM) as address, router(address, command) as running:
        for num, requests in ((1, 200), (chosen.streams, 1000)):
            times = first_token(running, num, requests)
            p50, p90 = statistics.median(times), statistics.quantiles(times, n=10)[8]
            print(f"first token at {num} streams: p50 {p50:.2f} ms, p90 {p90:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
