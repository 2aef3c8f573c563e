"""Matrix products. Weights come in as files hold them, [out, in]; how they lie in memory afterwards is settled here.

On a CPU, oneDNN multiplies by a weight that was reordered into its own blocks up to 4x faster than by a plain one
(measured, SmolLM2, one row, all linears and the head: 8 ms against 12 in bf16; a step in fp32: 17 against 39), and a
row's result depends less on how many rows stand beside it. So a loaded layer is packed once, and its plain weight is
let go.

Among tensor ranks a product is split by its outputs (a smaller `Linear`) or by its inputs (`SummedLinear`), in turn, so
that each half of a layer needs one sum (Shoeybi et al., 2019, "Megatron-LM", arXiv:1909.08053).
"""

from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.parallel import Groups
from paceline.worker.shards import Part


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
        if can_pack(self.weight.device, self.weight.dtype):
            self.packed = pack_weight(self.weight)
            self.register_parameter("weight", None)


class FusedLinear(Linear):
    """Several linears on one input as one product, of each the outputs in its `Part`, in order."""

    def __init__(self, in_size: int, parts: tuple[Part, ...], *, bias: bool = False, **factory):
        super().__init__(in_size, sum(part.size for part in parts), bias=bias, **factory)
        self.parts = parts
        self.offsets = tuple(accumulate((part.size for part in parts), initial=0))[:-1]

    def rows_of(self, index: int) -> slice:
        """Where the outputs of linear ``index`` lie in weight and bias."""
        return slice(self.offsets[index], self.offsets[index] + self.parts[index].size)


class SummedLinear(Linear):
    """A linear whose inputs are spread over the tensor ranks: each multiplies by its own, and the products are summed.

    The whole bias is on every rank and added once, after the sum.
    """

    def __init__(self, part: Part, out_size: int, groups: Groups, *, bias: bool = False, **factory):
        super().__init__(part.size, out_size, bias=bias, **factory)
        self.held = {"weight": (Part.all(out_size), part)}
        self.groups = groups

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        if self.groups.place.tp == 1:
            return super().forward(x, add)
        y = self.groups.sum(self.product(x))
        if self.bias is not None:
            y += self.bias
        return y if add is None else add + y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) if self.packed is None else packed_linear(x, self.packed)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and torch.backends.mkldnn.is_available()


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of [out, in] in oneDNN's own order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed_linear(x, packed, bias=None, add=None) -> torch.Tensor:
    if add is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, add, packed, bias, "add")
