"""Our own kernel (kernels/tile.h): prefill chunks and decode rows in one call, straight from the paged cache.

Nothing is gathered, padded or cut here: the kernel gets the block table and the rows as the batch has them. A row's
result does not depend on the rows beside it, nor on how a prompt is cut into chunks.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from paceline.worker.batch import Batch
from paceline.worker.kernels import native

DTYPES = (torch.bfloat16, torch.float32)
GRANULE = 8  # entries; a head is a multiple of so many


class Rows(ctypes.Structure):
    """PacelineRows of kernels/attention.h."""

    _fields_ = [
        (name, ctypes.c_int64 if name in ("num_rows", "num_tokens", "table_width", "block_size") else ctypes.c_void_p)
        for name in (
            "num_rows",
            "num_tokens",
            "table_width",
            "block_size",
            "tables",
            "first_tokens",
            "starts",
            "lengths",
            "write_to",
        )
    ]


class Call(ctypes.Structure):
    """PacelineAttention of kernels/attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "q", "k", "v", "keys", "values", "out", "sinks")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    ]


class Metadata(NamedTuple):
    rows: Rows
    held: tuple[object, ...]  # what the pointers in rows lead to


class CpuAttention:
    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return f"it runs on the CPU, not on {device.type}"
        if dtype not in DTYPES:
            return f"it computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
        if head_dim % GRANULE:
            return f"it takes heads of a multiple of {GRANULE} entries"
        return native.why_not()

    def __init__(self) -> None:
        library = native.library()
        assert library is not None
        self._attend = library.paceline_attention
        self._attend.argtypes, self._attend.restype = (ctypes.POINTER(Call),), None
        self._rows: dict[int, Rows] = {}  # by group, always in the same place: calls that were written down point at it

    def prepare(self, batch: Batch, block_size: int, group: int = 0, window: int = 0) -> Metadata:
        columns = [
            np.ascontiguousarray(batch.blocks[group]),
            *(np.ascontiguousarray(x, np.int64) for x in (batch.first_tokens, batch.starts, batch.lengths)),
        ]
        write_to = batch.write_to[group].contiguous()
        num_rows, width = columns[0].shape
        pointers = [column.ctypes.data for column in columns]
        rows = self._rows.setdefault(group, Rows())
        ctypes.pointer(rows)[0] = Rows(num_rows, batch.num_tokens, width, block_size, *pointers, write_to.data_ptr())
        return Metadata(rows, (*columns, write_to))

    def forward(
        self, q, k, v, keys, values, metadata: Metadata, *, scale: float, window=0, softcap=0.0, sinks=None
    ) -> torch.Tensor:
        q, k, v = _rows_of_heads(q), _rows_of_heads(k), _rows_of_heads(v)
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
        sinks = None if sinks is None else sinks.float().contiguous()
        self._attend(
            Call(
                ctypes.addressof(metadata.rows),
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                out.data_ptr(),
                None if sinks is None else sinks.data_ptr(),
                q.stride(0),
                k.stride(0),
                v.stride(0),
                num_heads,
                k.shape[1],
                head_dim,
                window,
                scale,
                softcap,
                q.dtype == torch.bfloat16,
            )
        )
        return out


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] with each token's heads side by side, which a slice of a projection's output has."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
