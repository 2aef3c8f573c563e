"""Iteration-level batching against whole batches (Yu et al. 2022, Orca), counted in steps."""

from tests.bench.simulate import skewed, steps_with_free_seats, steps_with_whole_batches


def test_whoever_ends_makes_room_in_the_next_step_and_whole_batches_take_seven_times_the_steps():
    requests = skewed(2000)
    ideal = sum(r.params.max_tokens for r in requests) / 16
    steps = steps_with_free_seats(requests, 16)
    assert steps <= 1.05 * ideal
    assert steps_with_whole_batches(requests, 16) >= 7 * steps
