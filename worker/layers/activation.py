"""Element by element: activations by the names that configs give them, gates, and soft caps."""

from collections.abc import Callable

import torch
from torch.nn import functional

from paceline.proto.errors import StartupError
from paceline.worker.kernels import elements

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


def gated(name: str) -> Activation:
    """The function of [tokens, gate and up] that gives activation(gate) * up. Raises as `activation`."""
    activate, kernel = activation(name), elements.GATES.get(name)

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        if kernel is not None and elements.takes(gate_up, gate_up.dtype):
            return elements.gate(gate_up, kernel)
        gate, up = gate_up.chunk(2, -1)
        return activate(gate) * up

    return apply


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Near x where that is small, and never beyond ±cap (Bello et al., 2016, arXiv:1611.09940). In place."""
    return x.div_(cap).tanh_().mul_(cap)
