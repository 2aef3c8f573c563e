"""A replica of several ranks, seen from its engine: start them as one, hand each the same plans, end them as one.

Knows phases of a start and who is where; who starts the processes is a `Launcher`'s affair (ranks.py has Ray's,
spawn.py child processes on this host), what they say comes over lines.py. Knows no torch.
"""

import logging
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.cluster import preflight
from paceline.cluster.channel import Door, Entrance
from paceline.cluster.config import ReplicaConfig
from paceline.cluster.engine.executor import IDLE_CHECK, Loaded
from paceline.cluster.lines import Line, Lines
from paceline.cluster.messages import Assign, Facts, Go, Hello, Ping, Stop, encode
from paceline.proto.errors import ReplicaLost, StartupError
from paceline.proto.step import StepPlan, StepResult, schema_hash

log = logging.getLogger("paceline.gang")

CONNECT_LOOK = 0.05  # seconds between looks at who has said who it is
LOOK_PERIOD = 0.2  # seconds, while nobody says anything, between looks at the time
STOP_TIMEOUT = 2.0  # seconds in which ranks may end by themselves
LEAST_LOOKS = 2  # at an idle rank that does not answer, however short the step timeout is
# Of a rank's start, in order, after those of the gang: names for what a rank that is silent may be at.
PHASES = ("connect", "pre-flight", "groups", "open", "weights", "kv pool", "card", "warm-up")

OnPhase = Callable[[str, float], None]


class Launcher(Protocol):
    """Starts the processes of one gang and ends them. Called from the engine's thread only, but for ``kill``."""

    def start(self, door: Door) -> None:
        """Every process is to call ``rank_process.run(door, index)`` with an index of its own, 0 .. num_ranks - 1, by
        stage. Does not wait for them. Raises StartupError."""

    def troubles(self) -> dict[int, str]:
        """By index, why a process has not come or is gone, as far as it is known without waiting."""

    def kill(self) -> None:
        """Ends whatever is left, also processes that are stopped. May be called again, and from any thread."""


def load_gang(config: ReplicaConfig, launcher: Launcher, on_phase: OnPhase, *, host: str) -> Loaded:
    """Starts the ranks and loads the model, on the engine's thread. ``host``: where ranks can reach this process.

    ``on_phase`` is told each phase when the slowest rank is done with it. Raises StartupError, which names the rank
    and the phase; nothing is then left running.
    """
    lines = Lines(config.start_timeout, launcher.troubles)
    try:
        with Entrance(host) as entrance:
            start = _Start(config, launcher, lines, on_phase)
            launcher.start(entrance.door)
            start.connect(entrance)
        start.agree()
        start.load()
        lines.set_timeout(config.step_timeout)
    except BaseException:
        launcher.kill()
        lines.close()
        raise
    return _loaded(config, lines, launcher)


