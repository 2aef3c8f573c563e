"""One replica: an engine (host.py), its gRPC door (service.py) and how it is (health.py). No ray, no torch.

Whoever owns its process may set a watchdog.py on it.
"""

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable

import grpc.aio

from paceline.cluster.address import advertised, bound
from paceline.cluster.config import ReplicaConfig
from paceline.cluster.guard import guards
from paceline.cluster.health import HealthServer, Vitals
from paceline.cluster.host import EngineHost, Loader
from paceline.cluster.lifecycle import Report
from paceline.cluster.service import ReplicaService
from paceline.proto.errors import StartupError
from paceline.proto.load import ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.replica_pb2_grpc import add_ReplicaServiceServicer_to_server

log = logging.getLogger("paceline.replica")

SLOW_SHARE = 0.5  # of the step timeout, after which a step without end counts as no progress
STOP_GRACE = 1.0  # seconds in which routers may read how their requests ended
KILL_TIMEOUT = 1.0  # seconds in which a gang's ranks may be ended before the process itself goes
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.so_reuseport", 0),
    # A stream may be silent for long while a router waits; its keepalive pings are no offence.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ReplicaServer:
    """``start`` binds the port and begins to load; ``ready`` waits for the model; ``drain`` finishes what runs;
    ``stop`` ends everything. ``address`` is HOST:PORT for routers."""

    def __init__(self, config: ReplicaConfig, load: Loader, replica_id: str = ""):
        self.replica_id = replica_id or f"replica-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_hex(8)
        self._config = config
        self._host = EngineHost(config, load, self.replica_id)
        self._server: grpc.aio.Server | None = None
        self._health: HealthServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address = ""

    async def start(self) -> str:
        """Returns the address; again, if it was called before. Raises StartupError when a port cannot be bound."""
        if self.address:
            return self.address
        sys.setswitchinterval(0.0005)  # a thread that never yields would hold up the engine for 5 ms each time
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards(config.cluster_token))
        add_ReplicaServiceServicer_to_server(ReplicaService(self._host, self.incarnation), self._server)
        try:
            port = self._server.add_insecure_port(bound(config.host, config.port))
        except RuntimeError as error:
            raise StartupError(f"replica cannot listen on {config.host}:{config.port}: {error}") from error
        if config.health_port is not None:
            self._health = HealthServer(self.vitals, config.host, config.health_port)
            self._health.start()
            log.info("%s: health at http://%s/health/live", self.replica_id, bound(config.host, self._health.port))
        self.address = advertised(config.host, port, config.advertise)
        await self._server.start()
        self._host.start()
        return self.address

    async def ready(self) -> ModelCard:
        """Waits until the model is loaded. Raises StartupError."""
        return await self._host.ready()

    async def drain(self, seconds: float) -> int:
        """Refuses what is new, lets what runs go on for so long, ends the rest: how many choices that were."""
        return await self._host.drain(seconds)

    async def stop(self) -> None:
        """Ends open requests with an error, then the door."""
        await self._host.stop()
        await self.close()

    async def close(self) -> None:
        """The door only: routers have a moment to read how their requests ended."""
        if self._server is not None:
            await self._server.stop(STOP_GRACE)
        if self._health is not None:
            self._health.stop()

    # -- how it is; for any thread ---------------------------------------------------------------------------------

    def vitals(self) -> Vitals:
        host, timeout = self._host, self._config.step_timeout
        stalled = host.stalled_seconds
        return Vitals(
            live=host.state != "dead" and stalled < timeout,
            ready=host.state == "ready",
            progress=host.state != "dead" and stalled < timeout * SLOW_SHARE,
            state=host.state,
            stalled_seconds=stalled,
        )

    def got_on_at(self) -> float | None:
        return self._host.got_on_at

    def give_up(self, reason: str) -> None:
        """From the watchdog's thread. A rank that is stopped would outlive this process, and keep its device."""
        self.call_soon(lambda: self._host.fail(reason))
        self._host.kill_ranks(KILL_TIMEOUT)

    def call_soon(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: the process is about to end anyway
            log.debug("%s: the event loop is gone", self.replica_id)

    # -- for its process -------------------------------------------------------------------------------------------

    def report(self) -> Report:
        return Report(self._host.state, self.address, self.incarnation, self._host.description)

    @property
    def state(self) -> str:
        return self._host.state

    @property
    def description(self) -> str:
        """On what was loaded, a line each rank."""
        return self._host.description

    @property
    def health_port(self) -> int | None:
        return self._health.port if self._health else None

    @property
    def load(self) -> ReplicaLoad:
        return self._host.load

    @property
    def failure(self) -> str:
        """Why it has failed."""
        return self._host.failure

    @property
    def failed(self) -> asyncio.Event:
        """Set when the engine is dead: the process should end."""
        return self._host.failed
