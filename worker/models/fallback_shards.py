"""A tensor rank's share of a model that was built whole, by transformers' own plan of what may be cut and how.

The plan maps names of modules and parameters, layer numbers as *, to styles. Every cut is even, as transformers means
it: half of the rows of a projection is half of its heads. What a plan gathers again within a layer stays whole on every
rank, which is the same result; so does the embedding. Knows torch and names only.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.parallel import Groups, Place

WHOLE = (
    *("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"),
    *("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"),
)
SUMMED = ("rowwise", "moe_tp_experts", "all_reduce")
# style -> (dimension from the end that is cut, blocks along it that are cut alike)
CUTS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1)}


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a parameter, each of ``num_blocks`` equal blocks along ``dim`` is shared out evenly over ``tp`` ranks."""

    dim: int
    num_blocks: int
    tp: int
    rank: int

    def ranges(self, size: int, num_blocks: int | None = None) -> tuple[slice, ...]:
        """This rank's, of ``size`` entries in so many blocks."""
        num_blocks = num_blocks or self.num_blocks
        block, own = size // num_blocks, size // num_blocks // self.tp
        starts = [i * block + self.rank * own for i in range(num_blocks)]
        return tuple(slice(start, start + own) for start in starts)


def cut_model(model: nn.Module, plan: dict[str, str], groups: Groups, name: str) -> dict[str, Cut]:
    """Shrinks the parameters of ``model``, which has no weights yet, and adds the sums between ranks.

    ``name`` is the model's, for messages. Returns the cuts by parameter. Raises StartupError where the plan asks for
    what is not known here, or sizes do not divide.
    """
    place, cuts = groups.place, {}
    for module_name, module in model.named_modules():
        style = plan.get(_starred(module_name))
        if style is not None and style not in (*WHOLE, *SUMMED, *CUTS):
            raise no_ranks(place, name, f"its plan has the style {style!r} for {module_name}")
        own = dict(module.named_parameters(recurse=False))
        for leaf, parameter in own.items():
            full = f"{module_name}.{leaf}"
            cut = _cut_of(style, plan.get(_starred(full)), leaf, parameter, place)
            if cut is None:
                continue
            if parameter.shape[cut.dim] % (cut.num_blocks * place.tp) or not _is_plain(module):
                raise no_ranks(place, name, f"{full} has the shape {list(parameter.shape)}")
            cuts[full] = cut
            _shrink(module, leaf, cut)
        if style in SUMMED:
            if "bias" in own and place.tp_rank:
                module.bias = None  # added once, by the first rank
            module.register_forward_hook(_summing(groups))
    return cuts


def cut_rows(module: nn.Linear, place: Place) -> Cut:
    """Cuts the outputs of one linear without a bias."""
    cut = Cut(0, 1, place.tp, place.tp_rank)
    _shrink(module, "weight", cut)
    return cut


def _cut_of(style: str | None, own: str | None, leaf: str, parameter: nn.Parameter, place: Place) -> Cut | None:
    """By the parameter's own entry in the plan, else by its module's."""
    found = own or style
    if found not in CUTS or (found == "rowwise" and leaf == "bias"):
        return None
    dim, num_blocks = CUTS[found]
    return Cut(max(0, parameter.ndim + dim), num_blocks, place.tp, place.tp_rank)


def _is_plain(module: nn.Module) -> bool:
    """Experts may hold gate and up rows in turn, or inputs before outputs, and a half is then another half."""
    return getattr(module, "is_concatenated", True) and not getattr(module, "is_transposed", False)


def _shrink(module: nn.Module, leaf: str, cut: Cut) -> None:
    parameter = getattr(module, leaf)
    shape = list(parameter.shape)
    shape[cut.dim] //= cut.tp
    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
    setattr(module, leaf, nn.Parameter(empty, requires_grad=False))


def _summing(groups: Groups):
    def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output if output.is_meta else groups.sum(output)

    return hook


def _starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def no_ranks(place: Place, name: str, reason: str) -> StartupError:
    """``reason``: a clause."""
    return StartupError(
        f"--tensor-parallel-size {place.tp} cannot be had for {name}, which runs through transformers: {reason}; "
        "1 works."
    )
