"""Which replica gets the next request. Pure: values in, one of them out; no clock, no I/O."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from paceline.proto.errors import StartupError
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import Request


class Candidate(Protocol):
    """What a policy may know of a replica that is ready."""

    @property
    def replica_id(self) -> str: ...

    @property
    def in_flight(self) -> int:
        """Choices that this router sent there and that have not ended."""

    @property
    def load(self) -> ReplicaLoad:
        """The replica's own last word, up to a second old."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    def __call__(self, replicas: Sequence[C], request: Request) -> C:
        """``replicas`` is not empty and in no particular order."""


def least_loaded(replicas: Sequence[C], request: Request) -> C:
    """The replica with the fewest choices ahead. Ours in flight are fresher than its report, others' only it knows.

    The larger of both counts: the report holds ours too, once it has come. Ties: less still to compute, then the id,
    so that the order is total.
    """
    return min(replicas, key=_weight)


def _weight(replica: Candidate) -> tuple[int, int, int, str]:
    reported = replica.load.running + replica.load.waiting
    return max(replica.in_flight, reported), replica.in_flight, replica.load.queued_tokens, replica.replica_id


class RoundRobin:
    """Each in turn, by id: after the last one comes the next that is there now."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, replicas: Sequence[C], request: Request) -> C:
        behind = [replica for replica in replicas if replica.replica_id > self._last]
        chosen = min(behind or replicas, key=lambda replica: replica.replica_id)
        self._last = chosen.replica_id
        return chosen


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher 2001): with many routers, loads that are a second old do
    not send all of them to the same replica."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def __call__(self, replicas: Sequence[C], request: Request) -> C:
        # Sorted, so that the draw decides and not the order of the list.
        ordered = sorted(replicas, key=lambda replica: replica.replica_id)
        return least_loaded(self._rng.sample(ordered, min(2, len(ordered))), request)


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "least_loaded": lambda rng: least_loaded,
    "power_of_two": PowerOfTwo,
    "round_robin": lambda rng: RoundRobin(),
}


def policy_of(name: str, rng: random.Random) -> Policy:
    """Raises StartupError naming the choices."""
    if name not in POLICIES:
        raise StartupError(f"routing policy {name!r} is unknown: use one of {', '.join(POLICIES)}")
    return POLICIES[name](rng)
