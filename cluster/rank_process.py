"""The whole life of a rank's process: come in, be given a place, agree, load, run plans in order, end.

One thread does all of it, the only one that touches torch, which comes in only once the number of threads is known. A
second one ends the process as soon as the engine is gone, whatever the first one waits for. What a rank computes with
is a `Work`: torch_rank.py, or a test's.
"""

import importlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from paceline.cluster.channel import Door, dial, local_address, wait_for_hangup
from paceline.cluster.messages import (
    Assign,
    Control,
    Facts,
    Fault,
    Go,
    Hello,
    Phase,
    Ping,
    Pong,
    Ready,
    Stop,
    decode,
    encode,
)
from paceline.proto import heap, logs
from paceline.proto.errors import PacelineError, StartupError
from paceline.proto.step import StepPlan, StepResult
from paceline.worker import threads

log = logging.getLogger("paceline.gang")

TORCH = "paceline.cluster.torch_rank:TorchRank"
SHARED_MEMORY = "/dev/shm"
LOOK_PERIOD = 0.0001  # seconds between looks whether the device is done, while the next plan may come


class Pending(Protocol):
    """A step that was begun."""

    def is_done(self) -> bool: ...

    def result(self) -> StepResult:
        """Waits for it."""


class Work(Protocol):
    """What a rank does. Made without arguments, asked in this order. Every method may raise StartupError."""

    samples: bool  # known after look: results are sent by this rank

    def look(self, assign: Assign) -> Facts:
        """Opens what is needed, speaks to nobody."""

    def join(self, go: Go, interface: str) -> None:
        """Meets the others."""

    def load(self, on_phase: Callable[[str, float], None]) -> Ready: ...

    def execute(self, plan: StepPlan) -> Pending: ...

    def close(self) -> None: ...


def run(door: Door, index: int, *, node: str = "", work: str = TORCH) -> int:
    """Returns when the engine says so (0) or after a fault (1): the process should then end. When the engine's
    connection closes, the process ends at once, from within.

    ``node``: the launcher's name for where this is; "": the host's. ``work``: MODULE:CLASS.
    """
    try:
        connection = dial(door)
    except StartupError as error:
        print(f"rank process {index}: {error}", file=sys.stderr, flush=True)
        return 1
    life = _Life(connection, door, index, node)
    watch = threading.Thread(target=life.end_with_engine, name="engine watch", daemon=True)
    watch.start()
    try:
        life.start(work)
        life.serve()
        life.part()
        return 0
    except (EOFError, ConnectionError):
        return 1  # the engine is gone; nobody is left to be told
    except Exception as error:
        if not isinstance(error, StartupError):
            log.exception("the rank ends")
        life.tell_fault(error)
        return 1
    finally:
        life.hang_up()


class _Life:
    def __init__(self, connection: Connection, door: Door, index: int, node: str):
        self._connection = connection
        self._door = door
        self._index, self._node = index, node
        self._work: Work | None = None
        self._ending = False

    def start(self, work: str) -> None:
        host = socket.gethostname()
        ip, interface = local_address(self._connection, self._door)
        self._send(
            Hello(
                index=self._index,
                host=host,
                node=self._node or host,
                ip=ip,
                interface=interface,
                pid=os.getpid(),
                cores=threads.available(),
                devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),  # set by the launcher, for this process alone
                free_shared_memory=_free_shared_memory(),
            )
        )
        assign = self._expect(Assign)
        logs.configure(assign.log_format, assign.log_level, rank=assign.rank)
        threads.prepare(assign.num_threads)
        module, name = work.split(":")
        self._work = getattr(importlib.import_module(module), name)()
        self._send(self._work.look(assign))
        go = self._expect(Go)
        began = time.perf_counter()
        self._work.join(go, interface)
        self._tell_phase("groups", time.perf_counter() - began)
        ready = self._work.load(self._tell_phase)
        heap.settle()
        self._send(ready)

    def serve(self) -> None:
        """Plans in order. A plan that is there already is begun before an older one's result is waited for; on a CPU
        a step that was begun is done."""
        assert self._work is not None
        pending: deque[Pending] = deque()
        while True:
            if pending and pending[0].is_done():
                self._send(pending.popleft().result())
                continue
            if pending and not select.select([self._connection], [], [], LOOK_PERIOD)[0]:
                continue
            match decode(self._connection.recv_bytes()):
                case StepPlan() as plan:
                    step = self._work.execute(plan)
                    if self._work.samples:
                        pending.append(step)
                case Ping():
                    self._send(Pong())
                case Stop():
                    return
                case message:
                    raise AssertionError(f"a {type(message).__name__} comes while plans are expected")

    def end_with_engine(self) -> None:
        """On a thread of its own."""
        wait_for_hangup(self._connection)
        if not self._ending:
            os._exit(1)

    def tell_fault(self, error: Exception) -> None:
        message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {_first_line(error)}"
        try:
            self._send(Fault(message=message))
        except OSError:
            log.debug("the engine is gone")

    def part(self) -> None:
        """From the other ranks, in peace: after a fault nobody waits for anybody."""
        self._ending = True
        assert self._work is not None
        self._work.close()

    def hang_up(self) -> None:
        self._ending = True
        self._connection.close()

    def _send(self, message: StepResult | Control) -> None:
        self._connection.send_bytes(encode(message))

    def _tell_phase(self, name: str, seconds: float) -> None:
        self._send(Phase(name=name, seconds=seconds))

    def _expect(self, kind):
        """The next message, which is to be of this kind. While it waits it answers nothing else."""
        message = decode(self._connection.recv_bytes())
        if isinstance(message, Stop):
            raise EOFError
        assert isinstance(message, kind), f"a {type(message).__name__} comes where a {kind.__name__} is expected"
        return message


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _free_shared_memory() -> int:
    """Bytes; 0 where there is none."""
    try:
        at = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return at.f_bavail * at.f_frsize
