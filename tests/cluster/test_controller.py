"""Controller and replicas as real Ray actors, behind a process of their own: Ray reads its environment on import.

The test itself knows only the wire. Each cluster has a token in the environment of all its processes, by which what
it leaves behind can be found.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import msgspec
import psutil
import pytest
import pytest_asyncio

from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.proto import cluster_pb2 as pb
from paceline.proto import codec, replica_pb2
from paceline.proto.cluster_pb2_grpc import ClusterServiceStub
from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from paceline.proto.token import bearer
from paceline.worker.config import RankConfig
from tests.cluster.drive import until
from tests.cluster.engine.fakes import make_request
from tests.models import tiny_llama_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT = 40.0
SILENCE = 4.0  # seconds after which a replica that does not answer is ended
TOKEN = "the-token-of-this-cluster"
PROGRAM = """
import json, os, sys
import msgspec
from paceline.cluster import launch
from paceline.cluster.config import ClusterConfig
from paceline.cluster.launch import Cluster
from paceline.proto.errors import StartupError

def say(**what):
    print(json.dumps(what), flush=True)

if sys.argv[2] == "small":  # a Ray that was there before, with one core
    launch.connect = lambda config: launch.ray.init(
        address="local", namespace=config.namespace, num_cpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=launch.OBJECT_STORE_BYTES,
    )
cluster = Cluster(msgspec.json.decode(sys.argv[1], type=ClusterConfig))
try:
    address, loaded = cluster.start(lambda states: say(states=states))
    say(address=address, loaded=loaded)
except StartupError as error:
    say(error=error.message)
while name := sys.stdin.readline().strip():
    cluster.drain(name, 20.0)
    say(drained=name)
cluster.stop()
say(stopped=True)
"""


class Launched:
    """A cluster in a process of its own, which tells what happens line by line."""

    def __init__(self, process: asyncio.subprocess.Process, token: str):
        self.process = process
        self.token = token
        self.states: list[dict[str, str]] = []

    async def told(self) -> dict:
        """What comes next but progress."""
        async with asyncio.timeout(TIMEOUT):
            while line := await self.process.stdout.readline():
                if not line.startswith(b"{"):  # Ray writes there too
                    continue
                what = json.loads(line)
                if "states" not in what:
                    return what
                self.states.append(what["states"])
        raise AssertionError(f"the process ended with {await self.process.wait()}")

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those of this cluster that are alive, but for the one that launched it."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("RAY_AUTH_TOKEN") == self.token and process.pid != self.process.pid
                if ours and name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    async def drain(self, replica_id: str) -> None:
        self.process.stdin.write(f"{replica_id}\n".encode())
        assert await self.told() == {"drained": replica_id}

    async def stop(self) -> None:
        self.process.stdin.write(b"\n")
        assert await self.told() == {"stopped": True}
        assert await asyncio.wait_for(self.process.wait(), TIMEOUT) == 0


@asynccontextmanager
async def launched(model: Path, num_replicas: int, *, size: str = "", **settings) -> AsyncIterator[Launched]:
    rank = RankConfig(
        model=str(model), served_model_name="tiny", dtype="float32", num_kv_blocks=32, max_num_seqs=4, num_threads=1
    )
    replica = ReplicaConfig(rank=rank, step_timeout=SILENCE, cluster_token=TOKEN)
    config = ClusterConfig(replica=replica, num_replicas=num_replicas, **settings)
    token = secrets.token_hex(32)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        msgspec.json.encode(config).decode(),
        size,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    cluster = Launched(process, token)
    try:
        yield cluster
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for leftover in cluster.processes():  # of a test that failed half-way
            leftover.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("tiny"))


class Watch:
    """One router's view of the replica set. It goes on when the controller comes back."""

    def __init__(self, address: str):
        self._channel = grpc.aio.insecure_channel(address, (("grpc.max_reconnect_backoff_ms", 500),))
        self._call = self._open()
        self.versions: list[int] = []
        self.num_lost = 0

    def _open(self):
        stub = ClusterServiceStub(self._channel)
        request = pb.WatchReplicasRequest(router_id="router-t")
        return stub.WatchReplicas(request, metadata=bearer(TOKEN), wait_for_ready=True)

    async def next(self) -> dict[str, pb.Replica]:
        while True:
            try:
                answer = await asyncio.wait_for(anext(aiter(self._call)), TIMEOUT)
            except grpc.aio.AioRpcError:
                self.num_lost += 1
                self._call = self._open()
                continue
            self.versions.append(answer.version)
            return {replica.replica_id: replica for replica in answer.replicas}

    async def until(self, condition: Callable[[dict[str, pb.Replica]], bool]) -> dict[str, pb.Replica]:
        async with asyncio.timeout(TIMEOUT):
            while not condition(replicas := await self.next()):
                pass
        return replicas


def all_ready(replicas: dict[str, pb.Replica], count: int = 2) -> bool:
    return len(replicas) == count and {r.state for r in replicas.values()} == {pb.REPLICA_STATE_READY}


