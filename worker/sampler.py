"""Logits to ids, for all drawing rows of a step at once. Keeps no state: all that it needs is in the slot table.

Noise is a hash of (seed, choice, position of the drawn id, vocabulary id), so neither batch, chunking, preemption nor
replica can change what a request draws. An id is drawn by the Gumbel-max trick: the largest of logit / temperature -
log(E), with E exponential noise, falls on each id with its softmax probability.

Order of the steps: repetition, frequency and presence penalties, logit bias, no end before min_tokens, the grammar's
mask (which wins over the ban where it allows ends alone), temperature, top-k, top-p (of what top-k left), min-p. So
the filters choose among ids that are allowed. Log-probabilities are of the logits before all of this.
"""

from dataclasses import dataclass

import numpy as np
import torch

from paceline.worker.logprobs import Logprobs
from paceline.worker.masks import Masks
from paceline.worker.noise import log_exponential, row_keys
from paceline.worker.pinned import pinned_copy
from paceline.worker.table import BIAS, LOGPROBS, NO_EARLY_END, PENALTIES, RANDOM, SlotTable
from paceline.worker.top import argmax

_CANDIDATES = (256, 4096)  # top-p looks at so many of the largest logits before it looks at all
_PIECE = 1 << 16  # elements per pass over the whole vocabulary on a CPU: stays in its cache, twice as fast


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device, one entry a draw."""

    ids: torch.Tensor  # [draws] int64
    peaks: torch.Tensor  # [draws] largest raw logit; not finite where the row's logits are broken
    logprobs: Logprobs | None  # by draw, of those that asked

    def pinned(self) -> "Drawn":
        """On the host once what is enqueued now is done."""
        return Drawn(pinned_copy(self.ids), pinned_copy(self.peaks), self.logprobs and self.logprobs.pinned())


class Sampler:
    """``vocab_size``: ids that may be drawn; logits beyond it are padding of the embedding. ``eos_ids`` end a text."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = ()):
        self.vocab_size, self.eos_ids = vocab_size, eos_ids

    def __call__(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        table: SlotTable,
        masks: Masks | None = None,
    ) -> Drawn:
        """logits: [draws, >= vocab_size]; slots, positions: [draws], the position is where the drawn id will stand."""
        rows = table.slots[slots]
        needs = int(np.bitwise_or.reduce(rows["needs"]))  # of any row: what none needs is not even looked for
        raw = logits[:, : self.vocab_size].float()
        shaped = _shape(raw, rows, slots, positions, table) if needs & (PENALTIES | BIAS) else raw
        if needs & NO_EARLY_END and (early := np.flatnonzero(positions < rows["min_len"])).size:
            shaped = self._ban_ends(shaped, early, slots, table, masks)
        if masks is not None:
            shaped = masks.applied(shaped)
        ids = _draw(shaped, rows, positions) if needs & RANDOM else argmax(shaped)
        return Drawn(ids, raw.amax(-1), _logprobs(raw, ids, rows) if needs & LOGPROBS else None)

    def _ban_ends(
        self, logits: torch.Tensor, early: np.ndarray, slots: np.ndarray, table: SlotTable, masks: Masks | None
    ) -> torch.Tensor:
        """For the draws ``early``, unless a grammar has come to its end."""
        draws: list[int] = []
        ids: list[int] = []
        for draw in early.tolist():
            ends = [*self.eos_ids, *table.early_stop_ids.get(int(slots[draw]), ())]
            ends = [i for i in ends if 0 <= i < self.vocab_size]
            if masks is None or masks.leaves(draw, ends):
                draws += [draw] * len(ends)
                ids += ends
        where = _to(np.array([draws, ids], np.int64), logits)
        return logits.index_put((where[0], where[1]), logits.new_full((), -torch.inf))


def _logprobs(raw: torch.Tensor, ids: torch.Tensor, rows: np.ndarray) -> Logprobs:
    """Of the draws that asked."""
    wanted = np.flatnonzero(rows["needs"] & LOGPROBS)
    index, counts = _to(wanted, raw), rows["logprobs"][wanted]
    return Logprobs.of(raw[index], ids[index], wanted, counts, int(counts.max()))


def _shape(raw: torch.Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, table: SlotTable):
    """A copy of the logits, with penalties and bias."""
    which, biased = np.flatnonzero(rows["needs"] & PENALTIES), np.flatnonzero(rows["needs"] & BIAS)
    logits = raw.clone()
    if which.size:
        where = _to(which, raw)
        logits[where] = _penalize(raw[where], rows[which], slots[which], positions[which], table)
    for row in biased.tolist():
        bias = {i: value for i, value in table.logit_bias[int(slots[row])].items() if 0 <= i < raw.shape[1]}
        values = _to(np.array(list(bias.values()), np.float32), raw)
        logits[row].index_add_(0, _to(np.array(list(bias), np.int64), raw), values)
    return logits


