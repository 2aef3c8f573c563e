from tests.bench.simulate import decode_cost


def test_the_scheduler_costs_the_same_per_sequence_at_a_thousand_as_at_256():
    assert decode_cost(1024, 20) / 1024 <= 1.3 * decode_cost(256, 30) / 256
