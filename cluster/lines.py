"""An engine's lines to the ranks of its gang: one to each, what each has said of itself, and who is gone.

Knows what ranks say while they start and when they end, and no order of phases (gang.py). For one thread.
"""

import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from paceline.cluster.channel import set_timeouts
from paceline.cluster.messages import Control, Facts, Fault, Hello, Phase, Pong, Ready, decode
from paceline.proto.step import StepPlan, StepResult

SETTLE = 0.5  # seconds: who is torn along by a dead rank complains as fast as the system tells of the dead one


@dataclass(eq=False)
class Line:
    """One connection; whose, it says in its hello. ``rank`` is given to it later."""

    connection: Connection
    hello: Hello | None = None
    rank: int | None = None
    facts: Facts | None = None
    phases: list[Phase] = field(default_factory=list)
    ready: Ready | None = None
    fault: str = ""
    ended: bool = False
    silent: int = 0  # looks since it was pinged and has not answered

    @property
    def index(self) -> int:
        assert self.hello is not None
        return self.hello.index

    def __str__(self) -> str:
        if self.hello is None:
            return "a rank process that has not said who it is"
        who = f"rank process {self.index}" if self.rank is None else f"rank {self.rank}"
        return f"{who} ({self.hello.host}, pid {self.hello.pid})"


class Lines:
    """``timeout``: seconds that a frame which has begun may take, either way; who takes longer counts as gone.

    ``why_gone``, by a process's index: what its launcher knows of it.
    """

    def __init__(self, timeout: float, why_gone: Callable[[], dict[int, str]]):
        self._timeout = timeout
        self._why_gone = why_gone
        self._selector = selectors.DefaultSelector()
        self._lines: list[Line] = []
        self._faulty: list[Line] = []  # in the order in which they complained
        self.troubled = False  # one of them has complained or ended; looked at in every step

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        for line in self._lines:
            if not line.ended:
                set_timeouts(line.connection, seconds)

    def add(self, connection: Connection) -> None:
        set_timeouts(connection, self._timeout)
        line = Line(connection)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def drop(self, line: Line) -> None:
        self._lines.remove(line)
        self._end(line)
        self.troubled = any(line.fault or line.ended for line in self._lines)

    def order(self) -> None:
        """From now on by rank, which each has."""
        self._lines.sort(key=lambda line: -1 if line.rank is None else line.rank)

    # -- frames --------------------------------------------------------------------------------------------------------

    def send(self, line: Line, frame: bytes) -> None:
        """To one that has ended nothing is sent. That one breaks ``receive`` finds out: its last words come first."""
        if not line.ended:
            try:
                line.connection.send_bytes(frame)
            except BlockingIOError as error:
                self._hang_up(line, error)
            except OSError:
                pass

    def broadcast(self, frame: bytes) -> None:
        """The same bytes to each."""
        for line in self._lines:
            self.send(line, frame)

    def receive(self, timeout: float | None) -> list[StepResult]:
        """Waits for at most so many seconds until anybody says anything; one frame of each who did is taken in.

        Results are handed out; everything else is noted on the line that it came from.
        """
        results = []
        for key, _ in self._selector.select(timeout):
            line: Line = key.data
            try:
                message = decode(line.connection.recv_bytes())
            except (EOFError, OSError) as error:
                self._hang_up(line, error)
            except msgspec.DecodeError as error:
                self.blame(line, f"it cannot be understood ({error}): is it another version of paceline?")
            else:
                if isinstance(message, StepResult):
                    results.append(message)
                else:
                    self._note(line, message)
        return results

    def _note(self, line: Line, message: StepPlan | Control) -> None:
        match message:
            case Hello():
                line.hello = message
            case Facts():
                line.facts = message
            case Phase():
                line.phases.append(message)
            case Ready():
                line.ready = message
            case Fault():
                self.blame(line, message.message)
            case Pong():
                line.silent = 0
            case _:
                self.blame(line, f"it sent a {type(message).__name__}, which is not a rank's to say")

    def _hang_up(self, line: Line, error: Exception) -> None:
        if isinstance(error, BlockingIOError):
            self.blame(line, f"it left a frame half taken or half sent for {self._timeout:g} s")
        self._end(line)

    def _end(self, line: Line) -> None:
        if not line.ended:
            line.ended = self.troubled = True
            self._selector.unregister(line.connection)
            line.connection.close()

    def close(self) -> None:
        for line in self._lines:
            self._end(line)
        self._selector.close()

    # -- who is gone ---------------------------------------------------------------------------------------------------

    def blame(self, line: Line, message: str) -> None:
        """What it complains of, or is complained of; its first one counts."""
        if not line.fault:
            line.fault = message
            self._faulty.append(line)
            self.troubled = True

    def what_happened(self) -> str:
        """One sentence on a gang in trouble. Ranks that ended without a word come first: what others complain of is
        mostly that these are gone. Takes a moment, so that each can be heard."""
        until = time.monotonic() + SETTLE
        while (left := until - time.monotonic()) > 0 and not all(line.fault or line.ended for line in self._lines):
            self.receive(left)
        why_gone = self._why_gone()
        silent = [line for line in self._lines if line.ended and not line.fault and line.hello]
        told = [f"{line} ended without a word{_in_brackets(why_gone.get(line.index, ''))}" for line in silent]
        told += [f"{line}: {line.fault}" for line in self._faulty[:1]]
        return "; ".join(told)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
