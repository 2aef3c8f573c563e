"""A controller as a process of its own beside a Ray that was there before: it may come and go, replicas stay."""

import asyncio
import json
import os
import secrets
import signal
import sys

import grpc.aio
import msgspec
import psutil

from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.proto import cluster_pb2 as pb
from paceline.proto.cluster_pb2_grpc import ClusterServiceStub
from paceline.worker.config import RankConfig
from tests.models import tiny_llama_folder

TIMEOUT = 40.0
HEAD = """
import json, ray, sys
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
print(json.dumps(ray.get_runtime_context().gcs_address), flush=True)
sys.stdin.readline()
ray.shutdown()
"""
CONTROLLER = """
import asyncio, json, sys
import msgspec
from paceline.cluster.config import ClusterConfig
from paceline.cluster.run import run_controller

config = msgspec.json.decode(sys.argv[1], type=ClusterConfig)
sys.exit(asyncio.run(run_controller(config, ready=lambda address: print(json.dumps(address), flush=True))))
"""


async def spawn(program: str, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )


async def told(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(TIMEOUT):
        while line := await process.stdout.readline():
            if line.startswith(b'"'):
                return json.loads(line)
    raise AssertionError("it ended")


async def replica_at(address: str) -> str:
    """Where the one replica is, once it is ready."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(TIMEOUT):
        async for answer in ClusterServiceStub(channel).WatchReplicas(pb.WatchReplicasRequest()):
            (replica,) = answer.replicas
            if replica.state == pb.REPLICA_STATE_READY:
                return replica.address
    raise AssertionError("the watch ended")


async def test_controllers_come_and_go_and_each_takes_over_what_runs(tmp_path):
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    head = await spawn(HEAD, **environment)
    try:
        rank = RankConfig(
            model=str(tiny_llama_folder(tmp_path)), served_model_name="tiny", num_kv_blocks=32, num_threads=1
        )
        config = ClusterConfig(replica=ReplicaConfig(rank=rank), ray_address=await told(head))
        found = []
        for _ in range(2):
            controller = await spawn(CONTROLLER, msgspec.json.encode(config).decode(), **environment)
            found.append(await replica_at(await told(controller)))
            controller.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(controller.wait(), TIMEOUT) == 0
        assert found[0] == found[1]
    finally:
        head.stdin.write(b"\n")
        await asyncio.wait_for(head.wait(), TIMEOUT)
        for process in psutil.process_iter():
            if environment["RAY_AUTH_TOKEN"] in _environment(process):
                process.kill()


def _environment(process: psutil.Process) -> str:
    try:
        return process.environ().get("RAY_AUTH_TOKEN", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
