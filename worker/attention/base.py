"""What an attention backend is, and how one is chosen by name. Holds no kernel.

A backend is imported when it is chosen, because kernels may be missing. Each says itself why it cannot run here.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from paceline.proto.errors import StartupError
from paceline.worker.batch import Batch
from paceline.worker.kv_cache import KVCache

# name -> module and class. Order is the preference of `auto`.
BACKENDS = {
    "torch": ("paceline.worker.attention.torch", "TorchAttention"),
}


class AttentionBackend(Protocol):
    """Grouped-query attention over the paged cache. Stateless between steps.

    ``prepare`` runs once a step and does all that does not depend on the layer; ``forward`` runs once a layer. Both run
    on the rank's only torch thread.
    """

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None where it can run, else the reason as half a sentence."""

    def prepare(self, batch: Batch, block_size: int) -> Any: ...

    def forward(
        self,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        keys: torch.Tensor,  # [blocks, block_size, num_kv_heads, head_dim], this layer's
        values: torch.Tensor,  # as keys
        metadata: Any,
        *,
        scale: float,
    ) -> torch.Tensor:  # [tokens, num_heads * head_dim]
        """Writes k and v into the cache, all of them before any read, and attends. Window and soft cap will be
        further keywords."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention of one step as layers see it: they name themselves and hand over q, k, v."""

    backend: AttentionBackend
    cache: KVCache
    metadata: Any

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return self.backend.forward(q, k, v, keys, values, self.metadata, scale=scale)


def select(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The backend called ``name``, or for "auto" the first that can run here. Raises StartupError with the reasons."""
    reasons = {}
    usable = []
    for candidate in BACKENDS:
        reason = _why_not(candidate, device, dtype, head_dim)
        if reason is None:
            usable.append(candidate)
            if name in ("auto", candidate):
                return _load(candidate)()
        reasons[candidate] = reason
    works = f"would work here: {', '.join(usable)}" if usable else "and no other backend runs here"
    if name == "auto":
        told = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
        raise StartupError(f"--attention-backend auto finds no backend for {device.type}: {told}.")
    if name not in BACKENDS:
        raise StartupError(f"--attention-backend {name} is not known; {works}.")
    raise StartupError(f"--attention-backend {name} cannot run here: {reasons[name]}; {works}.")


def _load(name: str) -> Any:
    module, attribute = BACKENDS[name]
    return getattr(import_module(module), attribute)


def _why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    try:
        return _load(name).why_not(device, dtype, head_dim)
    except ImportError as error:
        return f"its module cannot be imported ({error})"
