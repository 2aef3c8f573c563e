"""Who holds what: a model's heads, MLP columns, vocabulary and layers shared out over the ranks of a gang.

Numbers only: no torch, no tensors. Nothing needs to divide evenly. A rank's share of each thing is one range.

    9 query heads, 3 KV heads      tp 2: 6 + 3, KV 2 + 1        tp 3: 3 + 3 + 3, KV 1 + 1 + 1
    4 query heads, 2 KV heads      tp 3: 1 + 1 + 2, where the first two ranks hold the same KV head
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.proto.errors import StartupError
from paceline.worker.models.spec import ModelSpec

UNIT = 64  # columns: products of such multiples run in whole vectors and tiles
PLENTY = 16  # units a rank: with so many, one more or less matters little


class Part(NamedTuple):
    """Entries [start, start + size) of ``whole``."""

    start: int
    size: int
    whole: int

    @classmethod
    def all(cls, whole: int) -> "Part":
        return cls(0, whole, whole)

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_all(self) -> bool:
        return self.size == self.whole

    def times(self, factor: int) -> "Part":
        """The same range where each entry is ``factor`` long."""
        return Part(self.start * factor, self.size * factor, self.whole * factor)


@dataclass(frozen=True, slots=True)
class Shards:
    """The whole table: one `Part` per tensor rank, and per stage for ``layers``."""

    heads: tuple[Part, ...]
    kv_heads: tuple[Part, ...]
    mlp: tuple[Part, ...]
    vocab: tuple[Part, ...]
    layers: tuple[Part, ...]

    @classmethod
    def of(cls, spec: ModelSpec, tp: int = 1, pp: int = 1) -> "Shards":
        """Raises StartupError, with the sizes that work, where a rank would be left with nothing."""
        most = min(spec.num_heads, spec.intermediate_size, spec.vocab_size)
        if not 1 <= tp <= most:
            raise StartupError(
                f"--tensor-parallel-size {tp} does not fit a model of {spec.num_heads} heads; 1 to {most} work."
            )
        if not 1 <= pp <= spec.num_layers:
            raise StartupError(
                f"--pipeline-parallel-size {pp} does not fit a model of {spec.num_layers} layers; "
                f"1 to {spec.num_layers} work."
            )
        heads, kv_heads = _heads(spec.num_heads, spec.num_kv_heads, tp)
        return cls(
            heads, kv_heads, _columns(spec.intermediate_size, tp), _columns(spec.vocab_size, tp), _layers(spec, pp)
        )

    def of_rank(self, tp_rank: int = 0, pp_rank: int = 0) -> "Shard":
        return Shard(
            heads=self.heads[tp_rank],
            kv_heads=self.kv_heads[tp_rank],
            mlp=self.mlp[tp_rank],
            vocab=self.vocab[tp_rank],
            vocab_sizes=tuple(part.size for part in self.vocab),
            layers=self.layers[pp_rank],
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's row of the table, and how many ids each tensor rank of its stage has logits for."""

    heads: Part
    kv_heads: Part
    mlp: Part
    vocab: Part
    vocab_sizes: tuple[int, ...]
    layers: Part


def _heads(num_heads: int, num_kv_heads: int, tp: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Whole KV groups for each rank, or, with more ranks than KV heads, a part of one group."""
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv_heads = _ranges(_even(num_kv_heads, tp))
        return tuple(part.times(group) for part in kv_heads), kv_heads
    heads, kv_heads = [], ()
    for kv_head, ranks in enumerate(_even(tp, num_kv_heads)):
        heads += _even(group, ranks)
        kv_heads += (Part(kv_head, 1, num_kv_heads),) * ranks
    return _ranges(heads), kv_heads


def _columns(num: int, tp: int) -> tuple[Part, ...]:
    """In multiples of a unit, as large as leaves the ranks about equal. The last ranks get more: the first have the
    larger share of heads."""
    unit = UNIT
    while unit > 1 and (num % unit or (num // unit % tp and num // unit < PLENTY * tp)):
        unit //= 2
    return tuple(part.times(unit) for part in _ranges(reversed(_even(num // unit, tp))))


def _layers(spec: ModelSpec, pp: int) -> tuple[Part, ...]:
    """One more goes first to the stages in the middle, then to the first, whose embedding takes memory but hardly time,
    and never to the last: it has norm, head and sampling to do."""
    each, left = divmod(spec.num_layers, pp)
    order = (*range(1, pp - 1), 0)
    more = set(order[:left])
    return _ranges(each + (stage in more) for stage in range(pp))


def _even(num: int, shares: int) -> list[int]:
    """Sizes that differ by one at most, larger ones first."""
    each, left = divmod(num, shares)
    return [each + (share < left) for share in range(shares)]


def _ranges(sizes: Iterable[int]) -> tuple[Part, ...]:
    sizes = list(sizes)
    ends = list(accumulate(sizes))
    return tuple(Part(end - size, size, ends[-1]) for end, size in zip(ends, sizes, strict=True))
