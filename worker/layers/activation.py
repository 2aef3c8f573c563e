"""Element by element: activations by the names that configs give them, and soft caps."""

from collections.abc import Callable

import torch
from torch.nn import functional

from paceline.proto.errors import StartupError

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": functional.relu,
}


def activation(name: str) -> Activation:
    """Raises StartupError for a name that is not known."""
    if name not in ACTIVATIONS:
        raise StartupError(f"The activation {name!r} is not known; known are: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Near x where that is small, and never beyond ±cap (Bello et al., 2016, arXiv:1611.09940). In place."""
    return x.div_(cap).tanh_().mul_(cap)
