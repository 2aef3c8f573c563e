"""One replica: an engine on its own thread, and the gRPC door in front of it. Knows no ray and imports no torch.

Requests get ids of the replica's own (two routers, or two clients, may use the same one); each delta finds its way
back through the route of its request. Nothing here runs on the engine's thread but handing over.
"""

import asyncio
import itertools
import logging
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio
import msgspec

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.scheduler import Scheduler
from paceline.cluster.outbox import Outbox
from paceline.proto import codec, hashing
from paceline.proto import replica_pb2 as pb
from paceline.proto.errors import InvalidRequest, NoReplica, PacelineError, StartupError
from paceline.proto.load import ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.replica_pb2_grpc import ReplicaServiceServicer, add_ReplicaServiceServicer_to_server
from paceline.proto.request import FINISH_ERROR, Request, TokenDelta

log = logging.getLogger("paceline.replica")

PROTOCOL = 1
HEARTBEAT = 1.0  # seconds
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.so_reuseport", 0),
    # A stream may be silent for long while a router waits; its keepalive pings are no offence.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

# load(rank config, on_phase) -> (executor, card, number of blocks, one line on them); runs on the engine's thread
Loader = Callable[..., tuple]


@dataclass(slots=True)
class Route:
    """Where the news of one request goes."""

    outbox: Outbox
    handle: int
    request_id: str  # the router's
    attempt: int
    num_open: int  # choices that have not ended


