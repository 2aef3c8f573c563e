"""What is asked of Ray: room for a replica, a process in it, and both by name. Knows no states and decides nothing.

A replica is an actor named after it; its room is a placement group of the same name, a bundle for each of its stages
(room.py). Both are detached: they outlive the controller that asked for them, and a later one finds them. A replica of
several ranks starts them itself, in this room: see ranks.py. Calls that wait for Ray's head leave the event loop.
"""

import asyncio
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray has no public word for a node's free room
from ray.util import list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.actor import Replica
from paceline.cluster.config import ClusterConfig
from paceline.cluster.lifecycle import Report
from paceline.cluster.room import Node, bundles, shortage
from paceline.proto.errors import PacelineError, ReplicaLost

PREFIX = "replica-"


class Process:
    """A replica's process. Any call raises a PacelineError with one sentence when the process has ended or failed."""

    def __init__(self, actor: Any):
        self._actor = actor

    async def start(self) -> str:
        """HOST:PORT; the same when it is called again."""
        return await _answer(self._actor.start.remote())

    async def report(self) -> Report:
        return await _answer(self._actor.report.remote())

    async def run(self) -> None:
        """Returns never, but raises when the process ends."""
        await _answer(self._actor.run.remote())

    async def drain(self, seconds: float) -> int:
        return await _answer(self._actor.drain.remote(seconds))

    async def stop(self) -> None:
        await _answer(self._actor.stop.remote())

    async def kill(self) -> None:
        """Ray is told; a process that does not react, even one that is stopped, is gone some seconds later."""
        await asyncio.to_thread(ray.kill, self._actor, no_restart=True)


class RayPlacement:
    """All calls are idempotent."""

    def __init__(self, config: ClusterConfig):
        self._config = config

    async def find(self) -> dict[str, Process]:
        """Replicas that run, by name."""
        return await asyncio.to_thread(self._find)

    async def reserve(self, name: str) -> str | None:
        """Asks for room unless it was asked for. None once it is held, else what lacks."""
        return await asyncio.to_thread(self._reserve, name)

    async def create(self, name: str) -> Process:
        """Starts a process in the room of its name, unless there is one."""
        return await asyncio.to_thread(self._create, name)

    async def release(self, name: str) -> None:
        """Gives the room back."""
        await asyncio.to_thread(self._release, name)

    def _find(self) -> dict[str, Process]:
        namespace = self._config.namespace
        named = [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == namespace]
        found = {}
        for name in named:
            if name.startswith(PREFIX):
                try:
                    found[name] = Process(ray.get_actor(name, namespace=namespace))
                except ValueError:  # it ended meanwhile
                    continue
        return found

    def _reserve(self, name: str) -> str | None:
        wanted = self._wanted()
        group = _group(name)
        if group is not None and group.bundle_specs != wanted:  # of another configuration, or of a cluster without GPUs
            remove_placement_group(group)
            return "room of another size is being given back"
        if group is None:
            strategy = "PACK" if len(wanted) > 1 else "STRICT_PACK"
            group = placement_group(wanted, strategy=strategy, name=name, lifetime="detached")
        return None if group.wait(0) else shortage(wanted, _nodes())

    def _create(self, name: str) -> Process:
        group = _group(name)
        if group is None:
            raise ReplicaLost(f"the room of {name} is gone")
        first = group.bundle_specs[0]  # the engine stands beside rank 0, and is it where it is the only one
        own = first if self._config.replica.rank.num_ranks == 1 else {}
        actor = ray.remote(Replica).options(
            name=name,
            namespace=self._config.namespace,
            lifetime="detached",
            num_cpus=own.get("CPU", 0),
            num_gpus=own.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            max_restarts=0,
            get_if_exists=True,
        )
        return Process(actor.remote(self._config.replica, name))

    def _release(self, name: str) -> None:
        if (group := _group(name)) is not None:
            remove_placement_group(group)

    def _wanted(self) -> list[dict[str, float]]:
        """GPUs are asked for where they are named, or where the cluster has any."""
        rank = self._config.replica.rank
        with_gpus = rank.device == "cuda" or (rank.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        return bundles(rank, self._config.num_cpus_per_rank, with_gpus)


def _nodes() -> list[Node]:
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"]) for node in alive]


def _group(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


async def _answer(ref: Any) -> Any:
    try:
        return await ref
    except ray.exceptions.RayError as error:
        raise _said(error) from None


def _said(error: Exception) -> PacelineError:
    """One sentence out of what Ray wraps an actor's exception into."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, PacelineError):
        return cause
    lines = str(cause).strip().splitlines()
    return ReplicaLost(f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}")
