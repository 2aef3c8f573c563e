"""Log-probabilities of ids, of the raw distribution: as the device has them, and as the host tells them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.proto.request import TokenLogprobs
from paceline.worker.pinned import pinned_copy


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of n ids, each under logits of its own: the id's, and those of the k most likely, sorted. Natural logarithms."""

    rows: np.ndarray  # [n] whose each is; a row may have several, in their order
    counts: np.ndarray  # [n] how many of the k are wanted
    own: torch.Tensor  # [n]
    top_ids: torch.Tensor  # [n, k]
    top: torch.Tensor  # [n, k]

    @classmethod
    def of(cls, raw: torch.Tensor, ids: torch.Tensor, rows: np.ndarray, counts: np.ndarray, k: int) -> "Logprobs":
        """raw: [n, vocab] fp32 logits; ids: [n] int64; rows, counts: [n], no count above ``k``."""
        logprobs = raw.log_softmax(-1)
        top, top_ids = logprobs.topk(min(k, raw.shape[1]))
        return cls(rows, counts, logprobs.gather(1, ids[:, None]).squeeze(1), top_ids, top)

    @classmethod
    def cat(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """One after the other; all of one ``k``."""
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.counts for part in parts]),
            torch.cat([part.own for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top for part in parts]),
        )

    def pinned(self) -> "Logprobs":
        """On the host once what is enqueued now is done."""
        tensors = (pinned_copy(x) for x in (self.own, self.top_ids, self.top))
        return Logprobs(self.rows, self.counts, *tensors)

    def by_row(self) -> dict[int, list[TokenLogprobs]]:
        """For the host's copy."""
        told: dict[int, list[TokenLogprobs]] = {}
        columns = (self.rows, self.counts, self.own, self.top_ids, self.top)
        for row, k, own, ids, top in zip(*(column.tolist() for column in columns), strict=True):
            told.setdefault(row, []).append(TokenLogprobs(own, ids[:k], top[:k]))
        return told
