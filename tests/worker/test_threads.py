"""Thread counts are settled before torch is there, and what the user set stays."""

from paceline.worker import threads


def test_the_environment_is_filled_but_not_overwritten():
    environ = {"MKL_NUM_THREADS": "3"}
    assert threads.prepare(2, environ) == 2
    assert environ == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3", "GOMP_SPINCOUNT": threads.SPIN_COUNT}


def test_without_a_number_it_is_the_cores_that_are_ours():
    assert threads.prepare(None, {}) == threads.available() >= 1


def test_torch_is_held_to_the_count():
    before = threads.apply()
    assert threads.apply(1) == 1
    assert threads.apply(before) == before
