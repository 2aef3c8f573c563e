"""Controller and replicas as real Ray actors, behind a process of their own: Ray reads its environment on import.

The test itself knows only the wire. Each cluster has a token in the environment of all its processes, by which what
it leaves behind can be found.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import msgspec
import psutil
import pytest

from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.proto import cluster_pb2 as pb
from paceline.proto import codec, replica_pb2
from paceline.proto.cluster_pb2_grpc import ClusterServiceStub
from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from paceline.worker.config import RankConfig
from tests.cluster.drive import until
from tests.cluster.engine.fakes import make_request
from tests.models import tiny_llama_folder

TIMEOUT = 40.0
PROGRAM = """
import json, sys
import msgspec
from paceline.cluster.config import ClusterConfig
from paceline.cluster.launch import Cluster
from paceline.proto.errors import StartupError

def say(**what):
    print(json.dumps(what), flush=True)

cluster = Cluster(msgspec.json.decode(sys.argv[1], type=ClusterConfig))
try:
    address, loaded = cluster.start(lambda states: say(states=states))
    say(address=address, loaded=loaded)
except StartupError as error:
    say(error=error.message)
sys.stdin.readline()
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

    async def stop(self) -> None:
        self.process.stdin.write(b"\n")
        assert await self.told() == {"stopped": True}
        assert await asyncio.wait_for(self.process.wait(), TIMEOUT) == 0


@asynccontextmanager
async def launched(model: Path, num_replicas: int) -> AsyncIterator[Launched]:
    rank = RankConfig(
        model=str(model), served_model_name="tiny", dtype="float32", num_kv_blocks=32, max_num_seqs=4, num_threads=1
    )
    config = ClusterConfig(replica=ReplicaConfig(rank=rank), num_replicas=num_replicas)
    token = secrets.token_hex(32)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        msgspec.json.encode(config).decode(),
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
    """One router's view of the replica set."""

    def __init__(self, channel: grpc.aio.Channel):
        self._call = ClusterServiceStub(channel).WatchReplicas(pb.WatchReplicasRequest(router_id="router-t"))
        self.versions: list[int] = []

    async def next(self) -> dict[str, pb.Replica]:
        answer = await asyncio.wait_for(anext(aiter(self._call)), TIMEOUT)
        self.versions.append(answer.version)
        return {replica.replica_id: replica for replica in answer.replicas}


async def generate(address: str) -> str:
    """How a short request ends there."""
    async with grpc.aio.insecure_channel(address) as channel:
        submission = codec.submission_of(make_request(prompt=[5, 6, 7], max_tokens=4, ignore_eos=True, temperature=0.0))
        call = ReplicaServiceStub(channel).Generate(replica_pb2.GenerateRequest(submission=submission), timeout=TIMEOUT)
        endings = [ending.finish_reason async for frame in call for ending in frame.deltas.endings]
        return endings[0]


async def test_a_cluster_starts_is_watched_loses_a_replica_and_leaves_nothing_behind(model):
    async with launched(model, num_replicas=2) as cluster:
        ready = await cluster.told()
        assert len(ready["loaded"]) == 2
        assert all(line.startswith("tiny on cpu in float32") for line in ready["loaded"])
        assert cluster.states, "nothing was told while it started"
        assert {state for states in cluster.states for state in states.values()} & {"starting", "loading"}

        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            watch, late = Watch(channel), None
            replicas = await watch.next()
            assert sorted(replicas) == ["replica-0", "replica-1"]
            assert {replica.state for replica in replicas.values()} == {pb.REPLICA_STATE_READY}
            addresses = {replica.address for replica in replicas.values()}
            assert len(addresses) == 2
            for address in addresses:
                assert await generate(address) == "length"

            victim = cluster.processes("ray::Replica")[0]
            victim.send_signal(signal.SIGKILL)
            replicas = await watch.next()
            (dead,) = (r for r in replicas.values() if r.state == pb.REPLICA_STATE_DEAD)
            (alive,) = (r for r in replicas.values() if r.state == pb.REPLICA_STATE_READY)
            assert "died" in dead.reason
            assert "\n" not in dead.reason
            assert watch.versions[1] > watch.versions[0]
            assert await generate(alive.address) == "length"

            late = Watch(channel)  # whoever comes now gets the same set at once
            assert await late.next() == replicas
            assert late.versions == watch.versions[1:]

            names = {process.name() for process in cluster.processes()}
            assert {"raylet", "gcs_server"} <= names
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