async def incarnation(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        return (await ReplicaServiceStub(channel).GetState(replica_pb2.GetStateRequest(), timeout=TIMEOUT)).incarnation


async def generate(address: str, max_tokens: int = 4) -> str:
    """How a request ends there."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = make_request(prompt=[5, 6, 7], max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        message = replica_pb2.GenerateRequest(submission=codec.submission_of(request))
        call = ReplicaServiceStub(channel).Generate(message, timeout=TIMEOUT, metadata=bearer(TOKEN))
        endings = [ending.finish_reason async for frame in call for ending in frame.deltas.endings]
        return endings[0]


async def generate_until(end: asyncio.Event, address: str) -> set[str]:
    """How requests end there, one after another."""
    endings = {await generate(address, 200)}
    while not end.is_set():
        endings.add(await generate(address, 200))
    return endings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model) -> AsyncIterator[Launched]:
    """Two replicas. Tests leave it as they found it, but for who runs."""
    async with launched(model, num_replicas=2) as cluster:
        cluster.ready = await cluster.told()
        assert "address" in cluster.ready, cluster.ready
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def watch(cluster) -> AsyncIterator[Watch]:
    """Having seen both ready."""
    watch = Watch(cluster.ready["address"])
    watch.seen = await watch.until(all_ready)
    yield watch


async def test_a_cluster_tells_its_progress_and_what_it_loaded(cluster, watch):
    assert len(cluster.ready["loaded"]) == 2
    assert all(line.startswith("tiny on cpu in float32") for line in cluster.ready["loaded"])
    assert {state for states in cluster.states for state in states.values()} & {"starting", "loading"}
    assert sorted(watch.seen) == ["replica-0", "replica-1"]
    addresses = {replica.address for replica in watch.seen.values()}
    assert len(addresses) == 2
    for address in addresses:
        assert await generate(address) == "length"
    assert await Watch(cluster.ready["address"]).next() == watch.seen  # whoever comes now gets the same set at once


async def test_a_replica_that_is_killed_is_told_dead_and_comes_back_as_another(cluster, watch):
    before = {name: await incarnation(replica.address) for name, replica in watch.seen.items()}
    cluster.processes("ray::Replica")[0].kill()
    replicas = await watch.until(lambda set_: pb.REPLICA_STATE_DEAD in {r.state for r in set_.values()})
    (dead,) = (r for r in replicas.values() if r.state == pb.REPLICA_STATE_DEAD)
    (alive,) = (r for r in replicas.values() if r.state == pb.REPLICA_STATE_READY)
    assert "died" in dead.reason
    assert "\n" not in dead.reason
    assert await generate(alive.address) == "length"
    back = (await watch.until(all_ready))[dead.replica_id]
    assert back.since_unix > dead.since_unix
    assert await incarnation(back.address) != before[dead.replica_id]
    assert await generate(back.address) == "length"
    assert watch.versions == sorted(set(watch.versions))


async def test_a_controller_that_is_killed_comes_back_where_it_was_and_takes_over_what_runs(cluster, watch):
    running = {process.pid for process in cluster.processes("ray::Replica")}
    (controller,) = cluster.processes("ray::Controller")
    back = asyncio.Event()
    loads = [asyncio.create_task(generate_until(back, replica.address)) for replica in watch.seen.values()]
    controller.kill()
    replicas = await watch.next()  # at the same address; nothing less than the whole set is ever told
    back.set()
    assert watch.num_lost >= 1
    assert all_ready(replicas)
    assert {n: r.address for n, r in replicas.items()} == {n: r.address for n, r in watch.seen.items()}
    assert await asyncio.gather(*loads) == [{"length"}, {"length"}]
    assert {process.pid for process in cluster.processes("ray::Replica")} == running
    assert watch.versions == sorted(set(watch.versions))

    cluster.processes("ray::Replica")[0].kill()  # and it keeps them
    await watch.until(lambda replicas: not all_ready(replicas))
    await watch.until(all_ready)


async def test_a_replica_that_is_stopped_is_noticed_and_replaced(cluster, watch):
    victim = cluster.processes("ray::Replica")[0]
    victim.suspend()
    replicas = await watch.until(lambda set_: pb.REPLICA_STATE_DEAD in {r.state for r in set_.values()})
    (dead,) = (r for r in replicas.values() if r.state == pb.REPLICA_STATE_DEAD)
    assert dead.reason == f"silent for {SILENCE:.0f} s"
    await watch.until(all_ready)
    await until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)


async def test_a_drained_replica_leaves_without_a_failed_request_and_the_cluster_without_a_process(cluster, watch):
    leaving, staying = watch.seen["replica-1"], watch.seen["replica-0"]
    running = asyncio.create_task(generate(leaving.address, 240))
    draining = asyncio.create_task(cluster.drain("replica-1"))
    replicas = await watch.next()
    assert replicas["replica-1"].state == pb.REPLICA_STATE_DRAINING
    assert replicas["replica-1"].address == leaving.address
    await watch.until(lambda replicas: all_ready(replicas, 1))
    await draining
    assert await running == "length"
    assert await generate(staying.address) == "length"
    await until(lambda: len(cluster.processes("ray::Replica")) == 1)

    assert {"raylet", "gcs_server"} <= {process.name() for process in cluster.processes()}
    await cluster.stop()
    assert cluster.processes() == []


async def test_a_model_that_cannot_load_fails_the_start_with_one_sentence(tmp_path):
    async with launched(tmp_path, num_replicas=1) as cluster:
        told = await cluster.told()
        assert str(tmp_path) in told["error"]
        assert "Error" not in told["error"]
        assert "\n" not in told["error"]
        await until(lambda: not cluster.processes("ray::Replica"))  # it does not keep its memory
        await cluster.stop()
        assert cluster.processes() == []


async def test_a_replica_that_nothing_has_room_for_waits_and_says_why(model):
    async with launched(model, 1, size="small", num_cpus_per_rank=8, placement_timeout=1.0) as cluster:
        telling = asyncio.create_task(cluster.told())
        reason = "pending (cannot place: needs 8 CPU on one node; no node is so large (free: "
        await until(lambda: cluster.states and cluster.states[-1]["replica-0"].startswith(reason), TIMEOUT)
        assert cluster.states[-1]["replica-0"].endswith(" 1 of 1 CPU))")
        assert cluster.states[0] == {"replica-0": "pending"}
        telling.cancel()
