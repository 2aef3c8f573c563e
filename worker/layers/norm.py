"""Norms: RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) and LayerNorm (Ba et al., 2016, arXiv:1607.06450).

All read fp32, mostly the residual stream, and give what the next product takes: ``dtype``. Their weights are fp32 too.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.kernels import elements
from paceline.worker.shards import Part


def fp32(size: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = fp32(size, device)
        self.dtype = dtype
        self.eps = eps

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [..., size] fp32. Returns the same shape in ``dtype``, or in the one given."""
        dtype = dtype or self.dtype
        if elements.takes(x, dtype):
            return elements.rms_norm(x, self.weight, self.eps, dtype)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps).to(dtype)


class OffsetRMSNorm(RMSNorm):
    """Files hold how far the weight is from one. It is added once, when the weight is there."""

    def pack(self) -> None:
        self.weight.add_(1.0)


class LayerNorm(nn.Module):
    has_bias: ClassVar[bool] = True

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = fp32(size, device)
        self.bias = fp32(size, device) if self.has_bias else None
        self.dtype = dtype
        self.eps = eps

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `RMSNorm.forward`."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(dtype or self.dtype)


class BiaslessLayerNorm(LayerNorm):
    has_bias = False


class HeadsRMSNorm(nn.Module):
    """Of a vector that lies over tensor ranks, head by head, ``heads`` of them here. The ranks' `share`s are added up
    by who calls it. ``num_holders``: ranks that hold these same heads."""

    def __init__(
        self, heads: Part, dim: int, eps: float, num_holders: int = 1, *, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        entries = heads.times(dim)
        self.weight = fp32(entries.size, device)
        self.held = {"weight": (entries,)}
        self.counted = entries.whole * num_holders
        self.dtype = dtype
        self.eps = eps

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, dim] fp32. This rank's share of the mean square, [tokens]."""
        return x.square().sum((1, 2)) / self.counted

    def forward(self, x: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """square: [tokens], the mean square of the whole vector. Returns [tokens, heads, dim] in ``dtype``."""
        x = x * torch.rsqrt(square + self.eps)[:, None, None]
        return (x * self.weight.view(x.shape[1:])).to(self.dtype)