class _Start:
    """The phases of one start, in the order of its methods."""

    def __init__(self, config: ReplicaConfig, launcher: Launcher, lines: Lines, on_phase: OnPhase):
        self._config = config
        self._num_ranks = config.rank.num_ranks
        self._launcher = launcher
        self._lines = lines
        self._on_phase = on_phase
        self._since = time.monotonic()  # when the phase began
        self._hellos: list[Hello] = []  # by rank, as the lines
        self._facts: list[Facts] = []

    def connect(self, entrance: Entrance) -> None:
        """Until every process is there. Then they are numbered."""
        known: dict[int, Line] = {}
        while len(known) < self._num_ranks:
            connection = entrance.admitted(CONNECT_LOOK)
            if connection is not None:
                self._lines.add(connection)
            self._lines.receive(0)
            self._meet(known)
            if missing := self._missing(known):
                here = ", ".join(map(str, known.values())) or "nobody"
                self._look_out(
                    f"{missing} did not connect to {entrance.door.host}:{entrance.door.port} within "
                    f"{self._config.start_timeout:g} s (--start-timeout; {here} did): a firewall, a NetworkPolicy or "
                    "an address that other hosts cannot reach may be in the way"
                )
                for index, trouble in self._launcher.troubles().items():
                    if index not in known:
                        raise StartupError(f"rank process {index} did not come: {trouble}")
        hellos = numbered([line.hello for line in known.values() if line.hello])
        for rank, hello in enumerate(hellos):
            known[hello.index].rank = rank
        for line in list(self._lines):
            if line.rank is None:
                self._lines.drop(line)
        self._lines.order()
        self._hellos = hellos
        self._done("connect", time.monotonic() - self._since)

    def _meet(self, known: dict[int, Line]) -> None:
        """Takes in who has said who it is; lets go of who has not and is gone, or is one too many."""
        for line in list(self._lines):
            if line.hello is None:
                if line.ended and not line.fault:
                    self._lines.drop(line)
            elif line.index not in range(self._num_ranks) or known.setdefault(line.index, line) is not line:
                log.warning("%s is one too many and was turned away", line)
                self._lines.drop(line)

    def _missing(self, known: dict[int, Line]) -> str:
        missing = [str(index) for index in range(self._num_ranks) if index not in known]
        return f"rank process{'es' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else ""

    def agree(self) -> None:
        """Every rank looks around, by itself; what they found must fit together."""
        config, on_host = self._config, Counter(hello.host for hello in self._hellos)
        numbered_on: Counter[str] = Counter()
        for rank, (line, hello) in enumerate(zip(self._lines, self._hellos, strict=True)):
            assign = Assign(
                rank=rank,
                local_rank=numbered_on[hello.host],
                num_threads=config.rank.num_threads or max(1, hello.cores // on_host[hello.host]),
                config=config.rank,
                log_format=config.log_format,
                log_level=config.log_level,
            )
            numbered_on[hello.host] += 1
            self._lines.send(line, encode(assign))
        self._wait("pre-flight", lambda line: line.facts is not None)
        self._facts = [line.facts for line in self._lines if line.facts is not None]
        reports = list(map(preflight.Report, range(self._num_ranks), self._hellos, self._facts))
        log.info("the gang before it starts:\n%s", preflight.table(reports))
        problems = preflight.problems(
            reports, tensor_parallel_size=config.rank.tensor_parallel_size, step_schema=schema_hash()
        )
        if problems:
            raise StartupError("; ".join(problems))
        self._done("pre-flight", time.monotonic() - self._since)

    def load(self) -> None:
        """Ranks meet at rank 0's, and each goes through the same phases."""
        go = Go(host=self._hellos[0].ip, port=self._facts[0].port, timeout=self._config.start_timeout)
        self._lines.broadcast(encode(go))
        num_done = 0
        while not all(line.ready for line in self._lines):
            phase = self._phase(num_done)
            self._wait(phase, lambda line: len(line.phases) > num_done or line.ready is not None)  # noqa: B023
            if done := [line.phases[num_done] for line in self._lines if len(line.phases) > num_done]:
                self._done(done[0].name, max(phase.seconds for phase in done))
                num_done += 1

    def _phase(self, number: int) -> str:
        """What the furthest rank calls it, else what comes next by name."""
        told = [line.phases[number].name for line in self._lines if len(line.phases) > number]
        return told[0] if told else [*PHASES[2:], "the last preparations"][min(number, len(PHASES) - 2)]

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self, phase: str, is_through: Callable[[Line], bool]) -> None:
        while late := [line for line in self._lines if not is_through(line)]:
            through = ", ".join(str(line) for line in self._lines if is_through(line)) or "nobody"
            self._look_out(
                f"{', '.join(map(str, late))} did not get through {phase!r} within {self._config.start_timeout:g} s "
                f"(--start-timeout); {through} did"
            )
            self._lines.receive(LOOK_PERIOD)

    def _look_out(self, too_late: str) -> None:
        if self._lines.troubled:
            raise StartupError(self._lines.what_happened())
        if time.monotonic() - self._since > self._config.start_timeout:
            raise StartupError(too_late)

    def _done(self, phase: str, seconds: float) -> None:
        self._on_phase(phase, seconds)
        self._since = time.monotonic()


