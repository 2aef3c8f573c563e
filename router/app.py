"""A whole router in one call: pool, service, routes and the HTTP server. It starts things and
ends them in order, and decides nothing else.
"""

import asyncio
import ipaddress
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial

import uvicorn
from fastapi import FastAPI

from paceline.proto.errors import Draining, StartupError
from paceline.router.auth import Guard
from paceline.router.config import RouterConfig
from paceline.router.keyring import keyring_of
from paceline.router.metrics import Metrics
from paceline.router.policies import policy_of
from paceline.router.pool import Pool
from paceline.router.rest import make_app
from paceline.router.rpc_server import serving as serving_grpc
from paceline.router.service import Service
from paceline.router.transport import Protocol, listen

log = logging.getLogger("paceline.router")

GRACE = 2.0  # seconds that connections have to close once the router stops
CUT_WAIT = 0.5  # seconds in which streams that are cut off may still say so
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
    config: RouterConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event,
    now: asyncio.Event | None = None,
    start_seconds: Mapping[str, float] | None = None,
) -> None:
    """Serves until ``stop`` is set; then takes nothing new, lets what runs go on for ``drain_seconds`` or until ``now``
    is set, breaks the rest with an error event and returns.

    ``ready`` is called once, with the URL, when the port answers; a replica may still be on its way (`/health/ready`
    tells). ``start_seconds``: of phases before this. Run it under uvloop: this does not choose the loop. Raises
    StartupError if an address cannot be bound, a certificate or the file of keys cannot be used, or the config names
    what there is not.
    """
    policy = policy_of(config.routing_policy, random.Random())
    keyring = keyring_of(config.api_key_file)
    guard = Guard(keyring, config.open_routes)
    if keyring is None and not config.ssl_ca_certs and not _loopback(config.host):
        log.warning("no --api-key-file: whoever reaches %s may use this server", config.host)
    listener = listen(config.host, config.port, config.max_unread_bytes, 2 * config.slow_reader_seconds)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"
    service: Service
    pool = Pool(
        controller=config.controller,
        replicas=config.replicas,
        name=config.replicas_dns,
        token=config.cluster_token,
        policy=policy,
        on_card=lambda card: service.load(card),
    )
    metrics = Metrics(lambda: pool.links, lambda: service.gate.num_open)
    for phase, seconds in (start_seconds or {}).items():
        metrics.started(phase, seconds)
    service = Service(pool, config, metrics.shed, metrics.moved)
    http = _http_config(make_app(service, pool, metrics, guard, config), config)
    server = _Server(http, on_started=lambda: ready(url) if ready else None)
    grpc = AsyncExitStack()
    if config.grpc_port is not None:
        accepting = partial(_accepting, service, pool)
        await grpc.enter_async_context(serving_grpc(service, metrics, guard, config, accepting, GRACE))
    await pool.start()
    attaching = asyncio.create_task(_attached(pool, metrics))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    following = asyncio.create_task(keyring.follow()) if keyring else None
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await _drain(service, config.drain_seconds, now or asyncio.Event())
    finally:
        stopping.cancel()
        attaching.cancel()
        if following:
            following.cancel()
        server.should_exit = True
        await pool.close()
        await grpc.aclose()
        with suppress(asyncio.CancelledError):
            await serving
        listener.close()


async def _attached(pool: Pool, metrics: Metrics) -> None:
    began = time.perf_counter()
    await pool.wait_ready()
    seconds = time.perf_counter() - began
    metrics.started("attach", seconds)
    log.info("start: attach took %.2f s", seconds)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _accepting(service: Service, pool: Pool) -> bool:
    return pool.ready() and not service.gate.draining


async def _drain(service: Service, seconds: float, now: asyncio.Event) -> None:
    """Until nothing is open any more. What is left after its time hears why it ends."""
    log.info("draining: %d choices have %.0f s to end", service.gate.num_open, seconds)
    draining = asyncio.create_task(service.drain(seconds))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    hurry.cancel()
    if service.gate.num_open:
        log.warning("draining: %d choices are cut off", service.gate.num_open)
        service.cut(Draining("the server is shutting down"))
        await service.drain(CUT_WAIT)


def _http_config(app: FastAPI, config: RouterConfig) -> uvicorn.Config:
    if (config.ssl_keyfile or config.ssl_ca_certs) and not config.ssl_certfile:
        raise StartupError("a key or authorities for TLS were given without a certificate: ssl_certfile")
    http = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(GRACE),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )
    try:
        http.load()
    except OSError as error:  # ssl.SSLError is one
        raise StartupError(f"the certificate, its key or the authorities cannot be used: {error}") from error
    return http