class ReplicaServer:
    """``start`` binds the port and begins to load; ``ready`` waits for the model; ``stop`` ends everything.

    ``load`` makes the executor on the engine's thread, so that one thread only ever touches the device.
    """

    def __init__(self, config: ReplicaConfig, load: Loader, replica_id: str = ""):
        self.replica_id = replica_id or f"replica-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_hex(8)
        self.state = "starting"
        self.card: ModelCard | None = None
        self.description = ""  # one line on what was loaded
        self.failed: asyncio.Event = asyncio.Event()  # the engine is dead; the process should end
        self._config = config
        self._load = load
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._routes: dict[str, Route] = {}  # by engine id
        self._newest: dict[str, str] = {}  # router's request id -> engine id of its latest attempt
        self._outboxes: list[Outbox] = []
        self._ids = itertools.count(1)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Returns HOST:PORT. Raises StartupError when it cannot be bound."""
        sys.setswitchinterval(0.0005)  # a thread that never yields would hold up the engine for 5 ms each time
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_ReplicaServiceServicer_to_server(_Service(self), self._server)
        try:
            port = self._server.add_insecure_port(f"{self._config.host}:{self._config.port}")
        except RuntimeError as error:
            raise StartupError(f"replica cannot listen on {self._config.host}:{self._config.port}: {error}") from error
        await self._server.start()
        self.state = "loading"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return f"{self._config.host}:{port}"

    async def ready(self) -> ModelCard:
        """Waits until the model is loaded. Raises StartupError."""
        assert self._loaded is not None
        await asyncio.shield(self._loaded)
        assert self.card is not None
        return self.card

    async def stop(self) -> None:
        """Ends open requests with an error, then the door."""
        self.state = "stopping"
        if self._engine is not None:
            self._engine.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)
        await asyncio.sleep(0)  # what the engine published last is on its way into the outboxes
        if self._server is not None:
            await self._server.stop(grace=0.5)

    def _run(self) -> None:
        """The engine's thread: load, then the loop."""
        assert self._loop is not None
        try:
            executor, card, num_blocks, description = self._load(self._config.rank, self._on_phase)
            engine = Engine(
                Scheduler(self._engine_config(card, num_blocks)), executor, self._publish, on_load=self._beat_if_idle
            )
        except BaseException as error:
            self._call_soon(self._set_failed_to_load, error)
            return
        self._call_soon(self._set_loaded, engine, card, description)
        try:
            engine.run()
        except BaseException:  # logged by the engine
            self._call_soon(self._set_failed)

    def _engine_config(self, card: ModelCard, num_blocks: int) -> EngineConfig:
        config = self._config
        return EngineConfig(
            num_blocks=num_blocks,
            block_size=card.block_size,
            max_model_len=card.max_model_len,
            eos_ids=card.eos_ids,
            max_num_seqs=config.rank.max_num_seqs,
            max_num_batched_tokens=config.rank.max_num_batched_tokens,
            long_prefill_tokens=config.long_prefill_tokens,
            max_partial_prefills=config.max_partial_prefills,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            depth=config.depth,
        )

    def _set_loaded(self, engine: Engine, card: ModelCard, description: str) -> None:
        assert self._loaded is not None
        self._engine, self.card, self.description, self.state = engine, card, description, "ready"
        self._loaded.set_result(None)

    def _set_failed_to_load(self, error: BaseException) -> None:
        assert self._loaded is not None
        self.state = "dead"
        log.error(
            "%s: cannot load the model", self.replica_id, exc_info=None if isinstance(error, StartupError) else error
        )
        self._loaded.set_exception(error if isinstance(error, Exception) else StartupError(repr(error)))

    def _set_failed(self) -> None:
        self.state = "dead"
        self.failed.set()

    def _on_phase(self, phase: str, seconds: float) -> None:
        log.info("%s: %s took %.2f s", self.replica_id, phase, seconds)

    def _call_soon(self, function: Callable, *args) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("%s: the event loop is gone", self.replica_id)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def load(self) -> ReplicaLoad:
        return self._engine.load if self._engine else ReplicaLoad()

    def submit(self, request: Request, outbox: Outbox, handle: int) -> asyncio.Future[None]:
        """Queues a request whose deltas go to ``outbox``. The future ends when the engine has taken it, or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        try:
            engine = self._engine_or_error()
            engine_id = self._new_route(request, outbox, handle)
        except PacelineError as error:
            answer.set_exception(error)
            return answer

        def replied(error: PacelineError | None) -> None:
            if error is None:
                answer.set_result(None)
            else:
                self._drop(engine_id)
                answer.set_exception(error)

        engine.submit(
            msgspec.structs.replace(request, request_id=engine_id), lambda error: self._call_soon(replied, error)
        )
        return answer

    def _engine_or_error(self) -> Engine:
        if self._engine is None or self.state != "ready":
            raise NoReplica(f"replica {self.replica_id} is {self.state}", retry_after=1.0)
        return self._engine

    def _new_route(self, request: Request, outbox: Outbox, handle: int) -> str:
        """A newer attempt of a request ends the older one; an older or equal one is refused (it was overtaken)."""
        if older := self._newest.get(request.request_id):
            if self._routes[older].attempt >= request.attempt:
                raise InvalidRequest(f"request {request.request_id} is already running here", "request_id")
            self.abort(older)
        engine_id = f"{request.request_id}#{next(self._ids)}"
        self._newest[request.request_id] = engine_id
        self._routes[engine_id] = Route(outbox, handle, request.request_id, request.attempt, request.params.n)
        return engine_id

    def abort(self, engine_id: str) -> None:
        """Ends a request; nothing more is sent for it."""
        if self._drop(engine_id) and self._engine is not None:
            self._engine.abort(engine_id)

    def abort_by_request_id(self, request_id: str) -> bool:
        """Ends a request for whoever asks; its owner is told by the endings of its choices."""
        engine_id = self._newest.get(request_id)
        if engine_id is None or self._engine is None:
            return False
        self._engine.abort(engine_id)
        return True

    def engine_ids_of(self, outbox: Outbox) -> dict[int, str]:
        return {route.handle: engine_id for engine_id, route in self._routes.items() if route.outbox is outbox}

    def find(self, outbox: Outbox, handle: int) -> str | None:
        return next((e for e, r in self._routes.items() if r.outbox is outbox and r.handle == handle), None)

    def finish(self, engine_id: str, choice: int, num_ids: int) -> None:
        if self._engine is not None:
            self._engine.finish(engine_id, choice, num_ids)

    def _drop(self, engine_id: str) -> bool:
        route = self._routes.pop(engine_id, None)
        if route is None:
            return False
        if self._newest.get(route.request_id) == engine_id:
            del self._newest[route.request_id]
        return True

    def _publish(self, deltas: list[TokenDelta]) -> None:
        """On the engine's thread: one call into the loop per step."""
        self._call_soon(self._deliver, deltas)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        rows: dict[Outbox, list[tuple[int, TokenDelta]]] = {}
        routes = self._routes
        for delta in deltas:
            route = routes.get(delta.request_id)
            if route is None:  # aborted meanwhile
                continue
            rows.setdefault(route.outbox, []).append((route.handle, delta))
            if delta.finish_reason is not None:
                route.num_open -= 1
                if delta.finish_reason == FINISH_ERROR:
                    log.error("%s choice %d: %s", route.request_id, delta.choice, delta.error)
                if not route.num_open:
                    self._drop(delta.request_id)
        for outbox, its_rows in rows.items():
            outbox.deltas(its_rows)

    # -- streams ---------------------------------------------------------------------------------------------------

    def open_outbox(self) -> Outbox:
        outbox = Outbox()
        self._outboxes.append(outbox)
        return outbox

    def close_outbox(self, outbox: Outbox) -> None:
        """Whatever still runs for it is aborted: a broken stream is never resumed."""
        outbox.close()
        self._outboxes.remove(outbox)
        for engine_id in self.engine_ids_of(outbox).values():
            self.abort(engine_id)

    def _beat_if_idle(self, load: ReplicaLoad) -> None:
        """On the engine's thread: that it fell idle is news; while busy the heartbeat of each second will do."""
        if not load.running and not load.waiting:
            self._call_soon(self.beat)

    def beat(self) -> None:
        for outbox in self._outboxes:
            outbox.heartbeat(self.load)


