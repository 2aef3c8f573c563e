"""The small kernels on tensors: a norm, a rotation, a gate, each in one pass where torch takes several. The layers hold
their slow twins and ask `takes` first.

They compute in fp32 and round once, so in bf16 they are closer to the exact result than the twins.
"""

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from paceline.worker.kernels import native

DTYPES = (torch.bfloat16, torch.float32)
# Activations of `gate` by the names of configs, as kernels/elements.h numbers them.
GATES = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_fast": 1, "gelu_pytorch_tanh": 1}

_ARGUMENTS = {
    "paceline_rms_norm": (c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_float),
    "paceline_rotate": (c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64),
    "paceline_gate": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int),
    "paceline_rescore": (c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
}


def takes(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can work on ``x``, with results in ``dtype``."""
    return x.is_cpu and x.dtype in DTYPES and dtype in DTYPES and native.library() is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x: fp32 [..., size]; weight: fp32 [size]. Returns the shape of x in ``dtype``."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    size = x.shape[-1]
    is_bf16 = dtype == torch.bfloat16
    run = _function("paceline_rms_norm")
    run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), is_bf16, x.numel() // size, size, eps)
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], a token's heads side by side; cos, signed sin: [tokens, 1, dim] in its dtype. In
    place."""
    tokens, heads, head_dim = x.shape
    run = _function("paceline_rotate")
    is_bf16 = x.dtype == torch.bfloat16
    run(x.data_ptr(), is_bf16, cos.data_ptr(), sin.data_ptr(), tokens, x.stride(0), heads, head_dim, cos.shape[-1])
    return x


def gate(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    """gate_up: [tokens, 2 * size], gates before what they open. Returns [tokens, size]."""
    gate_up = gate_up.contiguous()
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype)
    run = _function("paceline_gate")
    run(gate_up.data_ptr(), out.data_ptr(), gate_up.dtype == torch.bfloat16, tokens, size, activation)
    return out


def rescore_(scores: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, num_best: int) -> torch.Tensor:
    """scores: fp32 [rows, ids], near x weight^T; x: fp32 [rows, size]; weight: [ids, size] in bf16 or fp32. The
    ``num_best`` largest of each row (at most 64) are computed again, in fp32 and in place."""
    assert scores.is_contiguous()
    rows, ids = scores.shape
    run, x = _function("paceline_rescore"), x.contiguous()
    is_bf16 = weight.dtype == torch.bfloat16
    run(scores.data_ptr(), x.data_ptr(), weight.data_ptr(), is_bf16, rows, ids, weight.shape[1], num_best)
    return scores


@cache
def _function(name: str) -> Callable[..., None]:
    library = native.library()
    assert library is not None
    function = library[name]  # an object of its own, unlike an attribute's, which all share
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function
