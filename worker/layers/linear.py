"""Matrix products. Weights come in as files hold them, [out, in]; how they lie in memory afterwards is settled here.

On a CPU, oneDNN multiplies by a weight that was reordered into its own blocks up to 4x faster than by a plain one
(measured, SmolLM2, one row, all linears and the head: 8 ms against 12 in bf16; a step in fp32: 17 against 39), and a
row's result depends less on how many rows stand beside it. So a loaded layer is packed once, and its plain weight is
let go.
"""

from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """y = x W^T (+ bias) (+ add). ``pack`` is called once, when the weight is complete."""

    packed: torch.Tensor | None = None

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, **factory), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, **factory), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, in]; add: [tokens, out], the fp32 residual. Returns [tokens, out], in fp32 where it was added."""
        if self.packed is None:
            y = functional.linear(x, self.weight, self.bias)
        elif add is not None and add.dtype == x.dtype:
            return packed_linear(x, self.packed, self.bias, add)
        else:
            y = packed_linear(x, self.packed, self.bias)
        return y if add is None else add + y

    def pack(self) -> None:
        if can_pack(self.weight):
            self.packed = pack_weight(self.weight)
            self.register_parameter("weight", None)


class FusedLinear(Linear):
    """Several linears on one input as one product; ``sizes`` are the rows of each, in order."""

    def __init__(self, in_size: int, sizes: tuple[int, ...], *, bias: bool = False, **factory):
        super().__init__(in_size, sum(sizes), bias=bias, **factory)
        self.sizes = sizes
        self.offsets = tuple(accumulate(sizes, initial=0))[:-1]

    def rows_of(self, part: int) -> slice:
        """Where part ``part`` of weight and bias lies."""
        return slice(self.offsets[part], self.offsets[part] + self.sizes[part])


def can_pack(weight: torch.Tensor) -> bool:
    kinds = (torch.bfloat16, torch.float32)
    return weight.device.type == "cpu" and weight.dtype in kinds and torch.backends.mkldnn.is_available()


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of [out, in] in oneDNN's own order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed_linear(x, packed, bias=None, add=None) -> torch.Tensor:
    if add is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, add, packed, bias, "add")
