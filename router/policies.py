"""Which replica gets the next request. Pure: values in, one of them out; no clock, no I/O."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

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
