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
    "cpu": ("paceline.worker.attention.cpu", "CpuAttention"),
    "torch": ("paceline.worker.attention.torch", "TorchAttention"),
}


class AttentionBackend(Protocol):
    """Grouped-query attention over the paged cache. Stateless between steps.

    ``prepare`` runs once a step for each group of layers that share a block table and a window (kv_groups.py), and does
    all that does not depend on the layer; ``forward`` runs once a layer. Both run on the rank's only torch thread.
    """

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None where it can run, else the reason as half a sentence."""

    def prepare(self, batch: Batch, block_size: int, group: int = 0, window: int = 0) -> Any:
        """Of ``batch.blocks[group]`` and ``batch.write_to[group]``. ``window``: tokens that a query of this group sees,
        itself included; 0: all. Entries of the table before a row's window mean nothing and must not be read."""

    def forward(
        self,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        keys: torch.Tensor,  # [blocks, block_size, num_kv_heads, head_dim], this layer's; a block's inside is its own
        values: torch.Tensor,  # as keys
        metadata: Any,
        *,
        scale: float,
        window: int = 0,  # the group's, as in prepare
        softcap: float = 0.0,  # scores become softcap * tanh(scores / softcap); 0: they stay
        sinks: torch.Tensor | None = None,  # [num_heads], a score per head that takes part in the softmax only
    ) -> torch.Tensor:  # [tokens, num_heads * head_dim]
        """Writes k and v into the cache, all of them before any read, and attends."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention of one step as layers see it: they name themselves and hand over q, k, v.

    ``layer`` counts from this stage's first; where its keys and values lie, and whose table it reads, the cache knows.
    """

    backend: AttentionBackend
    cache: KVCache
    metadata: dict[int, Any]  # by group

    @classmethod
    def of(cls, backend: AttentionBackend, cache: KVCache, batch: Batch) -> "StepAttention":
        """Prepares the step for every group that has layers on this stage."""
        prepare, block_size = backend.prepare, cache.block_size
        return cls(backend, cache, {g: prepare(batch, block_size, g, window) for g, window in cache.windows.items()})

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes and arguments are those of ``AttentionBackend.forward``."""
        group, pair = self.cache.locations[layer]
        assert window == self.cache.windows[group], f"layer {layer} has another window than the model's spec says"
        keys, values = self.cache.keys[pair], self.cache.values[pair]
        return self.backend.forward(
            q, k, v, keys, values, self.metadata[group], scale=scale, window=window, softcap=softcap, sinks=sinks
        )


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
