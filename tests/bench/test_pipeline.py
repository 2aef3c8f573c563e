"""Plans in flight keep every stage at work (Narayanan et al. 2019, PipeDream; Kwon et al. 2023)."""

import pytest

from tests.bench.pipeline import batch, virtual_rate


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_as_many_plans_in_flight_as_stages_make_as_many_times_the_steps(num_stages):
    requests = batch(24, 100)
    one = virtual_rate(num_stages, 1, requests)
    assert virtual_rate(num_stages, num_stages, requests) >= 0.95 * num_stages * one


def test_a_lone_sequence_has_nobody_to_overlap_with():
    assert virtual_rate(2, 2, batch(1, 50)) == virtual_rate(2, 1, batch(1, 50))