def numbered(hellos: Sequence[Hello]) -> list[Hello]:
    """In the order of ranks: node by node, so that a stage, which is so many ranks in a row,
    lies on one; the engine's host first, then as the launcher counts; on a node by device."""
    here = socket.gethostname()
    first: dict[str, int] = {}
    for hello in hellos:
        first[hello.node] = min(first.get(hello.node, hello.index), hello.index)
    return sorted(hellos, key=lambda h: (h.host != here, first[h.node], _device_order(h.devices), h.index))


def _device_order(devices: str) -> tuple[int, str]:
    """By the first one's number, or name: 2 comes before 10."""
    first = devices.split(",")[0]
    return (int(first), "") if first.isdecimal() else (-1, first)


class GangExecutor:
    """An `Executor` whose plans go to every rank and whose results come from one."""

    def __init__(self, lines: Lines, launcher: Launcher, step_timeout: float):
        self._lines = lines
        self._launcher = launcher
        self._results: deque[StepResult] = deque()
        self._expected: deque[int] = deque()  # step ids
        self._most_looks = max(LEAST_LOOKS, math.ceil(step_timeout / IDLE_CHECK))
        self._closed = False
        self._killed = False  # by us: what ranks then look like says nothing of why

    def submit(self, plan: StepPlan) -> None:
        self._expected.append(plan.step_id)
        self._lines.broadcast(encode(plan))
        if self._lines.troubled:
            raise self._lost()

    def collect(self) -> StepResult:
        while not self._results:
            self._receive(None)
        result, expected = self._results.popleft(), self._expected.popleft()
        assert result.step_id == expected, f"the result of step {result.step_id} came where {expected} was due"
        return result

    def check(self) -> None:
        """Called each IDLE_CHECK while nothing is outstanding, so that a gang which has nothing to do ends too."""
        self._receive(0)
        for line in self._lines:
            if line.silent == 0:
                self._lines.send(line, encode(Ping()))
            line.silent += 1
            if line.silent > self._most_looks:
                self._lines.blame(line, f"it did nothing for {(line.silent - 1) * IDLE_CHECK:g} s, not even answer")
        if self._lines.troubled:
            raise self._lost()

    def close(self) -> None:
        """Ranks may end by themselves for a moment."""
        if self._closed:
            return
        self._closed = True
        if not self._lines.troubled:
            self._lines.broadcast(encode(Stop()))
            until = time.monotonic() + STOP_TIMEOUT
            while (left := until - time.monotonic()) > 0 and not all(line.ended for line in self._lines):
                self._lines.receive(left)
        self._launcher.kill()
        self._lines.close()

    def kill(self) -> None:
        self._killed = True
        self._launcher.kill()

    def _receive(self, timeout: float | None) -> None:
        self._results += self._lines.receive(timeout)
        if self._lines.troubled:
            raise self._lost()

    def _lost(self) -> ReplicaLost:
        return ReplicaLost("the gang was given up" if self._killed else self._lines.what_happened())


def _loaded(config: ReplicaConfig, lines: Lines, launcher: Launcher) -> Loaded:
    ready = [line.ready for line in lines if line.ready is not None]
    sampling = next(each for each in ready if each.card is not None)
    assert sampling.card is not None
    stages = config.rank.pipeline_parallel_size
    return Loaded(
        GangExecutor(lines, launcher, config.step_timeout),
        sampling.card,
        min(each.num_blocks for each in ready),
        "\n".join(each.description for each in ready),
        depth=stages if stages > 1 else 2,
        ranks=tuple(each.memory for each in ready),
    )
