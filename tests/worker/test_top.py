"""The largest entries of long rows, beside what torch finds by looking at each."""

import pytest
import torch

from paceline.worker.top import GROUP, argmax, top_indices

SIZES = [5, 64 * GROUP, 64 * GROUP + 3, 200]


def rows_of(size: int, num_values: int = 0) -> torch.Tensor:
    """Random rows; with ``num_values`` of so few values that many are equal."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(3, size, generator=generator)
    return (rows * num_values).round() / num_values if num_values else rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_values", [0, 3])
def test_the_largest_are_those_of_a_full_sort(size, num_values):
    rows = rows_of(size, num_values)
    k = min(32, size)
    found = top_indices(rows, k)
    assert all(len(set(own)) == k for own in found.tolist())
    assert rows.gather(1, found).sort(1).values.equal(rows.sort(1).values[:, -k:])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_values", [0, 3])
def test_the_first_of_equal_ones_is_the_largest(size, num_values):
    rows = rows_of(size, num_values)
    assert argmax(rows).tolist() == [own.index(max(own)) for own in rows.tolist()]


def test_a_part_of_wider_rows_is_looked_at_alone():
    rows = rows_of(64 * GROUP + 64)
    rows[:, -64:] = 100.0
    part = rows[:, : 64 * GROUP]
    assert top_indices(part, 8).max() < 64 * GROUP
    assert argmax(part).max() < 64 * GROUP


def test_what_is_not_a_number_is_found_first():
    rows = rows_of(64 * GROUP)
    rows[1, 70] = torch.nan
    assert argmax(rows)[1] == 70
    assert 70 in top_indices(rows, 4)[1].tolist()
