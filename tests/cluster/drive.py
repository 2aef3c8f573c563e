"""A replica on a free port whose steps finish as a test allows, and a router that speaks raw frames to it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.replica import ReplicaServer
from paceline.cluster.service import PROTOCOL
from paceline.proto import codec
from paceline.proto import replica_pb2 as pb
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from paceline.proto.request import Request
from paceline.proto.step import StepResult
from paceline.worker.config import RankConfig
from tests.cluster.engine.fakes import FakeExecutor
from tests.fakes import tiny_card

TIMEOUT = 10.0  # seconds after which a test gives up waiting
CARD = tiny_card(fingerprint="fake-1", max_model_len=2048, vocab_size=60_000, eos_ids=())


class GatedExecutor(FakeExecutor):
    """Steps finish as ``allow`` and ``open_gate`` let them. ``fail_at``: the step whose collect raises.

    ``outstanding`` has, for each collect, how many plans were in flight.
    """

    def __init__(self, *, gate_open: bool = False, fail_at: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.fail_at = fail_at
        self.outstanding: list[int] = []
        self.collecting = threading.Event()  # a step waits at the gate
        self.closed = threading.Event()
        self._permits = threading.Semaphore(0)
        self._open = gate_open

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open_gate(self) -> None:
        self._open = True
        self._permits.release()

    def collect(self) -> StepResult:
        self.outstanding.append(len(self.results))
        if not self._open:
            self.collecting.set()
            assert self._permits.acquire(timeout=TIMEOUT), "no test let this step finish"
            self.collecting.clear()
        result = super().collect()
        if result.step_id == self.fail_at:
            raise RuntimeError("the device is gone")
        return result

    def close(self) -> None:
        super().close()
        self.closed.set()


class LightExecutor(GatedExecutor):
    """Does not read back what rows attend to, which makes long sequences cheap; a step takes the time of a small one
    on a device, or the engine would be through before its event loop has looked once."""

    def _read(self, plan, row) -> None:
        pass

    def collect(self) -> StepResult:
        time.sleep(0.0005)
        return super().collect()


@dataclass
class Replica:
    server: ReplicaServer
    executor: GatedExecutor
    stub: ReplicaServiceStub
    address: str

    async def load(self) -> ReplicaLoad:
        return codec.load_of((await self.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)).load)


def replica_config(**settings) -> ReplicaConfig:
    rank = RankConfig(model="fake", served_model_name="fake", max_num_seqs=16, max_num_batched_tokens=512)
    return ReplicaConfig(rank=rank, **settings)


@asynccontextmanager
async def running_replica(
    executor: GatedExecutor | None = None,
    *,
    card: ModelCard = CARD,
    num_blocks: int = 512,
    load: Callable | None = None,
    ranks: tuple[RankMemory, ...] = (),
    wait: bool = True,
    replica_id: str = "replica-t",
    **settings,
) -> AsyncIterator[Replica]:
    executor = executor or GatedExecutor(gate_open=True)
    loaded = Loaded(executor, card, num_blocks, "a fake", ranks=ranks)
    server = ReplicaServer(replica_config(**settings), load or (lambda config, on_phase: loaded), replica_id)
    address = await server.start()
    try:
        if wait:
            async with asyncio.timeout(TIMEOUT):
                await server.ready()
        async with grpc.aio.insecure_channel(address) as channel:
            yield Replica(server, executor, ReplicaServiceStub(channel), address)
    finally:
        executor.open_gate()
        async with asyncio.timeout(TIMEOUT):
            await server.stop()


class RawRouter:
    """One Attach stream. ``frames`` has all that came but heartbeats, which go to ``loads``."""

    def __init__(self, call):
        self.call = call
        self.frames: list[pb.AttachResponse] = []
        self.loads: list[ReplicaLoad] = []
        self.told_draining = False

    async def send(self, **frame) -> None:
        await asyncio.wait_for(self.call.write(pb.AttachRequest(**frame)), TIMEOUT)

    async def submit(self, handle: int, request: Request) -> None:
        await self.send(submit=codec.submission_of(request, handle))

    async def read(self) -> pb.AttachResponse | None:
        """The next frame; None at the end of the stream."""
        frame = await asyncio.wait_for(anext(aiter(self.call), None), TIMEOUT)
        if frame is not None and frame.WhichOneof("frame") == "heartbeat":
            self.loads.append(codec.load_of(frame.heartbeat.load))
            self.told_draining = frame.heartbeat.draining
        elif frame is not None:
            self.frames.append(frame)
        return frame

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                assert await self.read() is not None, "the stream ended"

    async def read_to_end(self) -> None:
        while await self.read() is not None:
            pass

    def of(self, kind: str) -> list:
        return [getattr(frame, kind) for frame in self.frames if frame.WhichOneof("frame") == kind]

    def handles(self, kind: str) -> list[int]:
        return [frame.handle for frame in self.of(kind)]

    def ids(self, handle: int, choice: int = 0) -> list[int]:
        """All ids of a choice, which must have come without a gap."""
        ids: list[int] = []
        for delta in self._deltas(handle, choice):
            assert delta.offset == len(ids) or not delta.ids
            ids += delta.ids
        return ids

    def endings(self, handle: int) -> list[tuple[int, str]]:
        """(choice, reason), in the order in which they came."""
        return [(delta.choice, delta.finish_reason) for delta in self._deltas(handle) if delta.finish_reason]

    def usage(self, handle: int, choice: int = 0):
        return next(delta.usage for delta in self._deltas(handle, choice) if delta.finish_reason)

    def _deltas(self, handle: int, choice: int | None = None):
        for frame in self.of("deltas"):
            for its_handle, delta in codec.deltas_of(frame, str):
                if its_handle == handle and choice in (None, delta.choice):
                    yield delta


@asynccontextmanager
async def stepping(executor: GatedExecutor) -> AsyncIterator[None]:
    """Lets a step finish every few milliseconds, so that what runs for long is still running afterwards."""

    async def allow() -> None:
        while True:
            if executor.collecting.is_set():
                executor.allow(1)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(allow())
    try:
        yield
    finally:
        task.cancel()


async def attached(
    replica: Replica, router_id: str = "router-a", stub: ReplicaServiceStub | None = None, **call
) -> RawRouter:
    router = RawRouter((stub or replica.stub).Attach(**call))
    await router.send(hello=hello(router_id))
    await router.read_until(lambda: bool(router.frames))
    assert router.frames[0].WhichOneof("frame") == "welcome"
    return router


def hello(router_id: str = "router-a", protocol: int = PROTOCOL, fingerprint: str = CARD.fingerprint) -> pb.Hello:
    return pb.Hello(router_id=router_id, incarnation="1", protocol=protocol, fingerprint=fingerprint)


async def until(condition: Callable, timeout: float = TIMEOUT) -> None:
    """Waits for a condition, plain or async, that has no event to wait for."""
    async with asyncio.timeout(timeout):
        while True:
            answer = condition()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.005)
