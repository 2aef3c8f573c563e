"""Ids to vectors, and vectors to logits over the vocabulary."""

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.kernels import elements
from paceline.worker.layers.linear import Packed, pack
from paceline.worker.parallel import Groups
from paceline.worker.quant.formats import Format
from paceline.worker.shards import Part
from paceline.worker.top import top_indices


class Embedding(nn.Module):
    """Of the rows of ``vocab``; what tensor ranks find in theirs is summed."""

    def __init__(self, vocab: Part, size: int, groups: Groups, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab.size, size, **factory), requires_grad=False)
        self.held = {"weight": (vocab, Part.all(size))}
        self.vocab, self.groups = vocab, groups

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int. Returns [tokens, size]."""
        if self.vocab.is_all:
            return functional.embedding(ids, self.weight)
        own = ids - self.vocab.start
        elsewhere = (own < 0) | (own >= self.vocab.size)
        x = functional.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.groups.sum(x.masked_fill_(elsewhere[:, None], 0))


class Head(nn.Module):
    """Logits by a weight of one row per id: the embedding's own where the two are tied, else a tensor of its own.

    Tensor ranks compute those of their ids, ``sizes`` of them each, and the first gathers them.

    Where linears are packed it holds a packed copy beside the plain rows: ids are looked up in the plain ones, and the
    best logits of a row are computed again from them. A product of bf16 comes out rounded to 8 bits, which is a step
    of 0.125 at a logit of 25: rounding would decide between near ties, and did. Of a weight in a narrow format the same
    second look takes back what was rounded, while the embedding holds the rows; no other plain copy is kept.
    """

    packed: Packed | None = None
    format: Format | None = None
    num_exact: int = 32  # best logits of a row, on each rank, that are computed in fp32

    def __init__(
        self,
        vocab: Part,
        size: int,
        groups: Groups,
        sizes: tuple[int, ...],
        tied_to: Embedding | None = None,
        **factory,
    ):
        super().__init__()
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocab.size, size, **factory), requires_grad=False)
        self.held = {"weight": (vocab, Part.all(size))}
        self.groups, self.sizes = groups, sizes
        self.dtype = factory["dtype"]
        # Kept from becoming a submodule: a tied weight belongs to the embedding and is loaded there, once.
        self._rows = [self if tied_to is None else tied_to]

    @property
    def is_tied(self) -> bool:
        """To the embedding of this rank, which holds the rows for both."""
        return self._rows[0] is not self

    @property
    def rows(self) -> torch.Tensor:
        """[ids, size], plain."""
        return self._rows[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        """x: [rows, size] fp32. Returns fp32 logits [rows, vocab_size] on tensor rank 0, None on the others."""
        return self.groups.gather(self.local(x), self.sizes)

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """Of this rank's ids: fp32 [rows, ids]."""
        if self.packed is None:
            rough = functional.linear(x.to(self.dtype), self.rows)
        else:  # a narrow product rounds nothing that comes in or out
            rough = self.packed(x if self.format else x.to(self.dtype), dtype=torch.float32)
        if self.rows is None or (self.dtype == torch.float32 and self.format is None):
            return rough
        logits = rough.float()
        if elements.takes(logits, self.rows.dtype) and self.rows.is_contiguous():
            return elements.rescore_(logits, x, self.rows, self.num_exact)
        best = top_indices(logits, min(self.num_exact, logits.shape[1]))  # [rows, num_exact]
        exact = torch.bmm(self.rows[best].float(), x.unsqueeze(2)).squeeze(2)
        return logits.scatter_(1, best, exact)

    def narrow_to(self, format: Format) -> None:
        """As `Linear.narrow_to`."""
        self.format = format
        if not self.is_tied:
            self.weight = nn.Parameter(self.weight.float(), requires_grad=False)

    def pack(self) -> None:
        self.packed = pack(self.rows, None, self.dtype, self.format)
        if self.format is not None and not self.is_tied:
            self.register_parameter("weight", None)
