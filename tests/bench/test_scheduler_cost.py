import time

from tests.bench.simulate import decode_cost


def test_the_scheduler_costs_the_same_per_sequence_at_a_thousand_as_at_256():
    """In time of this thread: another test may have the core meanwhile."""
    few, many = (decode_cost(num, steps, clock=time.thread_time) / num for num, steps in ((256, 30), (1024, 20)))
    assert many <= 1.3 * few
