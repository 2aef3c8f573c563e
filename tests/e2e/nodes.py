"""A Ray of several nodes on this machine, `paceline serve` on it, and hands on its ranks. For tests and the prover."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.server import PACELINE, Server, serving

RANK = "ray::RankProcess"
PROGRAM = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for resources in json.loads(sys.argv[1]):
    cluster.add_node(include_dashboard=False, object_store_memory=80 << 20, **resources)
print(json.dumps(cluster.address), flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@dataclass
class Nodes:
    """``environment`` is what a process needs to speak to this Ray; what it leaves behind can be found by it."""

    address: str
    environment: dict[str, str]

    @contextmanager
    def serving(self, log: Path, *flags: str, **options) -> Iterator[Server]:
        with serving(log, "--ray-address", self.address, *flags, env=self.environment, **options) as server:
            yield server

    @contextmanager
    def trying(self, log: Path, *flags: str) -> Iterator[subprocess.Popen]:
        """A serve that is not expected to come up."""
        with log.open("wb") as out:
            command = [PACELINE, "serve", "--port", "0", "--ray-address", self.address, *flags]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those of this Ray that are alive, by a part of their command line, the oldest first."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("RAY_AUTH_TOKEN") == self.environment["RAY_AUTH_TOKEN"]
                if ours and name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return sorted(found, key=lambda process: process.create_time())

    def ranks(self) -> list[psutil.Process]:
        return self.processes(RANK)


@contextmanager
def nodes(resources: Sequence[dict]) -> Iterator[Nodes]:
    """One Ray node for each entry, e.g. {"num_cpus": 1}."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(list(resources))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = next(json.loads(line) for line in process.stdout if line.startswith('"'))
        yield Nodes(address, environment)
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        for leftover in Nodes("", environment).processes():
            leftover.kill()


def node_of(process: psutil.Process) -> int:
    """Of a process that Ray started: the process of its node."""
    return process.ppid()
