"""What a controller decides, from what it sees and the time alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.lifecycle import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STABLE,
    START_SILENCE,
    Action,
    Life,
    Report,
    Rules,
    Sight,
    State,
    decide,
)

RULES = Rules(placement_timeout=30.0, silence=60.0)
NOW = 1000.0


def life(state: State = State.PENDING, **fields) -> Life:
    return Life(**{"since": NOW, "state": state} | fields)


def seen(state: str | None = None, **fields) -> Sight:
    """A process that has just said so; one that has said nothing yet for None."""
    report = Report(state, "host:1") if state else None
    return Sight(**{"exists": True, "report": report, "heard_at": NOW} | fields)


def test_a_replica_goes_from_nothing_to_ready_in_order():
    sights = [
        (Sight(), State.PENDING, Action.PLACE),
        (Sight(shortage="no room"), State.PENDING, Action.PLACE),
        (Sight(placed=True), State.STARTING, Action.CREATE),
        (seen(), State.STARTING, None),
        (seen("starting"), State.STARTING, None),
        (seen("loading"), State.LOADING, None),
        (seen("warming"), State.WARMING, None),
        (seen("ready"), State.READY, None),
        (seen("ready"), State.READY, None),
    ]
    current = life()
    for sight, state, action in sights:
        current, what = decide(current, sight, NOW, RULES)
        assert (current.state, what) == (state, action)


@pytest.mark.parametrize("state", ["loading", "warming", "ready", "draining"])
def test_a_controller_that_has_just_started_takes_over_what_runs(state):
    assert decide(life(), seen(state), NOW, RULES) == (life(State(state)), None)


def test_a_state_begins_when_it_changes_and_not_again():
    first, _ = decide(life(), seen("ready"), NOW + 5, RULES)
    second, _ = decide(first, seen("ready", heard_at=NOW + 9), NOW + 9, RULES)
    assert (first.since, second) == (NOW + 5, first)


def test_a_replica_without_room_says_so_after_the_timeout_and_goes_on_waiting():
    sight = Sight(shortage="needs 8 CPU, the cluster has 2")
    early, action = decide(life(), sight, NOW + 29.9, RULES)
    assert (early, action) == (life(), Action.PLACE)
    late, action = decide(early, sight, NOW + 30, RULES)
    assert late == life(reason="cannot place: needs 8 CPU, the cluster has 2")
    assert action is Action.PLACE
    placed, action = decide(late, Sight(placed=True), NOW + 500, RULES)
    assert (placed.state, placed.reason, action) == (State.STARTING, "", Action.CREATE)


def test_the_pause_after_a_death_doubles_up_to_a_minute_and_then_it_is_tried_again():
    current, now, pauses = life(State.LOADING), NOW, []
    for _ in range(9):
        current, action = decide(current, seen(death="killed"), now, RULES)
        assert (current.state, current.reason, action) == (State.DEAD, "killed", Action.END)
        pauses.append(current.retry_at - now)
        assert decide(current, Sight(), current.retry_at - 0.01, RULES) == (current, None)
        now = current.retry_at
        current, action = decide(current, Sight(), now, RULES)
        assert (current.state, action) == (State.PENDING, Action.PLACE)
        current, _ = decide(current, seen("loading", heard_at=now), now, RULES)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)


@pytest.mark.parametrize(("ready_for", "pause"), [(STABLE - 1, 32.0), (STABLE, 1.0)])
def test_a_stable_minute_makes_earlier_deaths_forgotten(ready_for, pause):
    now = NOW + ready_for
    dead, _ = decide(life(State.READY, num_deaths=5), seen(death="killed"), now, RULES)
    assert dead.retry_at - now == pause


@pytest.mark.parametrize(
    ("state", "patience"),
    [(State.READY, 60.0), (State.DRAINING, 60.0), (State.STARTING, START_SILENCE), (State.LOADING, START_SILENCE)],
)
def test_a_process_that_does_not_answer_is_ended(state, patience):
    sight = seen(state.value)
    assert decide(life(state), sight, NOW + patience, RULES) == (life(state), None)
    dead, action = decide(life(state), sight, NOW + patience + 1, RULES)
    assert (dead.state, dead.reason, action) == (State.DEAD, f"silent for {patience:.0f} s", Action.END)


def test_a_replica_that_leaves_drains_first_and_is_then_forgotten():
    leaving, action = decide(life(State.READY), seen("ready", leaving=True), NOW, RULES)
    assert (leaving.state, action) == (State.DRAINING, Action.DRAIN)
    for state in ("ready", "draining"):  # asked once
        assert decide(leaving, seen(state, leaving=True), NOW, RULES) == (leaving, None)
    gone, action = decide(leaving, seen("drained", leaving=True), NOW, RULES)
    assert (gone.state, gone.reason, action) == (State.DEAD, "drained", Action.END)
    assert decide(gone, Sight(leaving=True), NOW, RULES) == (gone, Action.FORGET)


@pytest.mark.parametrize("sight", [Sight(leaving=True), seen("loading", leaving=True)])
def test_one_that_does_not_serve_yet_leaves_at_once(sight):
    gone, action = decide(life(), sight, NOW, RULES)
    assert (gone.state, action) == (State.DEAD, Action.END)
    assert decide(gone, Sight(leaving=True), NOW, RULES)[1] is Action.FORGET


def test_one_that_leaves_is_heard_first_because_it_may_serve():
    waiting, action = decide(life(), seen(leaving=True), NOW, RULES)
    assert (waiting.state, action) == (State.STARTING, None)
    assert decide(waiting, seen("ready", leaving=True), NOW, RULES)[1] is Action.DRAIN


def test_one_that_dies_while_it_drains_is_forgotten_and_not_started_again():
    gone, _ = decide(life(State.DRAINING), seen(death="killed", leaving=True), NOW, RULES)
    assert decide(gone, Sight(leaving=True), NOW + 999, RULES)[1] is Action.FORGET


def test_one_that_an_operator_drained_is_replaced_without_a_pause():
    draining, action = decide(life(State.READY), seen("draining"), NOW, RULES)
    assert (draining.state, action) == (State.DRAINING, None)
    gone, _ = decide(draining, seen("drained"), NOW, RULES)
    assert decide(gone, Sight(), NOW, RULES)[1] is Action.PLACE
    assert gone.num_deaths == 0


sights = st.builds(
    Sight,
    placed=st.booleans(),
    exists=st.booleans(),
    report=st.none()
    | st.sampled_from(
        ["starting", "loading", "warming", "ready", "draining", "drained", "stopping", "dead", "of a later version"]
    ).map(Report),
    heard_at=st.floats(NOW - 200, NOW + 200),
    death=st.sampled_from(["", "killed"]),
    leaving=st.booleans(),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(sights, st.floats(0, 100)), max_size=20))
def test_whatever_is_seen_there_is_an_answer_and_it_is_consistent(history):
    current, now = life(), NOW
    for sight, passed in history:
        now += passed
        before, (current, action) = current, decide(current, sight, now, RULES)
        assert (current.since == now) >= (current.state is not before.state)
        assert action is not Action.CREATE or (sight.placed and not sight.exists)
        assert (action is Action.END) == (current.state is State.DEAD and before.state is not State.DEAD)
        assert action is not Action.FORGET or (sight.leaving and current.state is State.DEAD)
        assert action is not Action.DRAIN or (sight.leaving and current.state is State.DRAINING)
        assert 0 <= current.retry_at - current.since <= LONGEST_PAUSE or current.state is not State.DEAD
        assert decide(current, sight, now, RULES)[0].state is not State.DEAD or current.state is State.DEAD or action
