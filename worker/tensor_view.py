"""A model's tensor as it lies in one of a file's that has it otherwise: some of its rows, in an order, on its side.

Families say which of a file's tensors holds which of theirs (`CausalLM.tensors_of`); a checkpoint reads through this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

Read = Callable[[slice | None, slice | None], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """``rows``: for each of the model's rows the row of the file's tensor, or a range of them; None: all, as they are.
    ``transposed``: the file has [in, out]; rows are those after turning it. ``whole``: rows that the file's tensor must
    have; None: as many as are named at least."""

    rows: slice | np.ndarray | None = None
    transposed: bool = False
    whole: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the model's tensor, by the shape of the file's; where that is another than this view is for, the file's,
        which will not fit."""
        turned = shape[::-1] if self.transposed else shape
        if self.rows is None or not self._fits(turned[0]):
            return turned
        return (len(self._rows(turned[0])), *turned[1:])

    def get(
        self, read: Read, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """``[rows, columns]`` of the model's tensor. ``read`` gives those of the file's, whose shape is ``shape``; only
        what lies between the first and the last row wanted is read."""
        if self.rows is None:
            return self._read(read, rows, columns, len(shape))
        wanted = self._rows((shape[::-1] if self.transposed else shape)[0])[rows or slice(None)]
        if isinstance(wanted, range):
            return self._read(read, slice(wanted.start, wanted.stop), columns, len(shape))
        first, last = int(wanted.min()), int(wanted.max())
        return self._read(read, slice(first, last + 1), columns, len(shape))[torch.from_numpy(wanted - first)]

    def _fits(self, num: int) -> bool:
        if self.whole is not None:
            return num == self.whole
        return self.rows is None or isinstance(self.rows, slice) or num > int(self.rows.max())

    def _rows(self, num: int) -> range | np.ndarray:
        assert self.rows is not None
        return range(num)[self.rows] if isinstance(self.rows, slice) else self.rows

    def _read(self, read: Read, rows: slice | None, columns: slice | None, num_dims: int) -> torch.Tensor:
        return read(columns, rows).T if self.transposed and num_dims == 2 else read(rows, columns)


def stacked(*sizes: int) -> list[slice]:
    """The rows of several tensors of these numbers of rows, that a file has as one, in order."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def halves_order(num_heads: int, head_dim: int) -> np.ndarray:
    """For each row of a q or k projection whose heads turn by halves, the row of one whose heads turn by neighbours.

    Some files rotate the values (0, 1), (2, 3), ... of a head, here they are entry i and i + head_dim / 2.
    """
    pairs = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def interleaved_order(num_heads: int, head_dim: int, parts: int, index: int) -> np.ndarray:
    """The rows of part ``index`` in a tensor that has, head by head, those of ``parts`` projections: q, k, v of head 0,
    q, k, v of head 1, ..."""
    return np.arange(num_heads * parts * head_dim).reshape(num_heads, parts, head_dim)[:, index].reshape(-1)
