"""Products with a packed weight: by our kernel (kernels/linear.cpp), or without it by the plain weight it stands for.

The kernel takes narrow weights and, because it beats oneDNN where rows are few, those in bf16 as well. A row's result
is the same to the bit whatever rows stand beside it. Without the kernel nothing is gained but the smaller file: the
weight is made plain once, in the dtype that is computed in, and gives the same within rounding.
"""

import ctypes
from collections.abc import Callable

import torch
from torch.nn import functional

from paceline.worker import host_memory
from paceline.worker.kernels import native
from paceline.worker.quant.formats import BF16, Format, NarrowWeight

PANEL = 32  # outputs that lie together
QUAD_BYTES = 4  # of an output's inputs, that lie together

Run = Callable[..., None]  # paceline_linear


class _Weight(ctypes.Structure):
    """PacelineWeight of kernels/linear.cpp."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("planes", ctypes.c_int32),
    ]


class KernelProduct:
    """Holds the weight in panels, and no other copy of it."""

    def __init__(self, weight: NarrowWeight, bias: torch.Tensor | None, run: Run):
        format = weight.format
        self.out_size, in_size = weight.values.shape
        self.is_bf16 = format is BF16
        self._values = host_memory.moved(_panels(weight.values, format.bits))
        self._scales = _by_panel(weight.scales)
        self._minimums = _by_panel(weight.minimums)
        self._bias = None if bias is None else _padded(bias.float()[:, None]).flatten()
        self._weight = _Weight(
            values=self._values.data_ptr(),
            scales=_pointer(self._scales),
            minimums=_pointer(self._minimums),
            bias=_pointer(self._bias),
            in_size=in_size,
            out_size=self.out_size,
            group=in_size if self.is_bf16 else format.group,
            bits=format.bits,
            zero=format.zero,
            planes=format.input_bits // 8,
        )
        self._at = ctypes.addressof(self._weight)
        self._run = run

    @property
    def nbytes(self) -> int:
        """Of the weight, without the bias."""
        return sum(part.nbytes for part in (self._values, self._scales, self._minimums) if part is not None)

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x: [tokens, in] bf16 or fp32; add: [tokens, out]. Returns [tokens, out]: fp32 if it was added, else ``dtype``
        or x's."""
        x = x.contiguous()
        if add is not None:
            add, dtype = add.float().contiguous(), torch.float32
        y = torch.empty(len(x), self.out_size, dtype=dtype or x.dtype)
        if self.is_bf16:
            x = x.bfloat16()
        self._run(
            self._at,
            x.data_ptr(),
            x.dtype == torch.bfloat16,
            len(x),
            _pointer(add),
            y.data_ptr(),
            y.dtype == torch.bfloat16,
        )
        return y


class PlainProduct:
    """The weight that the integers stand for, multiplied as any other."""

    def __init__(self, weight: NarrowWeight, bias: torch.Tensor | None, dtype: torch.dtype):
        self.weight = weight.plain().to(dtype)
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As `KernelProduct`."""
        y = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.to(dtype or x.dtype) if add is None else add + y


def product_of(weight: NarrowWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> KernelProduct | PlainProduct:
    """``bias``: [out] or None; ``dtype`` is the one computed in."""
    run = _kernel()
    return PlainProduct(weight, bias, dtype) if run is None else KernelProduct(weight, bias, run)


def product_bytes(format: Format, in_size: int, out_size: int, dtype: torch.dtype) -> int:
    """That the weight of such a product takes here."""
    if _kernel() is None:
        return out_size * in_size * dtype.itemsize
    outputs = -(-out_size // PANEL) * PANEL
    if format is BF16:
        return outputs * in_size * 2
    scale = 2 * (1 + format.has_minimum) * in_size // format.group
    return outputs * (in_size * format.bits // 8 + scale)


def why_no_kernel() -> str | None:
    """None where the kernel runs, else why weights are multiplied as plain ones."""
    library = native.library()
    if library is None:
        return native.why_not()
    return None if library.paceline_linear_runs() else "the CPU has no AVX2"


def has_kernel(device: torch.device) -> bool:
    return device.type == "cpu" and why_no_kernel() is None


def _kernel() -> Run | None:
    library = native.library()
    if library is None or why_no_kernel() is not None:
        return None
    run = library.paceline_linear
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    run.argtypes = [pointer, pointer, integer, ctypes.c_int64, pointer, pointer, integer]
    run.restype = None
    return run


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return functional.pad(rows, (0, 0, 0, -len(rows) % PANEL)).contiguous()


def _panels(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[out, in] -> [panel, in / 4, 32, 4] of bytes, [panel, in / 2, 32, 2] of bf16, [panel, in / 4, 16, 4] of 4 bits:
    outputs 16 to 31 are in the high half."""
    quad = QUAD_BYTES // values.element_size()
    panels = _padded(values).view(-1, PANEL, values.shape[1] // quad, quad).transpose(1, 2)
    if bits != 4:
        return panels.contiguous()
    low, high = panels.chunk(2, 2)
    return (low | high << 4).contiguous()


def _by_panel(scales: torch.Tensor | None) -> torch.Tensor | None:
    """[out, groups] -> [panel, groups, 32]."""
    if scales is None:
        return None
    return _padded(scales).view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
