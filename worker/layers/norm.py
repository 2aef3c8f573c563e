"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Reads the fp32 residual stream and gives what the next product takes: ``dtype``. Its weight is fp32 too."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device), requires_grad=False)
        self.dtype = dtype
        self.eps = eps

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [..., size] fp32. Returns the same shape in ``dtype``, or in the one given."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps).to(dtype or self.dtype)
