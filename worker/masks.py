"""Which ids a draw may give: a bit an id. How the bits lie, and how logits obey them; not where they come from."""

from dataclasses import dataclass, field

import numpy as np
import torch

WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Masks:
    """For some of a step's draws. Bit i of word w stands for id 32 w + i.

    ``faults``: why a draw can give nothing that counts; its mask allows all.
    """

    draws: list[int]  # [n]
    bits: torch.Tensor  # [n, words] int32, on the host
    faults: dict[int, str] = field(default_factory=dict)

    @classmethod
    def open(cls, draws: list[int], vocab_size: int, pinned: bool) -> "Masks":
        """All is allowed."""
        words = -(-vocab_size // WORD)
        return cls(draws, torch.full((len(draws), words), -1, dtype=torch.int32, pin_memory=pinned))

    def leaves(self, draw: int, ids: list[int]) -> bool:
        """Whether ``draw`` may give anything beside ``ids``."""
        if draw not in self.draws:
            return True
        bits = np.unpackbits(self.bits[self.draws.index(draw)].numpy().view(np.uint8), bitorder="little")
        bits[np.array(ids, np.int64)] = 0
        return bool(bits.any())

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [draws, vocab]; minus infinity where an id is not allowed. Leaves the argument alone."""
        bits = self.bits.to(logits.device, non_blocking=True)
        each = 1 << torch.arange(WORD, dtype=torch.int32, device=logits.device)
        allowed = ((bits[:, :, None] & each) != 0).view(len(bits), -1)[:, : logits.shape[1]]
        if len(bits) == len(logits):
            return torch.where(allowed, logits, -torch.inf)
        index = torch.tensor(self.draws, device=logits.device)
        return logits.index_put((index,), torch.where(allowed, logits[index], -torch.inf))