def _penalize(logits, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, table: SlotTable) -> torch.Tensor:
    """logits: [rows, vocab]. Repetition (Keskar et al., 2019) counts all ids, the others generated ones."""
    longest = int(positions.max())
    ids = table.token_ids[_to(slots, logits), :longest].long()
    at = np.arange(longest)
    known = at < positions[:, None]
    generated = known & (at >= rows["num_prompt"][:, None])
    ids = ids.clamp_(max=logits.shape[1] - 1)
    seen = torch.zeros_like(logits).scatter_add_(1, ids, _to(known.astype(np.float32), logits)) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, ids, _to(generated.astype(np.float32), logits))
    repetition = _column(rows["repetition_penalty"], logits)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= counts * _column(rows["frequency_penalty"], logits)
    logits -= (counts > 0) * _column(rows["presence_penalty"], logits)
    return logits


def _draw(logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """[draws, vocab] -> [draws] int64."""
    random = rows["temperature"] > 0
    filtered = random & (_top_k(rows, logits.shape[1]) | (rows["top_p"] < 1))
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for which, draw in ((~random, None), (filtered, _draw_filtered), (random & ~filtered, _draw_unfiltered)):
        if which.any():
            index = _to(np.flatnonzero(which), logits)
            own = logits if which.all() else logits[index]
            ids[index] = argmax(own) if draw is None else draw(own, rows[which], positions[which])
    return ids


def _scale(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """(logits - largest) / temperature: the largest is 0, so no temperature, however small, makes a nan."""
    return (logits - logits.amax(-1, keepdim=True)) / _column(rows["temperature"], logits)


def _draw_unfiltered(logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """Over the whole vocabulary, with min-p at most."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    step = max(1, _PIECE // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    drawn = []
    for start in range(0, len(rows), step):
        own = slice(start, start + step)
        scores = _scale(logits[own], rows[own])
        if rows["min_p"][own].any():
            scores.masked_fill_(scores < _column(rows["min_p"][own], logits).log(), -torch.inf)
        scores -= log_exponential(*_keys(rows[own], positions[own], logits), ids)
        drawn.append(argmax(scores))
    return torch.cat(drawn)


def _draw_filtered(logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """Among the largest logits; a row whose kept set may reach beyond them is tried again with more, in the end all."""
    scaled = _scale(logits, rows)
    total = scaled.exp().sum(-1, keepdim=True)  # [rows, 1]
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    left = np.arange(len(rows))
    for size in (*(size for size in _CANDIDATES if size < logits.shape[1]), logits.shape[1]):
        index = _to(left, logits)
        values, candidates = scaled[index].topk(size)
        keep, enough = _kept(values, total[index], rows[left], size == logits.shape[1])
        scores = values - log_exponential(*_keys(rows[left], positions[left], logits), candidates.int())
        best = scores.masked_fill_(~keep, -torch.inf).argmax(-1, keepdim=True)
        ids[index] = candidates.gather(1, best).squeeze(1)
        left = left[~enough.cpu().numpy()]
        if not left.size:
            break
    return ids


def _kept(values: torch.Tensor, total: torch.Tensor, rows: np.ndarray, is_all: bool):
    """Which of the sorted candidates [rows, size] the filters keep, and [rows] whether no other id could be kept."""
    size = values.shape[1]
    limited = _top_k(rows, size + 1)  # rows whose top-k lies inside the candidates
    top_k = _column(np.where(limited, rows["top_k"], size), values)
    inside = torch.arange(size, device=values.device) < top_k
    weights = values.exp() * inside
    total = torch.where(_to(limited, values)[:, None], weights.sum(-1, keepdim=True), total)
    mass = weights.cumsum(-1) / total
    top_p = _column(rows["top_p"], values)
    before = mass - weights / total
    keep = inside & ((before < top_p) | (top_p >= 1)) & (values >= _column(rows["min_p"], values).log())
    keep[:, 0] = True
    enough = _to(limited, values) | ((mass[:, -1:] >= top_p) & (top_p < 1)).squeeze(1)
    # A wider top-k than the candidates changes what top-p is a share of: only the next round can tell.
    enough &= _to(limited | (rows["top_k"] <= 0), values)
    return keep, torch.ones_like(enough) if is_all else enough


def _top_k(rows: np.ndarray, vocab_size: int) -> np.ndarray:
    """Rows whose top-k leaves anything out."""
    return (rows["top_k"] > 0) & (rows["top_k"] < vocab_size)


def _keys(rows: np.ndarray, positions: np.ndarray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = row_keys(rows["seed"], rows["choice"], positions)
    return _to(first, like)[:, None], _to(second, like)[:, None]


def _to(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, non_blocking=True)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return _to(values, like)[:, None]
