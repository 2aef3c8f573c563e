"""Matrix products. Weights come in as files hold them, [out, in]; how they lie in memory afterwards is settled here.

On a CPU a weight is multiplied up to 4x faster once it lies as a product reads it (measured, SmolLM2, a step of one row
in fp32: 17 ms against 39). So a loaded layer is packed once, and its plain weight is let go: in bf16 for our own kernel
(quant/product.py), else for oneDNN. A layer that was given a format (quant/formats.py) is packed into that.

Among tensor ranks a product is split by its outputs (a smaller `Linear`) or by its inputs (`SummedLinear`), in turn, so
that each half of a layer needs one sum (Shoeybi et al., 2019, "Megatron-LM", arXiv:1909.08053).
"""

from itertools import accumulate
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.parallel import Groups
from paceline.worker.quant.formats import BF16, Format, NarrowWeight
from paceline.worker.quant.product import has_kernel, product_bytes, product_of
from paceline.worker.shards import Part


class Packed(Protocol):
    """A weight in the order in which it is multiplied, with its bias."""

    @property
    def nbytes(self) -> int:
        """Of the weight."""

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x: [tokens, in]; add: [tokens, out]. Returns [tokens, out]: fp32 if it was added, else ``dtype`` or x's."""


class Linear(nn.Module):
    """y = x W^T (+ bias) (+ add). ``pack`` is called once, when the weight is complete."""

    packed: Packed | None = None
    format: Format | None = None

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, **factory), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, **factory), requires_grad=False) if bias else None
        self.dtype = factory.get("dtype", torch.get_default_dtype())

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, in]; add: [tokens, out], the fp32 residual. Returns [tokens, out], in fp32 where it was added."""
        return self.product(x, self.bias, add)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed is not None:
            return self.packed(x, add)
        y = functional.linear(x, self.weight, bias)
        return y if add is None else add + y

    def narrow_to(self, format: Format) -> None:
        """Before it is loaded: it takes its weight in fp32, of which nothing is lost, and is packed into ``format``."""
        self.format = format
        self.weight = nn.Parameter(self.weight.float(), requires_grad=False)

    def pack(self) -> None:
        self.packed = pack(self.weight, self.packed_bias(), self.dtype, self.format)
        if self.packed is not None:
            self.register_parameter("weight", None)

    def packed_bias(self) -> torch.Tensor | None:
        """What the packed product adds."""
        return self.bias


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
        y = self.groups.sum(self.product(x, None))
        if self.bias is not None:
            y += self.bias
        return y if add is None else add + y

    def packed_bias(self) -> torch.Tensor | None:
        return self.bias if self.groups.place.tp == 1 else None


class OneDNN:
    """A weight in oneDNN's own, opaque order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = bias

    @property
    def nbytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def plain(self) -> torch.Tensor:
        """[out, in]."""
        return self._weight.to_dense()

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if add is not None and add.dtype == x.dtype:
            return torch.ops.mkldnn._linear_pointwise.binary(x, add, self._weight, self._bias, "add")
        y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y.to(dtype or x.dtype) if add is None else add + y


def can_pack(weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``weight``, which may be on the meta device, is packed on ``device`` without a format."""
    return uses_kernel(weight, device, dtype) or _uses_onednn(device, dtype)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, format: Format | None = None
) -> Packed | None:
    """Of [out, in]; ``dtype`` is the one computed in. None where a weight stays as it is."""
    if format is not None:
        return product_of(format.narrow(weight), bias, dtype)
    if uses_kernel(weight, weight.device, dtype):
        return product_of(NarrowWeight(BF16, weight.detach()), bias, dtype)
    return OneDNN(weight, bias) if _uses_onednn(weight.device, dtype) else None


def packed_bytes(weight: torch.Tensor, device: torch.device, dtype: torch.dtype, format: Format | None = None) -> int:
    """That ``weight``, which may be on the meta device, will take once packed on ``device``."""
    if format is not None or uses_kernel(weight, device, dtype):
        return product_bytes(format or BF16, weight.shape[1], weight.shape[0], dtype)
    return weight.nbytes


def uses_kernel(weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and BF16.why_not(device, dtype, weight.shape[1]) is None and has_kernel(device)


def _uses_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
