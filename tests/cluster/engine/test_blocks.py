import pytest

from paceline.cluster.engine.blocks import BlockPool


def names(*values: str) -> list[bytes]:
    return [v.encode() for v in values]


def test_nameless_blocks_are_taken_before_cached_ones_and_the_null_block_never():
    pool = BlockPool(4)
    held = [pool.allocate() for _ in range(4)]
    assert held == [1, 2, 3, 4]
    pool.name(1, b"a")
    pool.release(held)
    assert [pool.allocate() for _ in range(4)] == [2, 3, 4, 1]
    assert pool.match(names("a"), 9) == []


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head():
    pool = BlockPool(3)
    held = [pool.allocate() for _ in range(3)]
    for block, name in zip(held, names("a", "b", "c"), strict=True):
        pool.name(block, name)
    pool.release(held)
    pool.allocate()
    assert pool.match(names("a", "b", "c"), 3) == held[:2]


def test_the_least_recently_released_cached_block_goes_first():
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.name(a, b"a")
    pool.name(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.acquire(a)  # used again: now it is the younger
    pool.release([a])
    assert pool.allocate() == b


def test_a_match_is_the_longest_run_from_the_first_block_on_within_the_limit():
    pool = BlockPool(3)
    a, b, c = (pool.allocate() for _ in range(3))
    pool.name(a, b"a")
    pool.name(c, b"c")
    assert pool.match(names("a", "b", "c"), 3) == [a]
    pool.name(b, b"b")
    assert pool.match(names("a", "b", "c"), 2) == [a, b]
    assert pool.match(names("b"), 1) == [b]


def test_the_first_block_of_a_name_keeps_it():
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.name(a, b"x")
    pool.name(b, b"x")
    assert pool.match(names("x"), 1) == [a]
    pool.release([b])
    assert pool.match(names("x"), 1) == [a]
    pool.check([[a]])


def test_shared_blocks_are_free_only_when_the_last_holder_lets_go():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.acquire(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.check([[block]])
    pool.release([block])
    assert pool.num_free == 2


def test_check_finds_a_lost_reference_and_a_misfiled_block():
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check([])
    pool.refs[block] = 0
    with pytest.raises(AssertionError, match="misfiled"):
        pool.check([])


def test_the_order_of_fresh_blocks_can_be_scattered_but_must_be_a_permutation():
    assert [BlockPool(3, [3, 1, 2]).allocate()] == [3]
    with pytest.raises(ValueError, match="permutation"):
        BlockPool(3, [1, 1, 2])
