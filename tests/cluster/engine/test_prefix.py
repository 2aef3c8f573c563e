"""The longest prefix that every KV group can go on from, whatever is still there of it."""

from itertools import product

import pytest

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.prefix import find_prefix
from paceline.proto.paging import Paging

NAMES = [bytes([i]) for i in range(6)]


def pool_with(*groups: str) -> BlockPool:
    """By group, an x for each name that is known there. Block ids are 10 x group + index + 1."""
    pool = BlockPool(10 * len(groups))
    for group, known in enumerate(groups):
        for index, mark in enumerate(known):
            if mark == "x":
                pool.name(10 * group + index + 1, NAMES[index], group)
    return pool


def test_where_all_is_seen_a_prefix_ends_with_the_first_block_that_is_missing():
    assert find_prefix(pool_with("xxx xx"), NAMES, 6, Paging(16)) == [[1, 2, 3]]
    assert find_prefix(pool_with("xxx xx"), NAMES, 2, Paging(16)) == [[1, 2]]
    assert find_prefix(pool_with(" xx"), NAMES, 6, Paging(16)) == [[]]
    assert find_prefix(pool_with("xxx"), [], 6, Paging(16)) == [[]]


def test_a_window_needs_only_the_blocks_before_the_end_and_has_null_entries_before_them():
    paging = Paging(16, (32,))
    assert find_prefix(pool_with("  xx"), NAMES, 6, paging) == [[0, 0, 3, 4]]
    assert find_prefix(pool_with("  x  x"), NAMES, 6, paging) == [[]]
    assert find_prefix(pool_with("x"), NAMES, 6, paging) == [[1]]
    assert find_prefix(pool_with("     x"), NAMES, 6, Paging(16, (1,))) == [[0] * 6]


def test_all_groups_agree_on_one_length():
    paging = Paging(16, (0, 32))
    assert find_prefix(pool_with("xxxxx", "x xx x"), NAMES, 6, paging) == [[1, 2, 3, 4], [0, 0, 13, 14]]
    assert find_prefix(pool_with("xx", "  xxxx"), NAMES, 6, paging) == [[], []]
    assert find_prefix(pool_with("xxx", "x"), NAMES, 6, paging) == [[1], [11]]


def test_a_name_is_found_only_in_its_own_group():
    assert find_prefix(pool_with("xxx", ""), NAMES, 6, Paging(16, (0, 32))) == [[], []]


@pytest.mark.parametrize("windows", [(0, 20), (17, 40), (16,), (0, 2, 33)])
def test_it_is_the_longest_by_trying_every_length(windows):
    paging = Paging(16, windows)
    marks = ["".join(mark) for mark in product(" x", repeat=4)]
    for known in product(marks, repeat=min(2, len(windows))):
        known += ("xx x",) * (len(windows) - len(known))
        found = find_prefix(pool_with(*known), NAMES, 4, paging)

        def good(length: int, known=known) -> bool:
            return all(
                set(mark[paging.first_block(window, 16 * length) : length]) <= {"x"}
                for mark, window in zip(known, windows, strict=True)
            )

        assert {len(blocks) for blocks in found} == {max(filter(good, range(5)))}
