"""The ranks of a replica as Ray actors, each in its stage's part of the replica's room. Made by the replica itself.

Ray gives each a process, a node and a device, and says when it is gone; what a rank does, and every word it exchanges
with its engine, is rank_process.py's. Actors are owned by the replica's and end with it. Knows no torch.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster import rank_process
from paceline.cluster.channel import Door
from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.gang import load_gang
from paceline.proto.errors import StartupError
from paceline.worker.config import RankConfig

START_PATIENCE = 60.0  # seconds in which Ray starts a process where there is room; what was there before is gone sooner


def load_ranks(replica_id: str, config: ReplicaConfig, on_phase: Callable[[str, float], None]) -> Loaded:
    """The loader of a replica of several ranks: runs on its engine's thread. Raises StartupError."""
    launcher = RayLauncher(replica_id, config.rank)
    return load_gang(config, launcher, on_phase, host=ray.util.get_node_ip_address())


class RankProcess:
    """The actor. Its one thread, the main one, runs the rank and touches torch."""

    def where(self) -> tuple[str, int]:
        """Ray's id of the node, and the process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, door: Door, index: int) -> None:
        """The rank's whole life, and this process's."""
        # Ray sets one thread for one CPU resource; how many a rank may use is ours to say.
        os.environ.pop("OMP_NUM_THREADS", None)
        status = rank_process.run(door, index, node=self.where()[0])
        if status == 0:
            ray.actor.exit_actor()  # nothing that Ray has to tell anybody
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # its device is free at once; an actor would wait for more to do


class _Asked(NamedTuple):
    """``where`` is done once the process runs, ``life`` once that is over."""

    actor: Any
    where: Future
    life: Future


class RayLauncher:
    """A `gang.Launcher` for the replica of that name, in whose process it is made."""

    def __init__(self, replica_id: str, config: RankConfig):
        self._replica_id = replica_id
        self._config = config
        self._ranks: list[_Asked] = []
        self._group: PlacementGroup | None = None
        self._since = 0.0  # when they were asked for; seconds of the monotonic clock

    def start(self, door: Door) -> None:
        self._since = time.monotonic()
        try:
            self._group = group = get_placement_group(self._replica_id)
        except ValueError as error:
            raise StartupError(f"the room of {self._replica_id} is gone") from error
        size = self._config.tensor_parallel_size
        for index in range(self._config.num_ranks):
            stage = index // size
            bundle = group.bundle_specs[stage]
            actor = (
                ray.remote(RankProcess)
                .options(
                    num_cpus=bundle["CPU"] / size,
                    num_gpus=bundle.get("GPU", 0) / size,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=stage),
                    max_restarts=0,
                )
                .remote()
            )
            self._ranks.append(_Asked(actor, actor.where.remote().future(), actor.run.remote(door, index).future()))

    def troubles(self) -> dict[int, str]:
        ended = {index: _end_of(rank.life) for index, rank in enumerate(self._ranks) if rank.life.done()}
        to_come = [index for index, rank in enumerate(self._ranks) if not rank.where.done()]
        if to_come and (reason := self._why_not()):
            return dict.fromkeys(to_come, reason) | ended
        return ended

    def _why_not(self) -> str:
        """Why a process that has not begun will not, as far as one can know."""
        if placement_group_table(self._group)["state"] != "CREATED":
            return "a node of this replica is gone, and the room there with it"
        if time.monotonic() - self._since > START_PATIENCE:
            return f"Ray has not started its process in {START_PATIENCE:.0f} s; its room is held: see Ray's logs there"
        return ""

    def kill(self) -> None:
        """Those on this node at once, by their process: Ray takes some seconds for one that is stopped, and what it
        was asked last may be lost if this process ends now."""
        here = ray.get_runtime_context().get_node_id()
        for rank in self._ranks:
            if rank.where.done() and rank.where.exception() is None:
                node, pid = rank.where.result()
                if node == here:
                    _kill_process(pid)
        for rank in self._ranks:
            ray.kill(rank.actor, no_restart=True)


def _end_of(life: Future) -> str:
    """One sentence on why it is over."""
    error = life.exception()
    if exit_type := re.search(r"Worker exit type: (\w+)", str(error)):  # Ray guesses at causes for a page
        return f"its process died: {exit_type[1]}"
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def _kill_process(pid: int) -> None:
    """If the id is still that of one of our ranks."""
    with contextlib.suppress(OSError):
        if RankProcess.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
