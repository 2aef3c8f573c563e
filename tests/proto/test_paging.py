"""What a sequence takes of the pool, against counting the blocks that a window touches position by position."""

import pytest

from paceline.proto.paging import Paging


def test_a_group_that_sees_all_keeps_every_block():
    paging = Paging(16)
    assert [paging.num_blocks(length) for length in (1, 16, 17, 160)] == [1, 1, 2, 10]
    assert paging.longest(10, 1000) == 160
    assert paging.longest(10, 100) == 100
    assert paging.most_blocks(0) is None
    assert paging.first_block(0, 1000) == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
def test_a_window_holds_what_any_chunk_and_the_window_before_it_touch(window, budget, block_size):
    paging = Paging(block_size, (window,), budget)
    touched = []
    for start in range(200, 200 + block_size):
        first = paging.first_block(window, start)
        assert first == min(position // block_size for position in range(start - window + 1, start + 1))
        touched.append((start + budget - 1) // block_size - first + 1)
    assert paging.most_blocks(window) == max(touched)
    assert paging.num_blocks(10_000) == max(touched)
    assert paging.num_blocks(1) == 1


def test_a_window_sees_from_the_first_block_while_it_is_not_full():
    paging = Paging(16, (40,))
    assert [paging.first_block(40, position) for position in (0, 39, 54, 55, 71)] == [0, 0, 0, 1, 2]


def test_groups_share_the_pool_and_the_longest_sequence_is_what_all_of_them_together_leave_room_for():
    paging = Paging(16, (0, 32, 32), budget=16)  # 4 blocks at most in each windowed group
    assert [paging.num_blocks(16 * count) for count in (1, 3, 4, 5, 20)] == [3, 9, 12, 13, 28]
    for num_blocks in range(3, 40):
        longest = paging.longest(num_blocks, 10_000)
        assert paging.num_blocks(longest) <= num_blocks < paging.num_blocks(longest + 1)
    assert paging.longest(2, 10_000) == 0
    assert Paging(16, (32,), budget=16).longest(4, 10_000) == 10_000
    assert Paging(16, (32,), budget=16).longest(3, 10_000) == 48
