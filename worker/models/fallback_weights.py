"""Which tensor of a file becomes which part of which parameter, where transformers names and packs them its own way.

A file may hold every expert's matrices by themselves where a module has them stacked, gate above up. Each goes straight
to its place: no second copy is made. Knows names and shapes; the renaming rules are transformers' (fallback.py).
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Checkpoint
from paceline.worker.loader import Target
from paceline.worker.models.fallback_shards import Cut
from paceline.worker.shards import Part


@dataclass(frozen=True, slots=True)
class Source:
    """What one tensor of a file is: the parameter ``key``, or one entry of its first dimension (``index``), or of that
    the ``block``-th of ``num_blocks`` along the parameter's dimension ``block_dim``."""

    key: str
    index: int | None = None
    block: int = 0
    num_blocks: int = 1
    block_dim: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A parameter or saved buffer of the model: who has it, and its shape before it was cut."""

    module: nn.Module
    module_name: str
    leaf: str
    shape: tuple[int, ...]

    @property
    def values(self) -> torch.Tensor:
        return getattr(self.module, self.leaf)


@dataclass(frozen=True, slots=True)
class CutTarget(Target):
    """Of the file's tensor this rank takes ``ranges`` along ``dim``, or, without any, all."""

    dim: int = 0
    ranges: tuple[slice, ...] = ()

    def read(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        if len(self.ranges) == 1 and self.dim < 2:
            [own] = self.ranges
            return checkpoint.get(name, own) if self.dim == 0 else checkpoint.get(name, None, own)
        values = checkpoint.get(name)
        if not self.ranges:
            return values
        parts = [values.narrow(self.dim, part.start, part.stop - part.start) for part in self.ranges]
        return torch.cat(parts, self.dim)


def holders_of(model: nn.Module) -> tuple[dict[str, Holder], dict[str, str]]:
    """By name in the whole model, and for parameters that are another's: name -> that one's name."""
    holders: dict[str, Holder] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for module_name, module in model.named_modules():
        saved = {leaf: b for leaf, b in module._buffers.items() if leaf not in module._non_persistent_buffers_set}
        for leaf, values in (*module._parameters.items(), *saved.items()):
            if values is None:
                continue
            key = f"{module_name}.{leaf}" if module_name else leaf
            if id(values) in first:
                tied[key] = first[id(values)]
            first.setdefault(id(values), key)
            holders[key] = Holder(module, module_name, leaf, tuple(values.shape))
    return holders, tied


def targets_of(
    sources: dict[str, Source],
    holders: dict[str, Holder],
    tied: dict[str, str],
    cuts: dict[str, Cut],
) -> dict[str, Target]:
    """By name in the file. A parameter for which the files hold nothing is there under its own name, so that it is
    missed. Raises StartupError for a stack that is not whole."""
    targets: dict[str, Target] = {}
    filled: Counter[str] = Counter()
    expected: dict[str, int] = {}
    for name, source in sources.items():
        if source.key in tied:  # stored all the same
            source = Source(tied[source.key])
        else:
            filled[source.key] += 1
        holder = holders[source.key]
        expected[source.key] = (1 if source.index is None else holder.shape[0]) * source.num_blocks
        if getattr(holder.module, holder.leaf) is not None:  # else a bias that another rank adds
            targets[name] = _target(source, holder, cuts.get(source.key))
    for key, holder in holders.items():
        if key not in filled and key not in tied:
            targets[key] = _target(Source(key), holder, None)
    for key, num in filled.items():
        if num != expected[key]:
            raise StartupError(f"The model's files hold {num} of the {expected[key]} tensors that make up {key}.")
    return targets


def _target(source: Source, holder: Holder, cut: Cut | None) -> Target:
    """Dimensions count as the parameter's; the file's tensor lacks the first where it is one entry of a stack."""
    lacks = 0 if source.index is None else 1
    shape = list(holder.shape[lacks:])
    where: tuple[int | slice, ...] = () if source.index is None else (source.index,)
    if source.num_blocks > 1:
        dim = source.block_dim - lacks
        shape[dim] //= source.num_blocks
        own = holder.values.shape[source.block_dim] // source.num_blocks
        where += (*(slice(None),) * dim, slice(source.block * own, (source.block + 1) * own))
    dim, ranges = 0, tuple[slice, ...]()
    if cut is not None:
        dim = cut.dim - lacks
        shares = cut.num_blocks // source.num_blocks if source.block_dim == cut.dim else cut.num_blocks
        ranges = cut.ranges(shape[dim], shares)
    held = tuple(Part.all(size) for size in shape)
    return CutTarget(holder.module, holder.module_name, holder.leaf, where or None, held, dim, ranges)
