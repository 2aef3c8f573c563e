"""The controller over a placement that a test holds in its hands: no Ray, the real wire."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager

import grpc.aio
import msgspec
import pytest

from paceline.cluster import controller as controller_module
from paceline.cluster import member as member_module
from paceline.cluster.config import ClusterConfig
from paceline.cluster.controller import Controller
from paceline.cluster.lifecycle import Report
from paceline.proto import cluster_pb2 as pb
from paceline.proto.cluster_pb2_grpc import ClusterServiceStub
from paceline.proto.errors import InvalidRequest, ReplicaLost, StartupError
from paceline.proto.token import bearer
from tests.cluster.drive import TIMEOUT, replica_config, until


class FakeProcess:
    """Says of itself what ``state`` is, and lives until ``die`` or ``kill``."""

    ports = itertools.count(7000)

    def __init__(self, state: str = "ready"):
        self.state = state
        self.address = f"host:{next(self.ports)}"
        self.asked: list[object] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._ended = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        return self.address

    async def report(self) -> Report:
        await self.answers.wait()
        return Report(self.state, self.address, description=f"a fake at {self.address}")

    async def run(self) -> None:
        await asyncio.shield(self._ended)

    async def drain(self, seconds: float) -> int:
        self.asked.append(seconds)
        self.state = "drained"
        return 0

    async def stop(self) -> None:
        self.asked.append("stop")

    async def kill(self) -> None:
        self.asked.append("kill")

    def die(self, error: Exception) -> None:
        self._ended.set_exception(error)


class FakePlacement:
    """Room for as many as ``room`` says."""

    def __init__(self, room: int = 8, **running: FakeProcess):
        self.room = room
        self.processes = {name.replace("_", "-"): process for name, process in running.items()}
        self.reserved: set[str] = set(self.processes)
        self.created: list[str] = []
        self.failures: list[Exception] = []  # of the next creations
        self.born_as = "ready"

    async def find(self) -> dict[str, FakeProcess]:
        return dict(self.processes)

    async def reserve(self, name: str) -> str | None:
        if name not in self.reserved and len(self.reserved) >= self.room:
            return "needs 1 CPU"
        self.reserved.add(name)
        return None

    async def create(self, name: str) -> FakeProcess:
        if self.failures:
            raise self.failures.pop(0)
        self.created.append(name)
        process = self.processes[name] = FakeProcess(self.born_as)
        return process

    async def release(self, name: str) -> None:
        self.reserved.discard(name)


@asynccontextmanager
async def controlling(
    placement: FakePlacement, num_replicas: int = 2, token: str | None = None, step_timeout: float = 60.0, **settings
):
    replica = replica_config(cluster_token=token, step_timeout=step_timeout)
    config = ClusterConfig(replica=replica, num_replicas=num_replicas, **settings)
    controller = Controller(config, placement)
    try:
        yield controller
    finally:
        await controller.stop()


async def replicas_of(controller: Controller) -> dict[str, pb.Replica]:
    return {replica.replica_id: replica for replica in (await anext(controller.snapshots())).replicas}


async def loaded(controller: Controller) -> list[str]:
    return await asyncio.wait_for(controller.wait_ready(), TIMEOUT)


async def test_the_number_wanted_is_started_and_stop_ends_them_and_gives_room_back():
    placement = FakePlacement()
    async with controlling(placement) as controller:
        assert await loaded(controller) == [f"a fake at {p.address}" for p in placement.processes.values()]
        assert sorted(placement.created) == ["replica-0", "replica-1"]
        assert await controller.states() == {"replica-0": "ready", "replica-1": "ready"}
    assert placement.reserved == set()
    assert all(process.asked == ["stop", "kill"] for process in placement.processes.values())


async def test_what_runs_is_taken_over_before_the_door_opens():
    running = FakeProcess()
    running.answers.clear()  # it takes its time
    placement = FakePlacement(replica_0=running)
    async with controlling(placement) as controller:
        starting = asyncio.create_task(controller.start())
        await asyncio.sleep(0.2)
        assert not starting.done()
        running.answers.set()
        async with grpc.aio.insecure_channel(await asyncio.wait_for(starting, TIMEOUT)) as channel:
            watching = ClusterServiceStub(channel).WatchReplicas(pb.WatchReplicasRequest())
            first = await asyncio.wait_for(anext(aiter(watching)), TIMEOUT)
        ready = {r.replica_id: r.address for r in first.replicas if r.state == pb.REPLICA_STATE_READY}
        assert ready["replica-0"] == running.address
        await loaded(controller)
        assert placement.created == ["replica-1"]
        await controller.leave()
        assert running.asked == []  # leaving, it lets them run
        assert first.version > 0


async def test_one_that_runs_but_says_nothing_holds_the_door_shut_for_a_while_only(monkeypatch):
    monkeypatch.setattr(controller_module, "ADOPTION", 0.3)
    silent = FakeProcess()
    silent.answers.clear()
    async with controlling(FakePlacement(replica_0=silent, replica_1=FakeProcess())) as controller:
        await asyncio.wait_for(controller.start(), TIMEOUT)
        replicas = await replicas_of(controller)
        assert replicas["replica-0"].state == pb.REPLICA_STATE_STARTING
        assert replicas["replica-1"].state == pb.REPLICA_STATE_READY


async def test_one_too_many_that_runs_is_drained_and_forgotten():
    surplus = FakeProcess()
    placement = FakePlacement(replica_0=FakeProcess(), replica_1=surplus)
    async with controlling(placement, num_replicas=1) as controller:
        await until(lambda: list(controller._members) == ["replica-0"])
        assert surplus.asked == [30.0, "kill"]
        assert placement.reserved == {"replica-0"}


async def test_a_dead_one_is_told_with_its_reason_and_replaced_at_another_address():
    placement = FakePlacement()
    async with controlling(placement) as controller:
        await loaded(controller)
        first, died_at = placement.processes["replica-1"], time.time()
        first.die(ReplicaLost("it was killed"))
        await until(lambda: first.asked == ["kill"])
        dead = (await replicas_of(controller))["replica-1"]
        assert (dead.state, dead.reason) == (pb.REPLICA_STATE_DEAD, "it was killed")
        assert died_at <= dead.since_unix <= time.time()
        assert placement.created.count("replica-1") == 1
        await loaded(controller)
        assert placement.created.count("replica-1") == 2
        assert (await replicas_of(controller))["replica-1"].address != first.address
        assert "replica-1" in placement.reserved  # its room was kept


async def test_without_room_the_set_says_why_and_since_when_and_it_starts_once_there_is_some():
    placement, began = FakePlacement(room=1), time.time()
    async with controlling(placement, placement_timeout=0.3) as controller:
        await until(lambda: len(controller._members) == 2 and any(m.life.reason for m in controller._members.values()))
        waiting = (await replicas_of(controller))["replica-1"]
        assert (waiting.state, waiting.reason) == (pb.REPLICA_STATE_PENDING, "cannot place: needs 1 CPU")
        assert began - 0.1 < waiting.since_unix < began + 0.2  # when it began to wait, not when it said so
        assert await controller.states() == {"replica-0": "ready", "replica-1": "pending (cannot place: needs 1 CPU)"}
        placement.room = 2
        await loaded(controller)


async def test_a_creation_that_fails_is_tried_again():
    placement = FakePlacement()
    placement.failures = [RuntimeError("the head is away")]
    async with controlling(placement, num_replicas=1) as controller:
        await until(lambda: placement.created == ["replica-0"])
        await loaded(controller)


async def test_a_start_is_given_up_with_the_reason_of_the_first_that_cannot():
    placement = FakePlacement()
    placement.born_as = "loading"
    async with controlling(placement, num_replicas=1) as controller:
        waiting = asyncio.create_task(controller.wait_ready())
        await until(lambda: placement.processes)
        placement.processes["replica-0"].die(StartupError("no such model"))
        with pytest.raises(StartupError, match="no such model"):
            await asyncio.wait_for(waiting, TIMEOUT)


async def test_a_drain_returns_when_the_replica_is_gone_and_it_does_not_come_back():
    placement = FakePlacement()
    async with controlling(placement) as controller:
        await loaded(controller)
        process = placement.processes["replica-0"]
        await asyncio.wait_for(controller.drain("replica-0", 5.0), TIMEOUT)
        assert process.asked == [5.0, "kill"]
        assert placement.reserved == {"replica-1"}
        await asyncio.sleep(0.5)
        assert await controller.states() == {"replica-1": "ready"}
        with pytest.raises(InvalidRequest, match="replica-0"):
            await controller.drain("replica-0")


async def test_the_set_is_told_to_those_only_who_have_the_token():
    async with (
        controlling(FakePlacement(), token="secret") as controller,
        grpc.aio.insecure_channel(await controller.start()) as channel,
    ):
        stub = ClusterServiceStub(channel)
        refused = stub.WatchReplicas(pb.WatchReplicasRequest())
        assert await asyncio.wait_for(refused.code(), TIMEOUT) is grpc.StatusCode.UNAUTHENTICATED
        watching = stub.WatchReplicas(pb.WatchReplicasRequest(), metadata=bearer("secret"))
        assert (await asyncio.wait_for(anext(aiter(watching)), TIMEOUT)).replicas


async def test_a_port_in_use_is_a_startup_error():
    async with controlling(FakePlacement()) as controller:
        port = int((await controller.start()).rpartition(":")[2])
        async with controlling(FakePlacement(), controller_port=port) as second:
            with pytest.raises(StartupError, match=str(port)):
                await second.start()


async def test_it_knows_whether_it_serves_a_configuration():
    async with controlling(FakePlacement(), controller_port=0) as controller:
        same = ClusterConfig(replica=replica_config(), num_replicas=2, controller_port=1)
        assert await controller.serves(same)
        assert not await controller.serves(msgspec.structs.replace(same, num_replicas=3))
        assert not await controller.serves(msgspec.structs.replace(same, replica=replica_config(cluster_token="x")))


async def test_a_controller_that_was_stopped_itself_does_not_take_the_replicas_for_silent(monkeypatch):
    """As when a machine is suspended, or a whole service is stopped and goes on."""
    monkeypatch.setattr(member_module, "SERVING_PERIOD", 0.2)
    placement = FakePlacement()
    async with controlling(placement, step_timeout=1.0) as controller:
        await loaded(controller)
        silent = placement.processes["replica-0"]
        silent.answers.clear()
        time.sleep(2.0)  # noqa: ASYNC251  everything stands still
        await asyncio.sleep(0.3)
        assert set((await controller.states()).values()) == {"ready"}
        await until(lambda: silent.asked == ["kill"])  # its own silence counts
        assert placement.created.count("replica-1") == 1
