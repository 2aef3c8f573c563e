"""The Ray actor around a replica: a process, a name, and a way to be told that it died. No token passes through Ray."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.lifecycle import Report
from paceline.cluster.replica import ReplicaServer
from paceline.cluster.watchdog import Watchdog
from paceline.proto import logs
from paceline.proto.errors import ReplicaLost
from paceline.proto.laps import Laps
from paceline.worker import threads

LAST_WORDS = 1.5  # seconds in which routers may read how their streams end
PARTING = 0.5  # seconds in which the controller may read why

log = logging.getLogger("paceline.replica")


class Replica:
    """Made by the controller as ``ray.remote(Replica)``. Its methods are awaited from there, by one controller after
    another: each may be called again."""

    def __init__(self, config: ReplicaConfig, replica_id: str):
        logs.configure(config.log_format, config.log_level)
        # Ray sets one thread for one CPU resource; how many a rank may use is ours to say.
        os.environ.pop("OMP_NUM_THREADS", None)
        threads.prepare(config.rank.num_threads)
        self._config = config
        self._replica_id = replica_id
        self._server: ReplicaServer | None = None

    async def start(self) -> str:
        """Binds and begins to load; returns HOST:PORT. Raises StartupError."""
        if self._server is None:
            self._server = ReplicaServer(self._config, self._load, self._replica_id)
            await self._server.start()
            Watchdog(self._server, self._config.step_timeout).start()
        return await self._server.start()

    def _load(self, config: ReplicaConfig, on_phase: Callable[[str, float], None]) -> Loaded:
        """On the engine's thread."""
        if config.rank.num_ranks == 1:
            return load_rank(config, on_phase)
        from paceline.cluster.ranks import load_ranks  # Ray is here already, and only here

        return load_ranks(self._replica_id, config, on_phase)

    async def report(self) -> Report:
        return self._server.report() if self._server else Report("starting")

    async def run(self) -> None:
        """Ends when the engine is dead, by a ReplicaLost that says why; the process goes then, so that nobody takes it
        for alive.

        Raises StartupError when the model cannot be loaded.
        """
        assert self._server is not None
        await self._server.ready()
        await self._server.failed.wait()
        log.error("%s: the engine is dead, the process ends", self._replica_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._server.close(), LAST_WORDS)
        sys.stderr.flush()
        asyncio.get_running_loop().call_later(PARTING, os._exit, 1)
        raise ReplicaLost(self._server.failure)

    async def drain(self, seconds: float) -> int:
        assert self._server is not None
        return await self._server.drain(seconds)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


def load_rank(config: ReplicaConfig, on_phase: Callable[[str, float], None]) -> Loaded:
    """A replica's loader: runs on the engine's thread. Several ranks are child processes on this host."""
    if config.rank.num_ranks > 1:
        from paceline.cluster.spawn import load_children

        return load_children(config, on_phase)
    laps = Laps(on_phase)
    from paceline.cluster.local import load_local  # torch comes in here, on the engine's thread

    laps.lap("imports")
    return load_local(config.rank, on_phase)
