import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.errors import (
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
from paceline.router.limits import Deadlines, Gate, deadlines, retry_after


@dataclasses.dataclass
class Door:
    capacity: int | None = 6
    load: ReplicaLoad = dataclasses.field(default_factory=ReplicaLoad)


def test_twenty_at_once_into_six_places_leave_fourteen_outside():
    gate, inside, refused = Gate(), [], []
    for _ in range(20):
        try:
            inside.append(gate.admit(1, [Door()]))
        except Overloaded as error:
            refused.append(error)
    assert (len(inside), len(refused)) == (6, 14)
    assert all(type(error.retry_after) is int and error.retry_after >= 1 for error in refused)
    inside[0].leave()
    inside[0].leave()
    assert gate.num_open == 5
    gate.admit(1, [Door()])


def test_a_call_counts_its_choices_and_comes_in_whole_or_not_at_all():
    gate = Gate()
    gate.admit(4, [Door()])
    with pytest.raises(Overloaded):
        gate.admit(3, [Door()])
    gate.admit(2, [Door()])
    assert gate.num_open == 6


def test_replicas_add_up_and_one_without_a_limit_lifts_it():
    gate = Gate()
    gate.admit(12, [Door(), Door()])
    assert isinstance(gate.refusal(1, [Door(), Door()]), Overloaded)
    assert gate.refusal(10_000, [Door(), Door(capacity=None)]) is None


def test_what_could_never_come_in_is_the_requests_own_fault():
    error = Gate().refusal(7, [Door()])
    assert isinstance(error, InvalidRequest)
    assert "7" in error.message
    assert "6" in error.message


def test_draining_and_no_replica_are_told_apart_from_full():
    gate = Gate()
    assert isinstance(gate.refusal(1, []), NoReplica)
    gate.draining = True
    for doors in ([], [Door()]):
        error = gate.refusal(1, doors)
        assert isinstance(error, Draining)
        assert error.retry_after >= 1


@pytest.mark.parametrize(
    ("loads", "seconds"),
    [
        ([(0, 0.0)], 1),
        ([(900, 0.0)], 1),
        ([(900, 100.0)], 9),
        ([(901, 100.0)], 10),
        ([(500, 60.0), (400, 40.0)], 9),
        ([(10**9, 1.0)], 60),
        ([(1, 1000.0)], 1),
    ],
)
def test_retry_after_is_the_backlog_over_the_pace_whole_and_bounded(loads, seconds):
    doors = [Door(load=ReplicaLoad(queued_tokens=tokens, tokens_per_second=pace)) for tokens, pace in loads]
    assert retry_after(doors) == seconds
    assert type(retry_after(doors)) is int


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.integers(1, 20))
def test_whatever_comes_and_goes_never_more_are_inside_than_there_are_places(events, places):
    gate, inside = Gate(), []
    for coming, num in events:
        if coming:
            try:
                inside.append((num, gate.admit(num, [Door(capacity=places)])))
            except PacelineError:
                assert gate.num_open + num > places
        elif inside:
            inside.pop(0)[1].leave()
        assert gate.num_open == sum(num for num, _ in inside) <= places


CONFIG = RouterConfig(queue_timeout=2.0, request_timeout=60.0)


def test_the_server_is_the_cap_of_what_a_caller_asks_for():
    assert deadlines(CONFIG, 100.0) == Deadlines(queue=102.0, first_token=None, end=160.0)
    asked = deadlines(CONFIG, 100.0, queue=5.0, first_token=3.0, request=0.5)
    assert asked == Deadlines(queue=102.0, first_token=103.0, end=100.5)


def test_before_a_replica_has_it_the_first_time_that_passes_counts():
    assert Deadlines().first() is None
    for times, leaf in (
        ({"queue": 1.0, "end": 2.0}, QueueTimeout),
        ({"first_token": 1.0, "queue": 2.0}, FirstTokenTimeout),
        ({"queue": 9.0, "end": 1.0}, RequestTimeout),
    ):
        at, error = Deadlines(**times).first()
        assert (at, type(error)) == (1.0, leaf)
