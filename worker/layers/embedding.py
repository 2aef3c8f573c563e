"""Ids to vectors, and vectors to logits over the vocabulary."""

import torch
from torch import nn
from torch.nn import functional

from paceline.worker.layers.linear import Linear, can_pack, pack_weight, packed_linear


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, size: int, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, **factory), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int. Returns [tokens, size]."""
        return functional.embedding(ids, self.weight)


class Head(Linear):
    """An untied output head: a linear without bias."""


class TiedHead(nn.Module):
    """An output head that is the embedding read the other way: it has no tensor of its own in the file.

    Where linears are packed it holds a packed copy beside the embedding's rows: looking rows up needs them plain.
    """

    packed: torch.Tensor | None = None

    def __init__(self, embedding: Embedding):
        super().__init__()
        # Not a submodule: its weight belongs to the embedding and is loaded there, once.
        object.__setattr__(self, "embedding", embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size]. Returns logits [rows, vocab_size]."""
        if self.packed is not None:
            return packed_linear(x, self.packed)
        return functional.linear(x, self.embedding.weight)

    def pack(self) -> None:
        if can_pack(self.embedding.weight):
            self.packed = pack_weight(self.embedding.weight)
