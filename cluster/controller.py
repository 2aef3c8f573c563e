"""The controller: keeps the replicas that are wanted, and tells routers where they are. On the path of no token.

What to do follows from `lifecycle.py`; this file looks, does what was decided, and publishes. It asks a placement for
rooms and processes (placement.py has Ray's) and knows neither Ray nor engines. Everything it needs after a restart is
found by name: it takes over what runs, and opens its door only then, so that routers keep their last set meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import msgspec

from paceline.cluster.address import advertised, bound
from paceline.cluster.config import ClusterConfig
from paceline.cluster.guard import guards
from paceline.cluster.lifecycle import Action, Life, Rules, State, decide
from paceline.cluster.member import Member
from paceline.proto import cluster_pb2 as pb
from paceline.proto import logs
from paceline.proto.cluster_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server
from paceline.proto.errors import InvalidRequest, StartupError

log = logging.getLogger("paceline.controller")

PREFIX = "replica-"
ADOPTION = 10.0  # seconds that what runs may take to say where it is
STOP_TIMEOUT = 3.0  # seconds that a replica has to stop by itself
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
PB_STATE = {state: getattr(pb, f"REPLICA_STATE_{state.name}") for state in State}


class Controller:
    """Made in a running event loop, it starts by itself: Ray makes a lost one again and calls nothing else."""

    def __init__(self, config: ClusterConfig, placement: Any):
        logs.configure(config.replica.log_format, config.replica.log_level)
        self._config = config
        self._placement = placement
        self._rules = Rules(placement_timeout=config.placement_timeout, silence=config.replica.step_timeout)
        self._members: dict[str, Member] = {}
        self._version = time.time_ns() // 1000  # of the set: greater than those of a controller before
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def start(self) -> str:
        """HOST:PORT of ClusterService, once what runs was taken over. Replicas start meanwhile. Raises StartupError."""
        return await asyncio.shield(self._starting)

    async def serves(self, config: ClusterConfig) -> bool:
        """Whether this is what it was told itself. Its port is its own."""
        return msgspec.structs.replace(config, controller_port=self._config.controller_port) == self._config

    async def _start(self) -> str:
        for name, process in (await self._placement.find()).items():
            log.info("%s runs already", name)
            self._add(name).hold(process)
        self._scale(self._config.num_replicas)
        await self._know_what_runs()
        config = self._config
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards(config.cluster_token))
        add_ClusterServiceServicer_to_server(_Service(self), self._server)
        try:
            port = self._server.add_insecure_port(bound(config.host, config.controller_port))
        except RuntimeError as error:
            raise StartupError(
                f"controller cannot listen on {config.host}:{config.controller_port}: {error}"
            ) from error
        await self._server.start()
        return advertised(config.host, port, config.advertise)

    async def _know_what_runs(self) -> None:
        try:
            async with asyncio.timeout(ADOPTION), self._changed:
                running = [member for member in self._members.values() if member.process is not None]
                while any(member.life.state in (State.PENDING, State.STARTING) for member in running):
                    await self._changed.wait()
        except TimeoutError:
            log.warning("not every replica that runs has said where it is")

    async def wait_ready(self) -> list[str]:
        """Until every replica serves: what each one loaded. Raises StartupError if one ended before it ever did."""
        async with self._changed:
            while True:
                members = self._members.values()
                for member in members:
                    if member.life.state is State.DEAD and not member.was_ready:
                        raise StartupError(member.life.reason)
                if all(member.life.state is State.READY for member in members):
                    return [member.report.description for member in members if member.report]
                await self._changed.wait()

    async def states(self) -> dict[str, str]:
        """For people: each replica's state, and why."""
        return {name: _told(member.life) for name, member in sorted(self._members.items())}

    async def drain(self, name: str, seconds: float | None = None) -> None:
        """Takes a replica out for good, without failing a request; returns when it is gone. Raises InvalidRequest."""
        if name not in self._members:
            raise InvalidRequest(f"there is no replica {name!r}")
        self._leave(self._members[name], self._config.replica.drain_seconds if seconds is None else seconds)
        async with self._changed:
            while name in self._members:
                await self._changed.wait()

    async def stop(self) -> None:
        """Ends the replicas, each by itself where it can, then the service."""
        await self.leave()
        await asyncio.gather(*map(self._end, self._members.values()))

    async def leave(self) -> None:
        """Ends the service only: replicas go on, and a later controller takes them over."""
        tasks = [self._starting, *self._keepers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.2)

    # -- which replicas there are ------------------------------------------------------------------------------------

    def _scale(self, num_replicas: int) -> None:
        """Names are numbered: the lowest are wanted, the others leave."""
        wanted = [f"{PREFIX}{index}" for index in range(num_replicas)]
        for name in wanted:
            if name not in self._members:
                self._add(name)
        for name, member in self._members.items():
            if name not in wanted:
                self._leave(member, self._config.replica.drain_seconds)

    def _add(self, name: str) -> Member:
        member = self._members[name] = Member(name, time.monotonic())
        self._keepers[name] = asyncio.create_task(self._keep(member))
        return member

    def _leave(self, member: Member, seconds: float) -> None:
        member.leaving, member.drain_seconds = True, seconds
        member.wake.set()

    # -- one replica's life ------------------------------------------------------------------------------------------

    async def _keep(self, member: Member) -> None:
        """Look, decide, do, until it is wanted no more."""
        while True:
            life, action = decide(member.life, member.sight(), time.monotonic(), self._rules)
            if life != member.life:
                await self._publish(member, life)
            try:
                await self._act(member, action)
            except (
                Exception
            ) as error:  # Ray's head is away, or a name is not free yet: what is not done is decided again
                log.warning("%s: cannot %s: %s", member.name, action, error)
            if action is Action.FORGET:
                break
            await member.rest()
        async with self._changed:
            del self._members[member.name], self._keepers[member.name]
            self._tell()

    async def _act(self, member: Member, action: Action | None) -> None:
        match action:
            case Action.PLACE:
                shortage = await self._placement.reserve(member.name)
                member.placed, member.shortage = shortage is None, shortage or ""
                if member.placed:
                    member.wake.set()
            case Action.CREATE:
                member.hold(await self._placement.create(member.name))
            case Action.DRAIN:
                member.tasks.append(asyncio.create_task(self._drain(member)))
            case Action.END:
                if process := member.let_go():
                    await process.kill()
            case Action.FORGET:
                await self._placement.release(member.name)

    async def _drain(self, member: Member) -> None:
        try:
            num_ended = await member.process.drain(member.drain_seconds)
        except Exception as error:
            log.warning("%s did not drain: %s", member.name, error)
            return
        log.info("%s: drained, %d choices were ended", member.name, num_ended)
        member.wake.set()

    async def _end(self, member: Member) -> None:
        if process := member.let_go():
            try:
                await asyncio.wait_for(process.stop(), STOP_TIMEOUT)
            except Exception as error:
                log.warning("%s did not stop by itself: %s", member.name, error or type(error).__name__)
            await process.kill()
        await self._placement.release(member.name)

    async def _publish(self, member: Member, life: Life) -> None:
        log.info("%s: %s", member.name, _told(life))
        async with self._changed:
            member.live(life)
            self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.notify_all()

    # -- the set -----------------------------------------------------------------------------------------------------

    async def snapshots(self) -> AsyncIterator[pb.WatchReplicasResponse]:
        """The whole set, now and after each change."""
        seen = -1
        while True:
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()
                seen = self._version
                replicas = [_message(member) for _, member in sorted(self._members.items())]
            yield pb.WatchReplicasResponse(version=seen, replicas=replicas)


class _Service(ClusterServiceServicer):
    def __init__(self, controller: Controller):
        self._controller = controller

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        async for snapshot in self._controller.snapshots():
            yield snapshot


def _message(member: Member) -> pb.Replica:
    life = member.life
    return pb.Replica(
        replica_id=member.name,
        address=member.report.address if member.report else "",
        state=PB_STATE[life.state],
        reason=life.reason,
        since_unix=member.since_unix,
    )


def _told(life: Life) -> str:
    return f"{life.state.value} ({life.reason})" if life.reason else life.state.value
