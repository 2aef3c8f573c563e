"""A whole router in one call: pool, service, routes and the HTTP server. It starts things and decides nothing."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from paceline.proto.errors import StartupError
from paceline.router.config import RouterConfig
from paceline.router.metrics import Metrics
from paceline.router.pool import Pool
from paceline.router.rest import make_app
from paceline.router.service import Service

log = logging.getLogger("paceline.router")

GRACE = 2.0  # seconds that connections have to close once the router stops
KEEP_ALIVE = 75  # seconds an idle connection stays open: longer than clients' pools keep theirs


class _Server(uvicorn.Server):
    """Leaves signals to whoever called, and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]):
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


async def serve_router(
    config: RouterConfig, *, ready: Callable[[str], None] | None = None, stop: asyncio.Event
) -> None:
    """Serves until ``stop`` is set; then breaks what still runs with an error event and returns.

    ``ready`` is called once, with the URL, when the port answers; a replica may still be on its way (`/health/ready`
    tells). Run it under uvloop: this does not choose the loop. Raises StartupError if the address cannot be bound.
    """
    listener = _listen(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    service: Service
    pool = Pool(controller=config.controller, replicas=config.replicas, on_card=lambda card: service.load(card))
    service = Service(pool, config)
    app = make_app(service, pool, Metrics(lambda: pool.links), config)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(GRACE),
        ),
        on_started=lambda: ready(url) if ready else None,
    )
    await pool.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await pool.close()
        with suppress(asyncio.CancelledError):
            await serving
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
