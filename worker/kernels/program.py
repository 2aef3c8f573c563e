"""Calls of our kernels written down once and run again for any number of tokens: kernels/program.cpp from Python.

Knows memory and the library, no layers. While calls are written down nothing is computed, so nothing else may compute
either: an operation of torch's that is no view and makes no empty tensor ends it.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.worker.kernels import native

ALIGNMENT = 64  # bytes

_VIEWS = {
    "alias", "as_strided", "detach", "expand", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
_MOSTLY_NOTHING = {"contiguous", "reshape", "to"}  # views, unless they copy


class NotOurs(Exception):
    """An operation that the kernels do not have, by its name."""


class Program:
    """What ``compute`` does with tensors of ``num_tokens`` rows, for that many or fewer rows of them.

    It gets memory that is always the same: who runs the program fills the first rows of what ``compute`` reads, and
    finds the first rows of ``result``. Raises NotOurs.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], num_tokens: int):
        library = native.library()
        assert library is not None
        self._memory = _Memory()
        library.paceline_record.argtypes, library.paceline_record.restype = (c_int64,), None
        library.paceline_recorded.restype = c_void_p
        library.paceline_replay.argtypes, library.paceline_replay.restype = (c_void_p, c_int64), None
        library.paceline_num_calls.argtypes, library.paceline_num_calls.restype = (c_void_p,), c_int64
        library.paceline_forget.argtypes, library.paceline_forget.restype = (c_void_p,), None
        library.paceline_record(num_tokens)
        try:
            with self._memory:
                self.result = compute()
        finally:
            self._at = library.paceline_recorded()
            if self._at is not None:
                weakref.finalize(self, library.paceline_forget, self._at)
        if self._at is None:
            raise NotOurs("rows that are no tokens")
        self.num_calls = library.paceline_num_calls(self._at)
        self._replay = library.paceline_replay

    def run(self, num_tokens: int) -> None:
        self._replay(self._at, num_tokens)


class _Memory(TorchDispatchMode):
    """Gives tensors memory that is kept, the same to several where the one is let go before the next is made: calls run
    in the order in which they were written down."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[np.ndarray] = []
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler at the first call, 800 modules in more than a second of a start, to keep it
        away from here; nothing is compiled in a rank."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        name = function.overloadpacket.__name__
        if name in _VIEWS:
            return function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], (kwargs or {}).get("dtype") or torch.get_default_dtype())
        if function is torch.ops.aten.empty_like.default:
            return self._empty(args[0].shape, (kwargs or {}).get("dtype") or args[0].dtype)
        if name in _MOSTLY_NOTHING:
            result = function(*args, **(kwargs or {}))
            if result.dtype == args[0].dtype and result.data_ptr() == args[0].data_ptr():
                return result
        raise NotOurs(name)

    def _empty(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        memory = free.pop() if free else self._new(size)
        # A tensor's storage, which its views share, holds the array that it was made from.
        held = memory[:]
        weakref.finalize(held, free.append, memory)
        return torch.from_numpy(held)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _new(self, size: int) -> np.ndarray:
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._kept.append(raw[start : start + size])
        return self._kept[-1]
