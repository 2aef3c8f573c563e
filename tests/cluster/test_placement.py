"""What placement and the launcher of ranks get from a real Ray of two nodes, whose GPUs exist in its books only.

All of it happens once, in a process of its own: Ray reads its environment on import. No rank gets as far as torch.
"""

import json
import os
import secrets
import subprocess
import sys

import pytest

from tests.e2e.nodes import Nodes

TIMEOUT = 120.0
PROGRAM = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from paceline.cluster import placement
from paceline.cluster.channel import Door, Entrance
from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.cluster.messages import decode
from paceline.cluster.placement import RayPlacement
from paceline.cluster.ranks import RayLauncher
from paceline.worker.config import RankConfig

def say(name, **what):
    print(json.dumps({"name": name, **what}), flush=True)

class Fake:  # stands where a replica would
    def __init__(self, config, replica_id):
        pass
    async def start(self):
        context = ray.get_runtime_context()
        has = {k: v for k, v in context.get_assigned_resources().items() if k in ("CPU", "GPU")}
        return [has, context.get_node_id()]

placement.Replica = Fake

def config(device, tp, pp, num_cpus=1):
    sizes = dict(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    rank = RankConfig(model="m", served_model_name="m", device=device, **sizes)
    return ClusterConfig(replica=ReplicaConfig(rank=rank), num_cpus_per_rank=num_cpus)

async def placed(name, config):
    held = RayPlacement(config)
    shortages = []
    for _ in range(100):
        shortage = await held.reserve(name)
        if shortage is None:
            break
        shortages.append(shortage)
        await asyncio.sleep(0.1)
    (group,) = [g for g in placement_group_table().values() if g["name"] == name and g["state"] == "CREATED"]
    nodes = group["bundles_to_node_id"]
    process = await held.create(name)
    has, node = await process.start()
    await process.kill()
    return dict(bundles=[group["bundles"][i] for i in sorted(nodes)], strategy=group["strategy"],
                nodes=[nodes[i] for i in sorted(nodes)], replica_has=has, replica_on=node, shortages=shortages)

async def placements():
    say("one rank where there are GPUs", **await placed("replica-0", config("auto", 1, 1)))
    say("another size", **await placed("replica-0", config("cpu", 1, 1, num_cpus=2)))
    await RayPlacement(config("cpu", 1, 1)).release("replica-0")
    say("two stages", **await placed("replica-1", config("auto", 2, 2)))

def hellos(entrance, count):
    said = []
    while len(said) < count:
        connection = entrance.admitted(60.0)
        said.append((connection, decode(connection.recv_bytes())))
    return said

def is_alive(pid):
    try:
        return "RankProcess" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False

def wait(condition):
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()

def ranks():
    rank = config("auto", 2, 2).replica.rank
    launcher = RayLauncher("replica-1", rank)
    with Entrance("127.0.0.1") as entrance:
        launcher.start(entrance.door)
        said = hellos(entrance, 4)
        say("ranks", hellos=sorted([h.index, h.node, h.devices] for _, h in said), troubles=launcher.troubles())
        pids = {h.index: h.pid for _, h in said}
        os.kill(pids[1], signal.SIGSTOP)
        launcher.kill()
        say("killed", gone=wait(lambda: not any(map(is_alive, pids.values()))))
        launcher.kill()  # again
    nobody = RayLauncher("replica-1", rank)  # in the room that the others held
    nobody.start(Door("127.0.0.1", entrance.door.port, b"key"))
    wait(lambda: len(nobody.troubles()) == 4)
    say("nobody", troubles=nobody.troubles())

cluster = Cluster()
for _ in range(2):
    node = cluster.add_node(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20)
ray.init(address=cluster.address, namespace="paceline", log_to_driver=False)
asyncio.run(placements())
ranks()
cluster.remove_node(node)
say("a node less", shortage=asyncio.run(RayPlacement(config("auto", 2, 2)).reserve("replica-1")))
lost = RayLauncher("replica-1", config("auto", 2, 2).replica.rank)
lost.start(Door("127.0.0.1", 1, b"key"))
wait(lambda: len(lost.troubles()) == 4)
say("lost", troubles=lost.troubles())
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def said():
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | environment)
    finally:
        for leftover in Nodes("", environment).processes():  # of a test that failed half-way
            leftover.kill()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in lines}


def test_a_replica_of_one_rank_takes_a_gpu_itself_where_the_cluster_has_any(said):
    placed = said["one rank where there are GPUs"]
    assert placed["bundles"] == [{"CPU": 1.0, "GPU": 1.0}]
    assert placed["strategy"] == "STRICT_PACK"
    assert placed["replica_has"] == {"CPU": 1.0, "GPU": 1.0}


def test_room_that_was_asked_for_with_other_sizes_is_given_back(said):
    placed = said["another size"]
    assert placed["bundles"] == [{"CPU": 2.0}]
    assert placed["replica_has"] == {"CPU": 2.0}
    assert "given back" in placed["shortages"][0]


def test_each_stage_is_a_bundle_and_the_engine_stands_in_the_first_and_takes_nothing_of_it(said):
    placed = said["two stages"]
    assert placed["bundles"] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert placed["strategy"] == "PACK"
    assert len(set(placed["nodes"])) == 2
    assert placed["replica_on"] == placed["nodes"][0]
    assert placed["replica_has"] == {}


def test_ranks_come_by_stage_each_with_a_device_of_its_own(said):
    indices, nodes, devices = zip(*said["ranks"]["hellos"], strict=True)
    assert indices == (0, 1, 2, 3)
    assert list(nodes) == [node for node in said["two stages"]["nodes"] for _ in range(2)]
    assert sorted(devices[:2]) == sorted(devices[2:]) == ["0", "1"]
    assert said["ranks"]["troubles"] == {}


def test_killed_ranks_are_gone_even_one_that_was_stopped(said):
    assert said["killed"]["gone"]


def test_ranks_that_ended_are_troubles(said):
    troubles = said["nobody"]["troubles"]
    assert set(troubles) == {"0", "1", "2", "3"}
    assert all("died" in trouble and "\n" not in trouble for trouble in troubles.values())


def test_a_lost_node_is_told_and_ranks_do_not_wait_for_it(said):
    assert (
        "2 stages, each of 2 CPU and 2 GPU on one node; even empty the nodes hold 1" in said["a node less"]["shortage"]
    )
    assert "a node of this replica is gone" in "".join(said["lost"]["troubles"].values())
