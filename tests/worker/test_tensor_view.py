"""A tensor is read out of one that has it otherwise, and of that only what lies between its first and last row."""

import numpy as np
import pytest
import torch

from paceline.worker.tensor_view import TensorView, halves_order, interleaved_order, stacked

FILE = torch.arange(24 * 6).view(24, 6)
ORDER = halves_order(3, 8)  # of three heads
VIEWS = {
    "as it is": (TensorView(), FILE),
    "on its side": (TensorView(transposed=True), FILE.T),
    "some rows": (TensorView(slice(8, 20)), FILE[8:20]),
    "some rows, on its side": (TensorView(slice(1, 5), transposed=True), FILE.T[1:5]),
    "rows in another order": (TensorView(ORDER), FILE[torch.from_numpy(ORDER)]),
}


class Reader:
    def __init__(self):
        self.num_read = 0

    def __call__(self, rows=None, columns=None):
        values = FILE[rows or slice(None), columns or slice(None)]
        self.num_read += values.numel()
        return values


@pytest.mark.parametrize("rows", [None, slice(0, 2), slice(2, 4)])
@pytest.mark.parametrize("columns", [None, slice(1, 4)])
@pytest.mark.parametrize("name", VIEWS)
def test_rows_and_columns_are_those_of_the_whole_view(name, rows, columns):
    view, whole = VIEWS[name]
    assert view.shape(tuple(FILE.shape)) == tuple(whole.shape)
    read = Reader()
    values = view.get(read, tuple(FILE.shape), rows, columns)
    assert torch.equal(values, whole[rows or slice(None), columns or slice(None)])
    wide = whole.shape[1] if columns is None else 3
    assert read.num_read <= 8 * wide if rows else read.num_read == values.numel()  # a head's rows at most


def test_heads_by_neighbours_become_heads_by_halves():
    assert halves_order(2, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_projections_that_take_turns_head_by_head_are_told_apart():
    orders = [interleaved_order(2, 2, 3, index) for index in range(3)]
    assert [order.tolist() for order in orders] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert sorted(np.concatenate(orders)) == list(range(12))


def test_stacked_tensors_follow_each_other():
    assert stacked(4, 2, 2) == [slice(0, 4), slice(4, 6), slice(6, 8)]


@pytest.mark.parametrize(
    "view", [TensorView(slice(0, 4), whole=12), TensorView(slice(0, 4), whole=36), TensorView(np.arange(25))]
)
def test_a_file_of_another_size_shows_its_own_shape(view):
    assert view.shape((24, 6)) == (24, 6)
