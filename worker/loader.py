"""Fills one rank's share of a model from a checkpoint, tensor by tensor. Knows names and shapes, not file formats.

Memory for a weight is taken when its first part arrives, and a module is packed as soon as it is whole: at no time is a
second copy of the model held. Of each tensor only this rank's rows and columns are read. A missing, surplus or
misshapen tensor is refused before anything is read, also one that only other ranks need.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Checkpoint
from paceline.worker.layers.embedding import Head
from paceline.worker.layers.linear import FusedLinear, Linear, can_pack, packed_bytes
from paceline.worker.models.decoder import CausalLM
from paceline.worker.quant.formats import find
from paceline.worker.shards import Part

_SHOWN = 3  # tensors that one error names


@dataclass(frozen=True, slots=True)
class Target:
    """Where (part of) a tensor of the file goes: a module's parameter, whole or some of its rows."""

    module: nn.Module
    module_name: str
    parameter: str  # "weight" or "bias"
    rows: slice | tuple[int | slice, ...] | None
    held: tuple[Part, ...]  # of each dimension of the file's tensor

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(part.whole for part in self.held)

    def read(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        rows, *columns = (None if part.is_all else part.slice for part in self.held)
        return checkpoint.get(name, rows, *columns)


def load_weights(model: CausalLM, checkpoint: Checkpoint, device: torch.device) -> int:
    """Fills ``model``, which was built on the meta device, and packs it. Returns the bytes its weights take.

    Raises StartupError, in one sentence, naming up to three tensors that are missing, unknown or of the wrong shape.
    """
    check_tensors(model, checkpoint)
    targets = targets_of(model, checkpoint)
    names = [name for name in checkpoint.names() if name in targets]
    waiting = Counter(target.module_name for target in targets.values())
    for name in names:
        target = targets[name]
        _fill(target, target.read(checkpoint, name), device)
        waiting[target.module_name] -= 1
        if not waiting[target.module_name]:
            _pack(target.module)
    head = _head(model)
    if head is not None and head.is_tied:  # has no tensor of its own, and the embedding is there now
        head.pack()
    return weight_bytes(model)


def check_tensors(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Raises StartupError unless the files hold the whole model that ``model`` is a share of, and nothing else."""
    whole = model if model.place.num_ranks == 1 else type(model)(model.spec, torch.float32)
    names = [name for name in checkpoint.names() if not _ignorable(name, model)]
    _refuse(targets_of(whole, checkpoint), names, checkpoint)


def targets_of(model: CausalLM, checkpoint: Checkpoint) -> dict[str, Target]:
    """By the model itself where its modules are not this house's (the fallback): what their parts are called in the
    files depends on what is there."""
    own = getattr(model, "find_targets", None)
    return find_targets(model) if own is None else own(checkpoint.names())


def find_targets(model: CausalLM) -> dict[str, Target]:
    """Every tensor name that the file must have for this share of the model, and where it goes."""
    targets = {}
    for module_name, module in model.named_modules():
        stem, _, leaf = module_name.rpartition(".")
        held = getattr(module, "held", {})
        for parameter, values in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear):
                rest = tuple(Part.all(size) for size in values.shape[1:])
                for index, source in enumerate(model.packed.get(leaf, (leaf,))):
                    name = f"{stem}.{source}.{parameter}"
                    parts = (module.parts[index], *rest)
                    targets[name] = Target(module, module_name, parameter, module.rows_of(index), parts)
                continue
            name = f"{module_name}.{parameter}"
            if model.spec.tie_embeddings and isinstance(module, Head):
                name = "model.embed_tokens.weight"
            parts = held.get(parameter) or tuple(Part.all(size) for size in values.shape)
            targets[name] = Target(module, module_name, parameter, None, parts)
    return targets


def narrow_layers(model: CausalLM, kinds: Mapping[str, str], quantization: str | None, device: torch.device) -> None:
    """Gives every linear and the head the format that ``quantization`` names, before weights are loaded. ``kinds``:
    ggml's types of the tensors that are quantized in the files.

    Raises StartupError for a format that is not known, or that a layer cannot have.
    """
    if quantization is None:
        return
    if model.spec.config:
        raise StartupError(
            f"--quantization {quantization} goes with the families of docs/models.md, and this architecture runs "
            "through transformers; without the flag it would start."
        )
    own_tensors: dict[nn.Module, list[str]] = {}
    for name, target in find_targets(model).items():
        if target.parameter == "weight":
            own_tensors.setdefault(target.module, []).append(kinds.get(name, ""))
    head = _head(model)
    if head is not None and head.is_tied:
        own_tensors[head] = [kinds.get("model.embed_tokens.weight", "")]
    for module, found in own_tensors.items():
        if isinstance(module, Linear | Head):
            format = find(quantization, found)
            weight = module.rows if isinstance(module, Head) else module.weight
            if reason := format.why_not(device, module.dtype, weight.shape[1]):
                raise StartupError(
                    f"--quantization {quantization} cannot be had here: {reason}; without the flag it would start."
                )
            module.narrow_to(format)


def weight_bytes(model: CausalLM, device: torch.device | None = None) -> int:
    """Bytes of parameters and of packed weights: those of ``model`` as it is or, given a device and a model on the meta
    device, as they will be there."""
    products = [module for module in model.modules() if isinstance(module, Linear | Head)]
    total = sum(parameter.nbytes for parameter in model.parameters())
    if device is None:
        return total + sum(module.packed.nbytes for module in products if module.packed is not None)
    for module in products:
        weight = module.rows if isinstance(module, Head) else module.weight
        packed = packed_bytes(weight, device, module.dtype, module.format)
        if not isinstance(module, Head):
            total += packed - weight.nbytes
        elif module.format is not None:
            total += packed if module.is_tied else packed - weight.nbytes
        elif can_pack(weight, device, module.dtype):  # plain rows stay beside packed ones
            total += packed
    return total


def _head(model: CausalLM) -> Head | None:
    return getattr(model, "lm_head", None)


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
        f"{name} is {list(checkpoint.shape(name))} and should be {list(targets[name].file_shape)}"
        for name in names
        if tuple(checkpoint.shape(name)) != targets[name].file_shape
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
