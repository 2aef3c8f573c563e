"""Ids to vectors, and vectors to logits over the vocabulary."""

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.layers.linear import can_pack, pack_weight, packed_linear


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, size: int, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, **factory), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int. Returns [tokens, size]."""
        return functional.embedding(ids, self.weight)


class Head(nn.Module):
    """Logits by a weight of one row per id: the embedding's own where the two are tied, else a tensor of its own.

    Where linears are packed it holds a packed copy beside the plain rows: ids are looked up in the plain ones, and the
    best logits of a row are computed again from them. A product of bf16 comes out rounded to 8 bits, which is a step
    of 0.125 at a logit of 25: rounding would decide between near ties, and did.
    """

    packed: torch.Tensor | None = None
    num_exact: int = 32  # best logits of a row that are computed in fp32

    def __init__(self, vocab_size: int, size: int, tied_to: Embedding | None = None, **factory):
        super().__init__()
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, size, **factory), requires_grad=False)
        # Kept from becoming a submodule: a tied weight belongs to the embedding and is loaded there, once.
        self._rows = [self if tied_to is None else tied_to]

    @property
    def rows(self) -> torch.Tensor:
        """[vocab_size, size], plain."""
        return self._rows[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size] fp32. Returns fp32 logits [rows, vocab_size]."""
        weight = self.rows
        narrow = x.to(weight.dtype)
        rough = functional.linear(narrow, weight) if self.packed is None else packed_linear(narrow, self.packed)
        if weight.dtype == torch.float32:
            return rough
        logits = rough.float()
        best = logits.topk(min(self.num_exact, logits.shape[1]), dim=1, sorted=False).indices  # [rows, num_exact]
        exact = torch.bmm(weight[best].float(), x.unsqueeze(2)).squeeze(2)
        return logits.scatter_(1, best, exact)

    def pack(self) -> None:
        if can_pack(self.rows):
            self.packed = pack_weight(self.rows)
