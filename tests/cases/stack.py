"""A whole service in this process: a router in front of replicas that run a tiny model, on a loop of its own.

The model is a random one or, with a ``script``, a double whose logits are given: all the rest is what users run. Tests
speak to it over real sockets, and look at the engine's own counts.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import torch
from torch import nn

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.local import LocalExecutor
from paceline.cluster.replica import ReplicaServer
from paceline.proto.step import StepPlan
from paceline.router.app import serve_router
from paceline.router.config import RouterConfig
from paceline.worker.config import RankConfig
from paceline.worker.rank import Rank

FLOOR = -100.0  # the logit of what a script does not name
SETTLE = 10.0  # seconds

Script = Callable[[int, int], Mapping[int, float]]  # (position, id there) -> logits of the ids that may follow


class Scripted(nn.Module):
    """Stands where a rank's model stands; the logits behind a token depend on its position and its id alone."""

    def __init__(self, model: Any, script: Script, vocab_size: int):
        super().__init__()
        self.spec, self.shard, self.place = model.spec, model.shard, model.place
        self._script, self._vocab_size = script, vocab_size

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([positions.float(), ids.float()], dim=-1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: Any) -> torch.Tensor:
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.full((len(hidden), self._vocab_size), FLOOR)
        for row, (position, id) in zip(rows, hidden.long().tolist(), strict=True):
            for follower, logit in self._script(position, id).items():
                row[follower] = logit
        return rows


def saying(*ids: int, after: int = 1) -> Script:
    """A model that says these ids, whatever the prompt of ``after`` tokens was, and then the last one for ever."""
    return lambda position, id: {ids[min(max(position - after + 1, 0), len(ids) - 1)]: 0.0}


class Breaking(LocalExecutor):
    """A rank whose next step fails once ``broken`` is set."""

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.rank = rank
        self.broken = threading.Event()

    def submit(self, plan: StepPlan) -> None:
        if self.broken.is_set():
            raise RuntimeError("the device is gone")
        super().submit(plan)


class Stack:
    """``url`` and ``grpc_address`` are the router's; ``client`` is an HTTP client of it."""

    def __init__(self, folder: Path, script: Script | None, num_replicas: int, rank: dict, replica: dict, router: dict):
        self.executors: list[Breaking] = []
        self._folder, self._script, self._num_replicas = folder, script, num_replicas
        self._rank, self._replica, self._router = rank, replica, router
        self.servers: list[ReplicaServer] = []
        self.url = self.grpc_address = ""
        self.client = httpx.Client()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)

    def __enter__(self) -> "Stack":
        self._thread.start()
        self._up, self._stop = AsyncExitStack(), asyncio.Event()
        try:
            self.run(self._start())
        except BaseException:
            self.__exit__()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.close()
        self.run(self._up.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    async def _start(self) -> None:
        from tests.e2e.server import free_port

        for number in range(self._num_replicas):
            rank = {"max_model_len": 256, "num_kv_blocks": 256, "max_num_seqs": 16} | self._rank
            config = ReplicaConfig(
                rank=RankConfig(
                    model=str(self._folder), served_model_name="tiny", dtype="float32", num_threads=1, **rank
                ),
                health_port=None,
                **self._replica,
            )
            server = ReplicaServer(config, self._load, f"replica-{number}")
            await server.start()
            self._up.push_async_callback(server.stop)
            await server.ready()
            self.servers.append(server)
        port = free_port()
        settings = {"port": 0, "grpc_port": port, "drain_seconds": 0.2} | self._router
        config = RouterConfig(replicas=tuple(server.address for server in self.servers), **settings)
        url: asyncio.Future[str] = self._loop.create_future()
        serving = asyncio.create_task(serve_router(config, ready=url.set_result, stop=self._stop))
        self._up.push_async_callback(self._end, serving)
        await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        self.url, self.grpc_address = url.result(), f"127.0.0.1:{port}"
        async with httpx.AsyncClient() as client, asyncio.timeout(10):
            while (await client.get(self.url + "/health/ready")).status_code == 503:
                await asyncio.sleep(0.01)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        self._stop.set()
        await serving

    def _load(self, config: ReplicaConfig, on_phase: Callable[[str, float], None]) -> Loaded:
        rank = Rank(config.rank, on_phase=on_phase)
        if self._script is not None:
            model = Scripted(rank.runner.model, self._script, rank.card.vocab_size)
            rank.runner = dataclasses.replace(rank.runner, model=model, layers=model)
        self.executors.append(Breaking(rank))
        return Loaded(self.executors[-1], rank.card, rank.num_kv_blocks, rank.describe(), 1, (rank.held,))

    # -- what tests ask of it ------------------------------------------------------------------------------------------

    @property
    def card(self) -> Any:
        return self.executors[0].rank.card

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)])

    def complete(self, prompt: Any = (5,), **fields: Any) -> dict[str, Any]:
        """A completion that must succeed; greedy, unless told otherwise."""
        return self.good("/v1/completions", prompt=list(prompt) if isinstance(prompt, tuple) else prompt, **fields)

    def chat(self, content: Any = "hello", **fields: Any) -> dict[str, Any]:
        return self.good("/v1/chat/completions", **({"messages": [{"role": "user", "content": content}]} | fields))

    def good(self, path: str, **fields: Any) -> dict[str, Any]:
        response = self.client.post(path, json={"model": "tiny", "temperature": 0} | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error of a request that must fail so, in its envelope."""
        response = self.client.post(path, json={"model": "tiny", "temperature": 0} | fields)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert len(response.content) <= 16 * 1024
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def stream(self, path: str, **fields: Any) -> "Stream":
        fields = {"model": "tiny", "temperature": 0, "stream": True} | fields
        with self.client.stream("POST", path, json=fields) as response:
            assert response.status_code == 200, response.read()
            return Stream([line for line in response.iter_lines() if line])

    def at_rest(self) -> None:
        """The aftercheck: a plain request is served; then nothing runs, nothing waits, and no block is in use."""
        self.complete(max_tokens=2)
        deadline = time.monotonic() + SETTLE
        while any(load.running or load.waiting or load.blocks_used for load in self.loads()):
            assert time.monotonic() < deadline, self.loads()
            time.sleep(0.005)

    def loads(self) -> list[Any]:
        return [server.load for server in self.servers if server.state == "ready"]


class Stream:
    """What came over one stream: ``lines`` as they were, ``chunks`` parsed."""

    def __init__(self, lines: list[str]):
        import json

        self.lines = lines
        self.done = lines[-1] == "data: [DONE]"
        bodies = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
        self.chunks = [json.loads(body) for body in bodies]
        self.usage = next((chunk["usage"] for chunk in self.chunks if chunk.get("usage")), None)

    def pieces(self, index: int = 0) -> list[str]:
        """Of text, as they came."""
        parts = [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]
        return [c["text"] if "text" in c else c["delta"].get("content", "") for c in parts]

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces(index))

    def reasons(self, index: int = 0) -> list[str]:
        parts = [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]
        return [c["finish_reason"] for c in parts if c["finish_reason"]]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)


@contextmanager
def stack(
    folder: Path,
    *,
    script: Script | None = None,
    num_replicas: int = 1,
    rank: dict | None = None,
    replica: dict | None = None,
    router: dict | None = None,
) -> Iterator[Stack]:
    with Stack(folder, script, num_replicas, rank or {}, replica or {}, router or {}) as running:
        yield running
