"""The gRPC port: options, TLS, keys, health and reflection around the services of `rpc.py`.

Health follows the standard protocol. The empty name says that the process lives; each service's own name says whether a
request would be taken now, and turns before the server stops.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.proto import inference_pb2, inference_pb2_grpc
from paceline.proto.errors import StartupError
from paceline.router.auth import Guard
from paceline.router.config import RouterConfig
from paceline.router.metrics import Metrics
from paceline.router.rpc import Front, InferenceService, ModelService
from paceline.router.rpc_auth import KeyCheck
from paceline.router.service import Service

log = logging.getLogger("paceline.router")

SERVICES = tuple(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())
LOOK = 0.1  # seconds between looks at whether requests are taken


def options(config: RouterConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.grpc_max_message_bytes),
        ("grpc.max_send_message_length", config.grpc_max_message_bytes),
        # A whole answer may be a minute of silence, in which clients ping to see whether we live. By default the third
        # ping within 5 minutes ends the connection. (A name with "min_recv_ping_interval" is ignored by the library.)
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that vanished without a word is found out and its requests end.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
    ]


@asynccontextmanager
async def serving(
    service: Service,
    metrics: Metrics,
    guard: Guard,
    config: RouterConfig,
    accepting: Callable[[], bool],
    grace: float,
) -> AsyncIterator[None]:
    """Serves inside the block; then nothing new is taken, and what runs has ``grace`` seconds.

    ``accepting`` says whether a request would be taken now. Raises StartupError if the address cannot be bound.
    """
    front = Front(metrics, guard)
    server = grpc.aio.server(interceptors=[KeyCheck(guard, front)], options=options(config))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(service, front, config), server)
    inference_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(service, front), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if config.grpc_reflection:
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    log.info("gRPC listens on %s", _bind(server, config))
    await _tell(checks, accepting())
    await server.start()
    following = asyncio.create_task(_follow(checks, accepting))
    try:
        yield
    finally:
        following.cancel()
        await checks.enter_graceful_shutdown()
        await server.stop(grace)


def _bind(server: grpc.aio.Server, config: RouterConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.grpc_port}"
    try:
        if config.ssl_certfile:
            port = server.add_secure_port(address, _credentials(config))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address} for gRPC") from error
    return f"{host}:{port}"


def _credentials(config: RouterConfig) -> grpc.ServerCredentials:
    assert config.ssl_certfile
    key = Path(config.ssl_keyfile or config.ssl_certfile).read_bytes()
    chain = Path(config.ssl_certfile).read_bytes()
    authorities = Path(config.ssl_ca_certs).read_bytes() if config.ssl_ca_certs else None
    return grpc.ssl_server_credentials([(key, chain)], authorities, require_client_auth=authorities is not None)


async def _follow(checks: health.aio.HealthServicer, accepting: Callable[[], bool]) -> None:
    """Looks again and again: a link also goes quiet without telling anybody."""
    told = None
    while True:
        now = accepting()
        if now != told:
            await _tell(checks, now)
            told = now
        await asyncio.sleep(LOOK)


async def _tell(checks: health.aio.HealthServicer, accepting: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if accepting else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in SERVICES:
        await checks.set(name, status)
