"""How prompts are cut so that streams beside them go on in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.engine.pace import AIM, BESIDE_DECODE, LEAST, Pace
from paceline.proto.errors import StartupError
from tests.cluster.engine.fakes import Drive, FakeExecutor, expected_ids, make_request, make_scheduler

TARGET, MOST = 0.1, 256


def full_step(pace: Pace, num_decode: int, base: float, each: float) -> float:
    """Seconds of a step with as many tokens of prompts as may be in it, told to the pace."""
    num_prefill = pace.num_prefill_tokens(num_decode)
    seconds = base + each * (num_decode + num_prefill)
    pace.saw(num_decode, num_prefill, seconds)
    return seconds


@given(st.integers(1, 64), st.floats(0, 0.05), st.floats(1e-6, 0.02))
def test_on_any_machine_full_steps_come_to_last_as_long_as_they_may_or_hold_the_least_or_the_most(
    num_decode, base, each
):
    pace = Pace(TARGET, MOST)
    for _ in range(12):
        seconds = full_step(pace, num_decode, base, each)
    if pace.num_prefill_tokens(num_decode) == MOST:
        assert seconds <= AIM * TARGET + each + 1e-9
    elif pace.num_prefill_tokens(num_decode) > max(LEAST, BESIDE_DECODE * num_decode):
        assert 0.8 * AIM * TARGET - 2 * each <= seconds <= 1.05 * AIM * TARGET + each
    assert pace.num_prefill_tokens(num_decode) >= min(MOST, max(LEAST, BESIDE_DECODE * num_decode))


def test_after_a_step_that_stalled_prompts_soon_have_what_they_had():
    pace = Pace(TARGET, MOST)
    for _ in range(10):
        full_step(pace, 4, 0.01, 0.0005)
    before = pace.num_prefill_tokens(4)
    assert LEAST < before < MOST
    pace.saw(4, before, 5.0)
    assert pace.num_prefill_tokens(4) == LEAST
    for _ in range(10):
        full_step(pace, 4, 0.01, 0.0005)
    assert pace.num_prefill_tokens(4) == pytest.approx(before, rel=0.1)


def test_steps_that_were_not_full_or_had_no_stream_in_them_do_not_raise_the_pace():
    pace = Pace(TARGET, MOST)
    pace.saw(4, 100, 0.2)
    cut = pace.num_prefill_tokens(4)
    assert cut == 40
    pace.saw(4, 10, 0.001)
    pace.saw(0, 256, 0.001)
    assert pace.num_prefill_tokens(4) == cut


def test_a_long_step_of_prompts_alone_is_known_before_the_first_stream_has_to_wait():
    pace = Pace(TARGET, MOST)
    pace.saw(0, 256, 0.8)
    assert pace.num_prefill_tokens(1) == 25


def test_a_target_of_nothing_cuts_nothing_and_one_below_is_refused():
    pace = Pace(0, MOST)
    pace.saw(4, 256, 9.0)
    assert pace.num_prefill_tokens(4) == MOST
    with pytest.raises(StartupError, match="target_itl is -1"):
        make_scheduler(target_itl=-1)


def slow(plan) -> float:
    return 0.004 * sum(plan.chunk_lens)


def test_on_a_slow_machine_prompts_are_cut_while_streams_run_and_whole_when_nobody_waits():
    d = Drive(make_scheduler(512, max_num_batched_tokens=MOST), FakeExecutor(seconds=slow))
    requests = [make_request("alone", 600, 3), make_request("stream", 5, 200), make_request("beside", 600, 3)]
    d.add(requests[0])
    d.run()
    d.add(requests[1])
    d.step()
    d.add(requests[2])
    first = d.steps
    d.run()
    sizes = [(r.num_decode_tokens, r.num_prefill_tokens) for r in d.scheduler.records if r.num_prefill_tokens]
    assert sizes[:3] == [(0, 256), (0, 256), (0, 88)]
    assert {num_prefill for num_decode, num_prefill in sizes[4:] if num_decode} <= {19, 20, *range(LEAST)}
    assert d.steps - first == 200 - 1  # no step without the stream
    for request in requests:
        assert d.emitted[request.request_id, 0] == expected_ids(request)


def test_a_long_prompt_leaves_half_of_what_the_pace_leaves_to_a_short_one():
    d = Drive(make_scheduler(512, max_num_batched_tokens=MOST), FakeExecutor(seconds=slow))
    d.add(make_request("stream", 5, 200))
    d.step()
    d.add(make_request("first", 300, 1))
    d.step()  # now the pace is known
    d.add(make_request("long", 600, 1), make_request("short", 30, 1))
    while ("short", 0) not in d.emitted:
        d.step()
    assert ("long", 0) not in d.emitted
