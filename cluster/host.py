"""Hosts an engine on a thread of its own, for an event loop: requests go in, rows for each caller's outbox come out.

Requests get ids of the host's own (two routers may use the same one); each delta finds its way back through the route
of its request (routes.py). Knows no sockets, no ray and no torch. But for `_run` and what is marked, all of it belongs
to the loop.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.executor import Executor, Loaded
from paceline.cluster.engine.scheduler import Scheduler
from paceline.cluster.routes import Caller, Reply, Route, Routes
from paceline.proto import heap
from paceline.proto.errors import InvalidRequest, NoReplica, PacelineError, StartupError
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.request import Request, TokenDelta

log = logging.getLogger("paceline.replica")

NOTICE = 0.5  # seconds in which callers hear that it drains; what was on its way is still taken
LAST_BEFORE_WARM_UP = "card"  # phase of a rank's start
END_TIMEOUT = 5.0  # seconds that the engine may take to end what a drain leaves
STOP_TIMEOUT = 10.0  # seconds that a step, or a load, may still take when the host is stopped

# load(config, on_phase), on the engine's thread
Loader = Callable[[ReplicaConfig, Callable[[str, float], None]], Loaded]


class EngineHost:
    """``state`` is starting, loading, warming, ready, draining, drained, stopping or dead; ``failed`` is set when a
    loaded engine has died.

    ``load`` makes the executor on the engine's thread, so that one thread only ever touches the device.
    """

    def __init__(self, config: ReplicaConfig, load: Loader, name: str):
        self.name = name
        self.state = "starting"
        self.card: ModelCard | None = None
        self.description = ""  # on what was loaded, a line each rank
        self.ranks: tuple[RankMemory, ...] = ()  # what each of them holds
        self.start_seconds: dict[str, float] = {}  # that each phase of the start took, in order
        self.failed = asyncio.Event()
        self.failure = ""  # why, once it has
        self._config = config
        self._load = load
        self._engine: Engine | None = None
        self._executor: Executor | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[ModelCard] | None = None
        self._ended = asyncio.Event()  # the thread has nothing more to say
        self._refusing = False  # it drains, and callers have had time to hear it
        self._routes = Routes()
        self._callers: set[Caller] = set()
        self._ids = itertools.count(1)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self.state = "loading"
        self._thread.start()

    async def ready(self) -> ModelCard:
        """Waits until the model is loaded. Raises StartupError."""
        assert self._loaded is not None
        return await asyncio.shield(self._loaded)

    async def stop(self) -> None:
        """Ends what is open with an error. Every outbox ends once it has been told."""
        if self._loaded is None:
            return
        if self.state != "dead":
            self.state = "stopping"
        if self._engine is not None:
            self._engine.stop()
        self._settle_load(StartupError(f"{self.name} was stopped before the model was loaded"))
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_TIMEOUT)
            self._thread.join()
        except TimeoutError:
            log.warning("%s: the engine's thread is still busy; it ends with the process", self.name)

    async def drain(self, seconds: float) -> int:
        """Refuses what is new, lets what runs go on for so long, ends the rest: how many choices that were."""
        if self.state not in ("ready", "draining"):
            return 0
        if self.state == "ready":
            self.state = "draining"
            self.beat()
        if not self._refusing:
            await asyncio.sleep(NOTICE)
        self._refusing = True
        num_ended = 0
        if not await self._routes.emptied(seconds) and self._engine is not None:
            num_ended = self._routes.num_open
            for engine_id in self._routes:
                self._engine.lose(engine_id, f"replica {self.name} was drained for {seconds:.0f} s")
            await self._routes.emptied(END_TIMEOUT)
        if self.state == "draining":
            self.state = "drained"
        return num_ended

    def fail(self, reason: str) -> None:
        """Gives the engine up: it does not get on. Its thread may be stuck, so that nothing is asked of it."""
        if self.state != "dead":
            log.error("%s: %s", self.name, reason)
            self.state, self.failure = "dead", reason
            self._close_all()
            self.failed.set()

    def kill_ranks(self, seconds: float) -> None:
        """From any thread but the loop's: ranks that have processes of their own end, and with them what the engine
        waits for. Waits for that so long at most."""
        if self._executor is not None:
            killing = threading.Thread(target=self._executor.kill, name="kill ranks", daemon=True)
            killing.start()
            killing.join(seconds)

    def _run(self) -> None:
        """The engine's thread: load, then the loop."""
        error: BaseException | None = None
        try:
            loaded = self._load(self._config, self._on_phase)
            heap.settle()
            self._executor = loaded.executor
            scheduler = Scheduler(_engine_config(self._config, loaded))
            engine = Engine(scheduler, loaded.executor, self._publish, on_load=self._beat_if_idle)
            self._call_soon(self._set_loaded, engine, loaded)
            engine.run()
        except BaseException as raised:
            error = raised
        self._call_soon(self._set_ended, error)

    def _set_loaded(self, engine: Engine, loaded: Loaded) -> None:
        assert self._loaded is not None
        self._engine, self.card, self.description, self.ranks = engine, loaded.card, loaded.description, loaded.ranks
        if self.state == "stopping":
            engine.stop()
            return
        self.state = "ready"
        self._loaded.set_result(loaded.card)

    def _set_ended(self, error: BaseException | None) -> None:
        """Whatever the engine published has been delivered. Nobody is left waiting: see the order in Engine.run."""
        if error is not None:
            self.state = "dead"
            if self._engine is not None:
                self.failure = self.failure or (str(error) if isinstance(error, PacelineError) else repr(error))
                self.failed.set()
            else:
                log.error("%s: %s", self.name, error, exc_info=None if isinstance(error, PacelineError) else error)
                self._settle_load(_startup_error(error))
        self._close_all()
        self._ended.set()

    def _close_all(self) -> None:
        for engine_id in self._routes:
            self._routes.answer(engine_id, NoReplica(f"replica {self.name} is {self.state}"))
        for caller in self._callers:
            caller.outbox.end()

    def _settle_load(self, error: StartupError) -> None:
        assert self._loaded is not None
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # seen, should nobody wait for it

    def _on_phase(self, phase: str, seconds: float) -> None:
        log.info("%s: %s took %.2f s", self.name, phase, seconds)
        self.start_seconds[phase] = seconds
        if phase == LAST_BEFORE_WARM_UP:
            self._call_soon(self._set_warming)

    def _set_warming(self) -> None:
        if self.state == "loading":
            self.state = "warming"

    def _call_soon(self, function: Callable, *args) -> None:
        """From the engine's thread into the loop, in order."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("%s: the event loop is gone", self.name)

    # -- callers ---------------------------------------------------------------------------------------------------

    @property
    def load(self) -> ReplicaLoad:
        return self._engine.load if self._engine else ReplicaLoad()

    @property
    def limits(self) -> EngineConfig | None:
        """What the engine was given, once there is one."""
        return self._engine.scheduler.config if self._engine else None

    @property
    def got_on_at(self) -> float | None:
        """When the engine last got on, of the monotonic clock; None while it has no work. For any thread."""
        return self._engine.got_on_at if self._engine else None

    @property
    def stalled_seconds(self) -> float:
        """Since then. For any thread."""
        got_on_at = self.got_on_at
        return 0.0 if got_on_at is None else time.monotonic() - got_on_at

    @property
    def draining(self) -> bool:
        return self.state in ("draining", "drained")

    def open(self, name: str) -> Caller:
        caller = Caller(name)
        self._callers.add(caller)
        return caller

    def close(self, caller: Caller) -> None:
        """Whatever still runs for it is aborted: a broken stream is never resumed."""
        self._callers.discard(caller)
        for handle in list(caller.engine_ids):
            self.cancel(caller, handle)

    def beat(self) -> None:
        for caller in self._callers:
            caller.outbox.heartbeat(self.load, self.draining)

    def _beat_if_idle(self, load: ReplicaLoad) -> None:
        """On the engine's thread: that it fell idle is news; while busy the heartbeat of each second will do."""
        if not load.running and not load.waiting:
            self._call_soon(self.beat)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, caller: Caller, handle: int, request: Request, reply: Reply) -> None:
        """Queues a request. ``reply`` is called once, with None when the engine has taken it, before any of its deltas
        is in the outbox; a request that is cancelled before gets none."""
        if self._engine is None or self._refusing or self.state not in ("ready", "draining"):
            return reply(NoReplica(f"replica {self.name} is {self.state}", retry_after=1.0))
        if older := self._routes.newest(caller, request.request_id):
            if self._routes.get(older).attempt >= request.attempt:
                return reply(InvalidRequest(f"request {request.request_id} is already running here", "request_id"))
            self._engine.abort(older)  # overtaken: its endings say so
        engine_id = f"{request.request_id}#{next(self._ids)}"
        route = Route(caller, handle, request.request_id, request.attempt, request.params.n, reply)
        self._routes.add(engine_id, route)
        self._engine.submit(
            msgspec.structs.replace(request, request_id=engine_id),
            lambda error: self._call_soon(self._routes.answer, engine_id, error),
        )

    def cancel(self, caller: Caller, handle: int) -> None:
        """Ends a request; nothing more is sent for it. Unknown handles are fine: it may just have ended."""
        engine_id = caller.engine_ids.get(handle)
        if engine_id is not None and self._engine is not None:
            self._routes.drop(engine_id)
            self._engine.abort(engine_id)

    def finish(self, caller: Caller, handle: int, choice: int, num_ids: int) -> None:
        """Ends one choice as a success after ``num_ids`` ids."""
        engine_id = caller.engine_ids.get(handle)
        if engine_id is not None and self._engine is not None:
            self._engine.finish(engine_id, choice, num_ids)

    def abort(self, request_id: str) -> bool:
        """Ends a request for an operator, whoever sent it; its callers are told by the endings of its choices."""
        engine_ids = self._routes.of_request(request_id)
        for engine_id in engine_ids:
            self._engine.abort(engine_id)  # type: ignore[union-attr]  # routes exist only with an engine
        return bool(engine_ids)

    def _publish(self, deltas: list[TokenDelta]) -> None:
        """On the engine's thread: one call into the loop per step."""
        self._call_soon(self._routes.deliver, deltas)


def _engine_config(config: ReplicaConfig, loaded: Loaded) -> EngineConfig:
    card = loaded.card
    return EngineConfig(
        num_blocks=loaded.num_blocks,
        block_size=card.block_size,
        windows=card.windows,
        max_model_len=card.max_model_len,
        eos_ids=card.eos_ids,
        max_num_seqs=config.rank.max_num_seqs,
        max_num_batched_tokens=config.rank.max_num_batched_tokens,
        long_prefill_tokens=config.long_prefill_tokens,
        max_partial_prefills=config.max_partial_prefills,
        target_itl=config.target_itl,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        depth=config.depth or loaded.depth,
        num_stages=config.rank.pipeline_parallel_size,
    )


def _startup_error(error: BaseException) -> StartupError:
    if isinstance(error, StartupError):
        return error
    return StartupError(f"the model cannot be loaded: {type(error).__name__}: {error}")
