"""Clients that go away, in every state that a request can be in. The server is to be started with FLAGS."""

import asyncio
import json
import random
import time
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc.aio
import httpx

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc

# Sixteen seats, and a pool in which that many sequences of six blocks fit but cannot all grow.
FLAGS = (
    *("--max-num-seqs", "16", "--num-kv-blocks", "96", "--max-model-len", "1024", "--max-num-batched-tokens", "256"),
    *("--block-size", "16", "--no-enable-prefix-caching", "--num-threads", "1"),
)
SEATS, BLOCKS, BLOCK = 16, 6, 16
NAMES = ("requests_running", "requests_waiting", "kv_blocks_used")
SETTLE = 15.0  # seconds after which everything must be free: loads come once a second


class Front(Protocol):
    """A way to ask: gives clients that can ``read_events(count)`` and ``close()``."""

    url: str  # of the HTTP server, for its metrics

    async def ask(self, prompt: list[int], max_tokens: int = 300, n: int = 1) -> Any: ...


async def disconnects(front: Front, count: int) -> str:
    """``count`` of them in each state; then nothing runs, nothing waits and no block is in use. Says what was seen."""
    said = []
    for state in (_queued, _prefilling, _decoding, _preempted, _choices):
        began = time.monotonic()
        note = await state(front, count)
        await _settled(front.url, state.__name__)
        said.append(f"{count} {state.__name__[1:]} ({note}, {time.monotonic() - began:.0f} s)")
    return ", ".join(said) + ": running = waiting = used blocks = 0 after each"


# -- states ------------------------------------------------------------------------------------------------------------


async def _queued(front: Front, count: int) -> str:
    """Behind as many as there are seats. None of them may be prefilled, not even later."""
    before = await engine_metrics(front.url)
    rounds = _batches(count, 25)
    for size in rounds:
        # They grow until they take blocks from one another; half of the pool, for a long prompt, is never free.
        seated = [await front.ask(prompt=_prompt(8), max_tokens=900) for _ in range(SEATS)]
        await asyncio.gather(*(client.read_events(1) for client in seated))
        waiting = [await front.ask(prompt=_prompt(700)) for _ in range(size)]
        await asyncio.sleep(0.02)
        for client in waiting:
            client.close()
        await asyncio.sleep(0.1)  # or a seat that is given up might be taken by one that is about to go
        for client in seated:
            client.close()
    await _settled(front.url, "queued")
    prefilled = (await engine_metrics(front.url))["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert prefilled == 8 * SEATS * len(rounds), f"{prefilled:.0f} prompt tokens were admitted"
    return "none prefilled"


async def _prefilling(front: Front, count: int) -> str:
    before = await engine_metrics(front.url)
    for size in _batches(count, 2):
        clients = [await front.ask(prompt=_prompt(700)) for _ in range(size)]
        await asyncio.sleep(random.uniform(0.005, 0.05))
        for client in clients:
            client.close()
    await _settled(front.url, "prefilling")
    after = await engine_metrics(front.url)
    computed = after["computed_tokens_total"] - before["computed_tokens_total"]
    assert 0 < computed < 700 * count, "prompts were computed to their ends"
    return f"{computed / (700 * count):.0%} of their prompts computed"


async def _decoding(front: Front, count: int) -> str:
    for size in _batches(count, SEATS):
        clients = [await front.ask(prompt=_prompt(8)) for _ in range(size)]
        for client in clients:
            await client.read_events(2)
            client.close()
    return "after two events"


async def _preempted(front: Front, count: int) -> str:
    """Sequences that fill the pool and grow: the last ones lose their blocks, and wait when their clients leave."""
    before, preemptions, rounds = await engine_metrics(front.url), 0.0, 0
    while preemptions < count:
        rounds += 1
        assert rounds <= count, "sequences were not preempted"
        clients = [await front.ask(prompt=_prompt(BLOCKS * BLOCK - 8)) for _ in range(SEATS)]
        await clients[0].read_events(BLOCK + 12)  # the oldest is never preempted; it has grown by two blocks
        for client in random.sample(clients, SEATS):
            client.close()
        await _settled(front.url, "preempted", stays=False)
        preemptions = (await engine_metrics(front.url))["preemptions_total"] - before["preemptions_total"]
    return f"{preemptions:.0f} preemptions in {rounds} rounds"


async def _choices(front: Front, count: int) -> str:
    for size in _batches(count, SEATS // 4):
        clients = [await front.ask(prompt=_prompt(40), n=4) for _ in range(size)]
        for client in clients:
            await client.read_events(random.randint(1, 6))
            client.close()
    return "n = 4"


# -- pieces ------------------------------------------------------------------------------------------------------------


class Http:
    def __init__(self, url: str):
        self.url = url

    async def ask(self, prompt: list[int], max_tokens: int = 300, n: int = 1) -> "_Socket":
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = {"prompt": prompt, "max_tokens": max_tokens, "n": n}
        raw = json.dumps(body | {"stream": True, "ignore_eos": True, "return_token_ids": True})
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n{raw}".encode())
        await writer.drain()
        return _Socket(reader, writer)


class _Socket:
    """A raw connection with one streamed request, so that closing it is closing the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def read_events(self, count: int) -> None:
        async with asyncio.timeout(120):
            while count:
                line = await self._reader.readline()
                assert line, "the server closed the connection"
                assert not line.startswith(b"HTTP/1.1 ") or b" 200 " in line, line
                count -= line.startswith(b"data: ")

    def close(self) -> None:
        self._writer.close()


class Grpc:
    def __init__(self, url: str, channel: grpc.aio.Channel):
        self.url = url
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def ask(self, prompt: list[int], max_tokens: int = 300, n: int = 1) -> "_Call":
        spec = pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.Sampling(max_tokens=max_tokens, n=n, ignore_eos=True),
            output=pb.Output(token_ids=True),
        )
        call = self._stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec))
        await asyncio.sleep(0)  # it is sent once the loop runs
        return _Call(call)


class _Call:
    """A stream that is cancelled when it is closed."""

    def __init__(self, call: Any):
        self._call = call

    async def read_events(self, count: int) -> None:
        async with asyncio.timeout(120):
            for _ in range(count):
                assert await self._call.read() is not grpc.aio.EOF, "the server ended the stream"

    def close(self) -> None:
        self._call.cancel()


def _prompt(length: int) -> list[int]:
    return [random.randint(10, 250) for _ in range(length)]


def _batches(count: int, size: int) -> list[int]:
    return [min(size, count - at) for at in range(0, count, size)]


async def engine_metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=20) as http:
        text = (await http.get(url + "/metrics")).text
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("paceline_engine_"):
            name = line.removeprefix("paceline_engine_").split("{")[0]
            values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return values


async def _settled(url: str, state: str, stays: bool = True) -> None:
    """Raises AssertionError unless everything is free soon, and ``stays`` so for the next load that is told."""
    deadline, seen = time.monotonic() + SETTLE, {}
    await asyncio.sleep(0.3)  # for frames that are on their way
    while time.monotonic() < deadline:
        values = await engine_metrics(url)
        seen = {name: values[name] for name in NAMES}
        if not any(seen.values()):
            if not stays:
                return
            await asyncio.sleep(1.2)
            values = await engine_metrics(url)
            if not any(values[name] for name in NAMES):
                return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{state.strip('_')}: not free after {SETTLE:.0f} s: {seen}")
