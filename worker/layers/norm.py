"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]. The mean of squares is taken in fp32 whatever x is."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
