"""The gate before any work: who may come in, and until when. Pure accounting: no clock, no I/O, no tokens.

It counts the choices that this router has let in against what the replicas said they take, before a body is tokenized.
Other routers may fill the same replicas: the last word is a replica's own, when the request reaches it.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from paceline.proto.errors import (
    DeadlineError,
    Draining,
    FirstTokenTimeout,
    InvalidRequest,
    NoReplica,
    Overloaded,
    PacelineError,
    QueueTimeout,
    RequestTimeout,
)
from paceline.proto.load import ReplicaLoad
from paceline.router.config import RouterConfig

LONGEST_RETRY = 60  # seconds that a client is told to wait at most: the estimate is worth no more


class Door(Protocol):
    """What the gate knows of a replica that takes requests."""

    @property
    def capacity(self) -> int | None:
        """Choices that may run and wait there; None is no limit."""

    @property
    def load(self) -> ReplicaLoad: ...


class Gate:
    """``num_open`` choices are inside. Once ``draining``, nobody comes in any more."""

    def __init__(self) -> None:
        self.num_open = 0
        self.draining = False

    def admit(self, num_choices: int, doors: Sequence[Door]) -> "Pass":
        """All choices of a call or none. Raises what `refusal` says."""
        if error := self.refusal(num_choices, doors):
            raise error
        self.num_open += num_choices
        return Pass(self, num_choices)

    def refusal(self, num_choices: int, doors: Sequence[Door]) -> PacelineError | None:
        """Why so many choices cannot come in now: Draining, NoReplica, Overloaded, or InvalidRequest if they never
        could."""
        if self.draining:
            return Draining("the server is shutting down", retry_after=1)
        if not doors:
            return NoReplica("no replica is ready", retry_after=1)
        limit = capacity(doors)
        if limit is None or self.num_open + num_choices <= limit:
            return None
        if num_choices > limit:
            return InvalidRequest(f"{num_choices} choices are asked for; all replicas together take {limit}", "n")
        return Overloaded(f"{self.num_open} of {limit} places are taken", retry_after=retry_after(doors))


class Pass:
    """A call that is inside. ``leave`` may be called more than once."""

    __slots__ = ("_gate", "_num_choices")

    def __init__(self, gate: Gate, num_choices: int):
        self._gate = gate
        self._num_choices = num_choices

    def leave(self) -> None:
        self._gate.num_open -= self._num_choices
        self._num_choices = 0


def capacity(doors: Sequence[Door]) -> int | None:
    total = 0
    for door in doors:
        if door.capacity is None:
            return None
        total += door.capacity
    return total


def retry_after(doors: Sequence[Door]) -> int:
    """Seconds in which the replicas compute what waits there, at the pace they report: whole, and at least one."""
    queued = sum(door.load.queued_tokens for door in doors)
    pace = sum(door.load.tokens_per_second for door in doors)
    return min(LONGEST_RETRY, max(1, math.ceil(queued / pace))) if pace > 0 else 1


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds; None is never. ``queue``: for its first step; ``first_token``; ``end``: for the whole request."""

    queue: float | None = None
    first_token: float | None = None
    end: float | None = None

    def first(self) -> tuple[float, DeadlineError] | None:
        """The one that passes first, for what no replica has taken yet: it still waits for all three."""
        named = (
            (self.queue, QueueTimeout("the request waited too long for its turn")),
            (self.first_token, FirstTokenTimeout("the first token took too long")),
            (self.end, RequestTimeout("the request took too long")),
        )
        return min(((at, error) for at, error in named if at is not None), key=lambda pair: pair[0], default=None)


def deadlines(
    config: RouterConfig,
    now: float,
    *,
    queue: float | None = None,
    first_token: float | None = None,
    request: float | None = None,
) -> Deadlines:
    """From the seconds that a caller asks for: what the server allows is the cap. ``now`` is unix seconds."""

    def until(asked: float | None, cap: float | None) -> float | None:
        given = [seconds for seconds in (asked, cap) if seconds is not None]
        return now + min(given) if given else None

    return Deadlines(
        queue=until(queue, config.queue_timeout),
        first_token=until(first_token, config.first_token_timeout),
        end=until(request, config.request_timeout),
    )