class _Service(ReplicaServiceServicer):
    """The wire: frames to calls of the server and back."""

    def __init__(self, server: ReplicaServer):
        self._replica = server

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        replica = self._replica
        if replica.card is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"replica {replica.replica_id} is {replica.state}")
            return
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("frame") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be a hello")
            return
        hello, card = first.hello, replica.card
        if hello.protocol != PROTOCOL:
            message = f"protocol {hello.protocol} is not {PROTOCOL}: run router and replica of one release"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if hello.fingerprint not in ("", card.fingerprint):
            message = f"this replica serves {card.fingerprint}, not {hello.fingerprint}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        log.info("%s: router %s attached", replica.replica_id, hello.router_id)
        outbox = replica.open_outbox()
        tasks = [asyncio.create_task(self._read(requests, outbox)), asyncio.create_task(self._beat(outbox))]
        try:
            yield pb.AttachResponse(
                welcome=pb.Welcome(
                    replica_id=replica.replica_id,
                    incarnation=replica.incarnation,
                    protocol=PROTOCOL,
                    fingerprint=card.fingerprint,
                )
            )
            while (frame := await outbox.take()) is not None:
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            replica.close_outbox(outbox)
            log.info("%s: router %s left", replica.replica_id, hello.router_id)

    async def _read(self, requests: AsyncIterator[pb.AttachRequest], outbox: Outbox) -> None:
        replica = self._replica
        try:
            async for frame in requests:
                kind = frame.WhichOneof("frame")
                if kind == "submit":
                    self._submit(frame.submit, outbox)
                elif kind == "cancel":
                    if engine_id := replica.find(outbox, frame.cancel.handle):
                        replica.abort(engine_id)
                elif kind == "finish" and (engine_id := replica.find(outbox, frame.finish.handle)):
                    replica.finish(engine_id, frame.finish.choice, frame.finish.num_ids)
        finally:
            outbox.close()

    def _submit(self, submission: pb.Submission, outbox: Outbox) -> None:
        handle = submission.handle

        def answered(answer: asyncio.Future[None]) -> None:
            error = answer.exception()
            if error is None:
                outbox.control(pb.AttachResponse(accepted=pb.Accepted(handle=handle)))
            else:
                info = codec.error_message(_as_paceline(error))
                outbox.control(pb.AttachResponse(rejected=pb.Rejected(handle=handle, error=info)))

        self._replica.submit(codec.request_of(submission), outbox, handle).add_done_callback(answered)

    async def _beat(self, outbox: Outbox) -> None:
        while True:
            outbox.heartbeat(self._replica.load)
            await asyncio.sleep(HEARTBEAT)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        replica = self._replica
        outbox = replica.open_outbox()
        try:
            asked = _with_hashes(codec.request_of(request.submission), replica.card)
            await replica.submit(asked, outbox, 1)
            num_open = asked.params.n
            while num_open:
                frame = await outbox.take()
                if frame is None:
                    break
                if frame.WhichOneof("frame") == "deltas":
                    num_open -= len(frame.deltas.endings)
                    yield pb.GenerateResponse(deltas=frame.deltas)
        except PacelineError as error:
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)
        finally:
            replica.close_outbox(outbox)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(num_known=sum(map(self._replica.abort_by_request_id, request.request_ids)))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        card = self._replica.card
        if card is None:
            message = f"replica {self._replica.replica_id} is {self._replica.state}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, message)
            raise AssertionError("abort raises")
        return pb.GetModelResponse(card_json=codec.card_to_json(card))

    async def GetState(self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext) -> pb.GetStateResponse:
        replica = self._replica
        return pb.GetStateResponse(
            replica_id=replica.replica_id,
            incarnation=replica.incarnation,
            state=replica.state,
            load=codec.load_message(replica.load),
        )


def _with_hashes(request: Request, card: ModelCard | None) -> Request:
    """A request that came without a router's names for its blocks gets them here."""
    if card is None or request.cache_root or not request.request_id:
        request_id = request.request_id or f"generate-{secrets.token_hex(8)}"
        return msgspec.structs.replace(request, request_id=request_id)
    root = hashing.root_of(card)
    return msgspec.structs.replace(
        request, cache_root=root, block_hashes=hashing.prompt_hashes(root, request.prompt_ids, card.block_size)
    )


def _as_paceline(error: BaseException) -> PacelineError:
    return error if isinstance(error, PacelineError) else NoReplica(str(error))
