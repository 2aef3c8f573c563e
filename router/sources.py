"""Where the set of replicas comes from: a controller's stream, or a name in DNS. Each tells the whole set after every
change, as addresses with a state, and goes on for ever: a source that fails changes nothing, its last set stays.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Mapping

import grpc.aio

from paceline.proto import cluster_pb2, cluster_pb2_grpc
from paceline.proto.errors import StartupError
from paceline.router.link import Metadata, open_channel

log = logging.getLogger("paceline.router")

READY = cluster_pb2.REPLICA_STATE_READY
DRAINING = cluster_pb2.REPLICA_STATE_DRAINING
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds between attempts, doubled each time
RESOLVE_EVERY = 5.0  # seconds

States = Mapping[str, int]  # state by address
Tell = Callable[[States], None]


async def watch_controller(controller: str, router_id: str, metadata: Metadata, tell: Tell) -> None:
    """Ends by cancellation."""
    pause = FIRST_PAUSE
    while True:
        try:
            async with open_channel(controller) as channel:
                stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                request = cluster_pb2.WatchReplicasRequest(router_id=router_id)
                async for answer in stub.WatchReplicas(request, metadata=metadata):
                    pause = FIRST_PAUSE
                    tell({replica.address: replica.state for replica in answer.replicas})
            log.warning("the controller at %s ended the watch; the last set stays", controller)
        except grpc.aio.AioRpcError as error:
            log.warning("controller at %s: %s; the last set stays", controller, error.code().name)
        except Exception:
            log.exception("what the controller at %s sent cannot be used", controller)
        pause = await backoff(pause)


async def watch_name(name: str, tell: Tell) -> None:
    """``name`` is NAME:PORT; every IPv4 address that it resolves to is a replica. Ends by cancellation."""
    host, port = split_address(name)
    told: set[str] | None = None
    failure = ""
    while True:
        try:
            # In a thread of the loop's pool: a resolver may take seconds.
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
            addresses = {f"{address[0]}:{port}" for *_, address in found}
            if addresses != told:
                told, failure = addresses, ""
                tell(dict.fromkeys(addresses, READY))
        except OSError as error:
            if str(error) != failure:  # one line per reason, not per attempt
                log.warning("%s cannot be resolved: %s; the last set stays", name, error)
            failure = str(error)
        await asyncio.sleep(RESOLVE_EVERY)


def split_address(address: str) -> tuple[str, int]:
    """Raises StartupError unless it is HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise StartupError(f"{address!r} is not NAME:PORT")
    return host, int(port)


async def backoff(seconds: float) -> float:
    """Sleeps about so long, and says how long the next pause is. Spread, so that routers do not knock in step."""
    await asyncio.sleep(seconds * random.uniform(0.7, 1.3))
    return min(seconds * 2, LONGEST_PAUSE)
