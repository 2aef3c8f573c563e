"""Fills a model from a checkpoint, tensor by tensor. Knows names and shapes, not file formats.

Memory for a weight is taken when its first part arrives, and a module is packed as soon as it is whole: at no time is a
second copy of the model held. A missing, surplus or misshapen tensor is refused before anything is read.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Checkpoint
from paceline.worker.layers.linear import FusedLinear
from paceline.worker.models.decoder import CausalLM

_SHOWN = 3  # tensors that one error names


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the file goes: a module's parameter, whole or some of its rows."""

    module: nn.Module
    module_name: str
    parameter: str  # "weight" or "bias"
    rows: slice | None

    @property
    def shape(self) -> tuple[int, ...]:
        whole = getattr(self.module, self.parameter).shape
        return tuple(whole) if self.rows is None else (self.rows.stop - self.rows.start, *whole[1:])


def load_weights(model: CausalLM, checkpoint: Checkpoint, device: torch.device) -> int:
    """Fills ``model``, which was built on the meta device, and packs it. Returns the bytes its weights take.

    Raises StartupError, in one sentence, naming up to three tensors that are missing, unknown or of the wrong shape.
    """
    targets = find_targets(model)
    names = [name for name in checkpoint.names() if not _ignorable(name, model)]
    _refuse(targets, names, checkpoint)
    waiting = Counter(target.module_name for target in targets.values())
    for name in names:
        target = targets[name]
        _fill(target, checkpoint.get(name), device)
        waiting[target.module_name] -= 1
        if not waiting[target.module_name]:
            _pack(target.module)
    if model.spec.tie_embeddings:  # has no tensor of its own, and the embedding is there now
        _pack(model.lm_head)
    return weight_bytes(model)


def find_targets(model: CausalLM) -> dict[str, Target]:
    """Every tensor name that the file must have, and where it goes."""
    targets = {}
    for module_name, module in model.named_modules():
        stem, _, leaf = module_name.rpartition(".")
        for parameter, _ in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear) and leaf in model.packed:
                for part, source in enumerate(model.packed[leaf]):
                    name = f"{stem}.{source}.{parameter}"
                    targets[name] = Target(module, module_name, parameter, module.rows_of(part))
            else:
                targets[f"{module_name}.{parameter}"] = Target(module, module_name, parameter, None)
    return targets


def weight_bytes(model: CausalLM) -> int:
    """Bytes of parameters and of packed weights."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        packed = getattr(module, "packed", None)
        if isinstance(packed, torch.Tensor):
            total += packed.numel() * packed.element_size()
    return total


def _ignorable(name: str, model: CausalLM) -> bool:
    tied_head = model.spec.tie_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _refuse(targets: dict[str, Target], names: list[str], checkpoint: Checkpoint) -> None:
    missing = sorted(targets.keys() - set(names))
    if missing:
        raise StartupError(f"The model's files lack {_list(missing)}.")
    surplus = [name for name in names if name not in targets]
    if surplus:
        raise StartupError(f"The model's files hold {_list(surplus)}, which this architecture does not have.")
    wrong = [
        f"{name} is {list(checkpoint.shape(name))} and should be {list(targets[name].shape)}"
        for name in names
        if tuple(checkpoint.shape(name)) != targets[name].shape
    ]
    if wrong:
        raise StartupError(f"The model's tensors do not fit its config: {_list(wrong, '')}.")


def _list(names: list[str], noun: str = "tensor") -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}" if noun else f"{shown}{more}"


def _fill(target: Target, tensor: torch.Tensor, device: torch.device) -> None:
    """In the dtype that the parameter was declared with."""
    parameter = getattr(target.module, target.parameter)
    if parameter.is_meta:
        if target.rows is None:
            filled = tensor.to(device=device, dtype=parameter.dtype)
            setattr(target.module, target.parameter, nn.Parameter(filled, requires_grad=False))
            return
        parameter = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False
        )
        setattr(target.module, target.parameter, parameter)
    where = parameter if target.rows is None else parameter[target.rows]
    where.copy_(tensor)


def _pack(module: nn.Module) -> None:
    pack = getattr(module, "pack", None)
    if pack is not None:
        pack()
