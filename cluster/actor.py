"""The Ray actor around a replica: a process, a name, and a way to be told that it died. No token passes through Ray."""

import logging
import os
import sys

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.replica import ReplicaServer
from paceline.worker import threads


class Replica:
    """Made by the controller as ``ray.remote(Replica)``. Its methods are awaited from there."""

    def __init__(self, config: ReplicaConfig, replica_id: str):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        # Ray sets one thread for one CPU resource; how many a rank may use is ours to say.
        os.environ.pop("OMP_NUM_THREADS", None)
        threads.prepare(config.rank.num_threads)
        self._config = config
        self._replica_id = replica_id
        self._server: ReplicaServer | None = None

    async def start(self) -> str:
        """Binds and begins to load; returns HOST:PORT. Raises StartupError."""
        self._server = ReplicaServer(self._config, _load, self._replica_id)
        return await self._server.start()

    async def ready(self) -> str:
        """Waits for the model; returns one line that says what was loaded. Raises StartupError."""
        assert self._server is not None
        await self._server.ready()
        return self._server.description

    async def run(self) -> None:
        """Ends when the engine is dead: the process goes with it, so that nobody takes it for alive."""
        assert self._server is not None
        await self._server.failed.wait()
        logging.getLogger("paceline.replica").error("%s: the engine is dead, the process ends", self._replica_id)
        sys.stderr.flush()
        os._exit(1)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


def _load(rank_config, on_phase):
    from paceline.cluster.local import load_local  # torch comes in here, on the engine's thread

    return load_local(rank_config, on_phase)
