"""A replica or a controller as a process of its own, from start to signal; and an engine in a process that has other
things to do. The command line runs these.

A replica and a controller return the exit status. The first SIGTERM or SIGINT asks: a replica drains, a controller
leaves its replicas to the next one. A second one ends the process at once.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paceline.cluster.actor import LAST_WORDS, load_rank
from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.cluster.host import EngineHost, Loader
from paceline.cluster.replica import ReplicaServer
from paceline.cluster.watchdog import Watchdog
from paceline.proto.model import ModelCard
from paceline.worker import threads

log = logging.getLogger("paceline")


async def run_replica(
    config: ReplicaConfig,
    *,
    replica_id: str = "",
    listening: Callable[[str], None] | None = None,
    ready: Callable[[str], None] | None = None,
    load: Loader = load_rank,
) -> int:
    """A replica without Ray. 0 after a drain, 1 when the engine has died.

    ``listening`` is told HOST:PORT once the port answers, ``ready`` once the model is loaded. Raises StartupError.
    """
    stop = _signalled()
    if config.rank.num_ranks == 1:  # else its ranks have processes of their own, and see to that there
        threads.prepare(config.rank.num_threads)
    server = ReplicaServer(config, load, replica_id)
    address = await server.start()
    watchdog = Watchdog(server, config.step_timeout)
    watchdog.start()
    if listening is not None:
        listening(address)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(server.ready())
    try:
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return 0
        loading.result()
        if ready is not None:
            ready(address)
        failing = asyncio.create_task(server.failed.wait())
        await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        if not failing.done():
            log.info("draining for up to %g s", config.drain_seconds)
            draining = asyncio.create_task(server.drain(config.drain_seconds))
            await asyncio.wait((draining, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():  # its thread may be stuck: nothing is waited for but what routers read
            await asyncio.wait((asyncio.create_task(server.close()),), timeout=LAST_WORDS)
            return 1
        return 0
    finally:
        if server.state != "dead":
            await server.stop()
        watchdog.stop()


async def run_controller(config: ClusterConfig, *, ready: Callable[[str], None] | None = None) -> int:
    """A controller that joins the Ray at ``ray_address``, where replicas outlive it. One at a time in a namespace.

    ``ready`` is told HOST:PORT once what runs already was taken over. Raises StartupError.
    """
    from paceline.cluster.controller import Controller
    from paceline.cluster.launch import connect  # Ray comes in here: a replica of its own does without
    from paceline.cluster.placement import RayPlacement

    await asyncio.to_thread(connect, config)
    stop = _signalled()  # after Ray, which takes SIGTERM for itself when it starts
    controller = Controller(config, RayPlacement(config))
    address = await controller.start()
    if ready is not None:
        ready(address)
    await stop.wait()
    log.info("the controller leaves; replicas go on")
    await controller.leave()
    return 0


@asynccontextmanager
async def hosting(config: ReplicaConfig, load: Loader = load_rank) -> AsyncIterator[tuple[EngineHost, ModelCard]]:
    """An engine in this process, loaded, without a door: to be measured. Raises StartupError."""
    if config.rank.num_ranks == 1:
        threads.prepare(config.rank.num_threads)
    host = EngineHost(config, load, "engine")
    host.start()
    try:
        yield host, await host.ready()
    finally:
        await host.stop()


def _signalled() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT."""
    stop = asyncio.Event()

    def heard(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, heard, number)
    return stop
