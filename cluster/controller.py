"""The controller: starts replicas, watches them, and tells routers where they are. On the path of no token.

A replica's life is a small explicit machine; what it is named in Ray says everything that a controller needs to find
it again. This file knows Ray and states, not engines.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum

import grpc.aio
import ray

from paceline.cluster.actor import Replica
from paceline.cluster.config import ClusterConfig
from paceline.proto import cluster_pb2 as pb
from paceline.proto.cluster_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server
from paceline.proto.errors import PacelineError, StartupError

log = logging.getLogger("paceline.controller")

NAME = "controller"


class State(StrEnum):
    """In this order. DEAD is the end: a replacement is another member."""

    PENDING = "pending"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


PB_STATE = {
    State.PENDING: pb.REPLICA_STATE_PENDING,
    State.STARTING: pb.REPLICA_STATE_STARTING,
    State.LOADING: pb.REPLICA_STATE_LOADING,
    State.READY: pb.REPLICA_STATE_READY,
    State.DEAD: pb.REPLICA_STATE_DEAD,
}


@dataclass
class Member:
    """One replica as the controller knows it."""

    replica_id: str
    state: State = State.PENDING
    reason: str = ""
    address: str = ""
    description: str = ""
    actor: ray.actor.ActorHandle | None = field(default=None, repr=False)


class Controller:
    """The Ray actor class: ``ray.remote(Controller)``, named and detached, one per namespace."""

    def __init__(self, config: ClusterConfig):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._config = config
        self._members: dict[str, Member] = {}
        self._version = 0
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listens, and starts every replica; returns HOST:PORT of ClusterService at once."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_ClusterServiceServicer_to_server(_Service(self), self._server)
        port = self._server.add_insecure_port(f"{self._config.host}:0")
        await self._server.start()
        for index in range(self._config.num_replicas):
            member = Member(f"replica-{index}")
            self._members[member.replica_id] = member
            self._tasks.append(asyncio.create_task(self._live(member)))
        return f"{self._config.host}:{port}"

    async def wait_ready(self) -> list[str]:
        """Until every replica serves: what each one loaded. Raises StartupError as soon as one of them cannot."""
        async with self._changed:
            while True:
                for member in self._members.values():
                    if member.state is State.DEAD:
                        raise StartupError(member.reason)
                if all(member.state is State.READY for member in self._members.values()):
                    return [member.description for member in self._members.values()]
                await self._changed.wait()

    async def states(self) -> dict[str, str]:
        return {member.replica_id: member.state.value for member in self._members.values()}

    async def stop(self) -> None:
        """Ends the replicas, each by itself where it can, then the service."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._end(member) for member in self._members.values()))
        if self._server is not None:
            await self._server.stop(grace=0.2)

    # -- one replica's life ----------------------------------------------------------------------------------------

    async def _live(self, member: Member) -> None:
        config = self._config
        try:
            await self._move(member, State.STARTING)
            member.actor = (
                ray.remote(Replica)
                .options(
                    name=member.replica_id,
                    namespace=config.namespace,
                    num_cpus=config.num_cpus_per_replica,
                    max_restarts=0,
                )
                .remote(config.replica, member.replica_id)
            )
            member.address = await member.actor.start.remote()
            await self._move(member, State.LOADING)
            member.description = await member.actor.ready.remote()
            await self._move(member, State.READY)
            await member.actor.run.remote()
        except Exception as error:
            await self._move(member, State.DEAD, _reason(error))
            if member.actor is not None:  # one that cannot serve must not keep its memory
                ray.kill(member.actor, no_restart=True)

    async def _end(self, member: Member) -> None:
        if member.actor is None:
            return
        try:
            if member.state in (State.LOADING, State.READY):
                await asyncio.wait_for(_awaited(member.actor.stop.remote()), 3)
        except Exception as error:
            log.warning("%s did not stop by itself: %s", member.replica_id, _reason(error))
        ray.kill(member.actor, no_restart=True)

    async def _move(self, member: Member, state: State, reason: str = "") -> None:
        log.info("%s: %s%s", member.replica_id, state.value, f" ({reason})" if reason else "")
        async with self._changed:
            member.state, member.reason = state, reason
            self._version += 1
            self._changed.notify_all()

    async def snapshots(self) -> AsyncIterator[pb.WatchReplicasResponse]:
        """The whole set, now and after each change."""
        seen = -1
        while True:
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()
                seen = self._version
                members = [
                    pb.Replica(replica_id=m.replica_id, address=m.address, state=PB_STATE[m.state], reason=m.reason)
                    for m in self._members.values()
                ]
            yield pb.WatchReplicasResponse(version=seen, replicas=members)


class _Service(ClusterServiceServicer):
    def __init__(self, controller: Controller):
        self._controller = controller

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        async for snapshot in self._controller.snapshots():
            yield snapshot


async def _awaited(ref):
    return await ref


def _reason(error: BaseException) -> str:
    """One sentence out of what Ray wraps an actor's exception into."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, PacelineError):
        return cause.message
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else 'no reason given'}"


def controller_options(config: ClusterConfig) -> dict:
    return {"name": NAME, "namespace": config.namespace, "lifetime": "detached", "num_cpus": 0, "get_if_exists": True}
