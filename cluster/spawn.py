"""The ranks of a gang as child processes on this host: for a replica without Ray, and for tests.

The key goes to a child over its stdin, never by arguments or environment, which others may read. Knows no torch.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from paceline.cluster import rank_process
from paceline.cluster.channel import Door
from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.gang import load_gang

PROGRAM = "from paceline.cluster.spawn import main; main()"
LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
REAP_TIMEOUT = 1.0  # seconds for each killed child to be gone


def load_children(config: ReplicaConfig, on_phase: Callable[[str, float], None]) -> Loaded:
    """The loader of a replica of several ranks without Ray: runs on its engine's thread. Raises StartupError."""
    return load_gang(config, ChildLauncher(config.rank.num_ranks), on_phase, host=LOOPBACK)


class ChildLauncher:
    """A `gang.Launcher`. Children end with the thread that called ``start``: the system sees to it."""

    def __init__(self, num_ranks: int, work: str = rank_process.TORCH):
        self._num_ranks = num_ranks
        self._work = work
        self.children: list[subprocess.Popen[str]] = []

    def start(self, door: Door) -> None:
        for index in range(self._num_ranks):
            self.children.append(self._start_one(door, index))

    def _start_one(self, door: Door, index: int) -> subprocess.Popen[str]:
        order = {
            "host": door.host,
            "port": door.port,
            "key": door.key.hex(),
            "local": door.local,
            "index": index,
            "work": self._work,
            "path": sys.path,  # a child imports from where its parent does
            "parent": os.getpid(),
        }
        # -P: the working directory is nobody's package. A session of its own: Ctrl-C asks the parent alone, to drain.
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # it is dead: troubles() says so
            child.stdin.write(json.dumps(order))
            child.stdin.close()
        return child

    def troubles(self) -> dict[int, str]:
        return {
            index: _ending(child.returncode) for index, child in enumerate(self.children) if child.poll() is not None
        }

    def kill(self) -> None:
        for child in self.children:
            child.kill()  # does nothing to one that was reaped
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):  # it is in the kernel's hands
                child.wait(REAP_TIMEOUT)


def main() -> None:
    """A child's."""
    order = json.load(sys.stdin)
    _die_with_parent(order["parent"])
    sys.path[:] = order["path"]
    door = Door(order["host"], order["port"], bytes.fromhex(order["key"]), order["local"])
    status = rank_process.run(door, order["index"], work=order["work"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing of torch's is waited for


def _die_with_parent(parent: int) -> None:
    """A stopped child would not see that its engine is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"it exited with {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name} ended it" + (": was there too little memory?" if returncode == -signal.SIGKILL else "")
