"""Starts and ends what `paceline serve` runs on Ray: the local cluster where none is given, and the controller.

Blocking calls for a process that has no event loop yet. It knows Ray's life, not what runs in it.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from paceline.cluster.address import free_port
from paceline.cluster.config import ClusterConfig
from paceline.cluster.controller import Controller
from paceline.cluster.placement import RayPlacement
from paceline.proto.errors import PacelineError, StartupError
from paceline.proto.laps import Laps

OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB; no tensor ever goes through it
POLL = 0.2  # seconds
NAME = "controller"


class Cluster:
    """``start`` returns the controller's HOST:PORT once every replica serves; ``stop`` leaves no process behind."""

    def __init__(self, config: ClusterConfig):
        self._config = config
        self._controller: Any = None  # Ray's handle

    def start(
        self,
        on_states: Callable[[dict[str, str]], None] = lambda states: None,
        on_phase: Callable[[str, float], None] = lambda phase, seconds: None,
    ) -> tuple[str, list[str]]:
        """Also returns what each replica loaded. ``on_phase`` is told each phase and its seconds. Raises StartupError
        with the reason of the first that cannot."""
        laps = Laps(on_phase)
        connect(self._config)
        laps.lap("ray")
        self._controller = controller = _launch(self._config)
        try:
            address = ray.get(controller.start.remote())
            laps.lap("controller")
            if not ray.get(controller.serves.remote(self._config)):
                self._controller = None  # another's, and not ours to stop
                raise StartupError(
                    f"namespace {self._config.namespace!r} of this Ray has a controller with another configuration or "
                    "cluster token: use another namespace, or start with the same"
                )
            ready = controller.wait_ready.remote()
            while not ray.wait([ready], timeout=POLL)[0]:
                on_states(ray.get(controller.states.remote()))
            loaded = ray.get(ready)
            laps.lap("replicas")
            return address, loaded
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise StartupError(cause.message if isinstance(cause, PacelineError) else str(cause)) from None
        except ray.exceptions.RayActorError as error:
            raise StartupError(f"the controller died: {error}") from None

    def drain(self, replica_id: str, seconds: float | None = None) -> None:
        """Takes one replica out; returns when it is gone. Raises InvalidRequest for a name that is not there."""
        try:
            ray.get(self._controller.drain.remote(replica_id, seconds))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, PacelineError) else error from None

    def stop(self) -> None:
        if not ray.is_initialized():
            return
        if self._controller is not None:
            try:
                ray.get(self._controller.stop.remote(), timeout=8)
            except (ray.exceptions.RayError, TimeoutError):
                logging.getLogger("paceline").warning("the controller did not stop by itself")
            ray.kill(self._controller, no_restart=True)
        ray.shutdown()


def connect(config: ClusterConfig) -> None:
    """A given address is joined. Otherwise a local cluster is started: no dashboard, a small object store, CPUs for all
    ranks, be they more than there are; GPUs are those that Ray finds."""
    num_ranks = config.num_replicas * config.replica.rank.num_ranks
    options = {"namespace": config.namespace, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if config.ray_address:
            ray.init(address=config.ray_address, **options)
            return
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            num_cpus=max(os.cpu_count() or 1, num_ranks * config.num_cpus_per_rank),
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(f"Ray at {config.ray_address or 'this machine'} cannot be had: {error}") from error


def _launch(config: ClusterConfig) -> Any:
    """The controller as an actor that Ray makes again when it dies. It comes back on the port that it is given here:
    routers know no other."""
    port = config.controller_port or free_port(config.host)
    config = msgspec.structs.replace(config, controller_port=port)
    actor = ray.remote(Controller).options(
        name=NAME,
        namespace=config.namespace,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        get_if_exists=True,
    )
    return actor.remote(config, RayPlacement(config))
