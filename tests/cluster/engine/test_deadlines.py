"""Deadlines and caps of the engine: who is ended for them, and that nothing was computed for whoever never began."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.engine.deadlines import FEW, Deadlines
from paceline.proto.errors import InvalidRequest, Overloaded, QueueTimeout, RequestTimeout, StartupError
from tests.cluster.drive import GatedExecutor
from tests.cluster.engine.fakes import Drive, make_request, make_scheduler
from tests.cluster.engine.test_engine import running

NOW = 1_000_000.0  # unix seconds


def drive(num_blocks=64, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **config))


def expire(d: Drive, now: float) -> list[tuple[str, int, str | None]]:
    deltas = d.scheduler.expire(now)
    d.take(deltas)
    d.scheduler.check()
    return [(delta.request_id, delta.choice, delta.error_code) for delta in deltas]


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_one_that_expires_in_the_queue_was_never_computed():
    d = drive(max_num_seqs=1)
    d.add(make_request("runs", 20, 30), make_request("waits", 40, 5, queue_deadline=NOW + 1, n=2))
    for _ in range(10):
        d.step()
    assert expire(d, NOW + 0.9) == []
    assert expire(d, NOW + 1.1) == [("waits", 0, "queue_timeout"), ("waits", 1, "queue_timeout")]
    assert d.endings["waits", 0].finish_reason == "error"
    d.run()
    assert d.scheduler.counters.computed == 20 + 30 - 1
    assert d.scheduler.counters.prompt == 20
    assert "waits" not in str([plan.admissions for plan in d.executor.plans])
    assert expire(d, NOW + 100) == []


def test_one_that_came_too_late_is_ended_before_its_first_plan():
    d = drive()
    d.add(make_request("late", 20, 5, queue_deadline=NOW - 1))
    assert expire(d, NOW) == [("late", 0, "queue_timeout")]
    assert d.scheduler.schedule(0.0) is None


def test_one_that_was_scheduled_once_is_past_its_queue_deadline_even_when_preempted():
    d = drive(8, max_num_batched_tokens=64)
    d.add(*(make_request(f"r{i}", 30, 60, queue_deadline=NOW) for i in range(2)))
    while not d.scheduler.counters.preemptions:
        assert d.step()
    assert len(d.scheduler.waiting) == 1
    assert expire(d, NOW + 1) == []
    d.run()


def test_the_first_token_deadline_ends_a_prefill_and_spares_whoever_has_a_token():
    d = drive(max_num_batched_tokens=16, long_prefill_tokens=8, max_num_seqs=4)
    d.add(make_request("quick", 8, 30, first_token_deadline=NOW))
    d.step()
    d.add(make_request("slow", 200, 5, first_token_deadline=NOW))
    d.step()
    assert expire(d, NOW + 1) == [("slow", 0, "first_token_timeout")]
    assert d.scheduler.pool.num_referenced == len(d.scheduler.running[0].block_ids[0])
    d.run()
    assert d.endings["quick", 0].finish_reason == "length"


def test_choices_that_wait_for_a_seat_have_their_requests_first_token():
    d = drive(max_num_seqs=1)
    d.add(make_request("r", 20, 6, n=3, first_token_deadline=NOW))
    d.step()
    assert len(d.scheduler.waiting) == 2
    assert expire(d, NOW + 1) == []
    d.run()
    assert [d.endings["r", choice].finish_reason for choice in range(3)] == ["length"] * 3


@pytest.mark.parametrize("depth", [1, 2])
def test_the_deadline_ends_all_choices_wherever_they_are_once(depth):
    d = drive(max_num_seqs=2, depth=depth)
    d.add(make_request("r", 20, 50, n=4, deadline=NOW), make_request("other", 20, 10))
    d.step()
    d.step()
    assert expire(d, NOW) == [("r", choice, "request_timeout") for choice in range(4)]
    assert d.emitted["r", 0]
    assert d.endings["r", 0].usage.num_generated == len(d.emitted["r", 0])
    d.run()
    assert d.scheduler.pool.num_referenced == 0
    assert d.endings["other", 0].finish_reason == "length"


def test_another_request_with_the_id_of_one_that_ended_is_not_ended_for_it():
    d = drive()
    d.add(make_request("r", 8, 1, deadline=NOW))
    d.run()
    del d.endings["r", 0], d.emitted["r", 0]
    d.add(make_request("r", 8, 3))
    assert expire(d, NOW + 1) == []
    d.run()
    assert d.endings["r", 0].finish_reason == "length"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=40), st.lists(st.floats(0, 120), max_size=8))
def test_each_time_passes_once_in_order_and_never_early(times, looks):
    deadlines = Deadlines()
    for at, (queue, end) in enumerate(times):
        deadlines.watch(make_request(f"r{at}", 1, queue_deadline=queue, deadline=end), at, lambda _: True)
    passed = []
    for now in [*sorted(looks), math.inf]:
        news = deadlines.passed(now)
        assert all((times[at][0] if leaf is QueueTimeout else times[at][1]) <= now for _, at, leaf in news)
        passed += news
    every = [(f"r{at}", at, leaf) for at in range(len(times)) for leaf in (QueueTimeout, RequestTimeout)]
    assert sorted(passed, key=repr) == sorted(every, key=repr)


def test_times_of_requests_that_have_ended_do_not_pile_up():
    deadlines = Deadlines()
    for at in range(10_000):
        deadlines.watch(make_request(f"r{at}", 1, deadline=NOW + at), at, lambda name, at=at: name == f"r{at}")
    assert len(deadlines) <= FEW + 1


def test_the_engine_looks_at_the_clock_before_each_plan():
    with running(GatedExecutor(gate_open=True), max_num_seqs=1) as it:
        it.submit(make_request("late", 20, 5, queue_deadline=time.time() - 1))
        it.wait_for(it.endings)
        assert it.deltas[0].error_code == "queue_timeout"
        assert it.executor.plans == []
        it.submit(make_request("long", 20, 1500, deadline=time.time() + 0.05))
        it.submit(make_request("next", 20, 3))
        it.wait_for(lambda: len(it.endings()) == 3)
        assert it.endings()[1:] == [("long", 0, "error"), ("next", 0, "length")]


# -- caps --------------------------------------------------------------------------------------------------------------


def test_six_of_twenty_find_a_place_and_an_n_of_four_takes_four():
    d = drive(max_num_seqs=2, max_waiting_requests=4)
    d.add(make_request("four", 20, 5, n=4))
    with pytest.raises(Overloaded) as caught:
        d.add(make_request("three", 20, 5, n=3))
    assert type(caught.value.retry_after) is int
    assert caught.value.retry_after >= 1
    d.add(*(make_request(f"r{i}", 20, 5) for i in range(2)))
    for i in range(2, 16):
        with pytest.raises(Overloaded):
            d.add(make_request(f"r{i}", 20, 5))
    d.run()
    assert len(d.endings) == 6
    d.add(make_request("after", 20, 5, n=6))
    d.run()
    with pytest.raises(InvalidRequest, match="7 choices"):
        d.add(make_request("never", 20, 5, n=7))


def test_tokens_that_wait_are_limited_but_one_request_may_wait_alone():
    d = drive(256, max_num_seqs=1, max_waiting_tokens=100)
    d.add(make_request("runs", 20, 50))
    d.step()
    d.add(make_request("long", 500, 5))
    with pytest.raises(Overloaded, match="500 tokens wait"):
        d.add(make_request("more", 20, 5))
    d.scheduler.abort("long")
    d.add(make_request("a", 60, 5), make_request("b", 40, 5))
    with pytest.raises(Overloaded):
        d.add(make_request("c", 1, 5))


def test_retry_after_is_what_waits_over_the_measured_pace():
    d = drive(256, max_num_seqs=1, max_waiting_requests=1, max_num_batched_tokens=10, enable_prefix_caching=False)
    d.add(make_request("runs", 200, 5))
    for _ in range(12):
        d.step()  # ten tokens a second, by the drive's clock
    d.add(make_request("waits", 150, 5))
    with pytest.raises(Overloaded) as caught:
        d.add(make_request("more", 20, 5))
    assert caught.value.retry_after == 15


def test_zero_is_no_limit_and_less_is_refused():
    d = drive(256, max_num_seqs=1, max_waiting_requests=0)
    d.add(*(make_request(f"r{i:04d}", 5, 1) for i in range(1500)))
    d.run()
    with pytest.raises(StartupError, match="max_waiting_tokens"):
        make_scheduler(max_waiting_tokens=-1)
