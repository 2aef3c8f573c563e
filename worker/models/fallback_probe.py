"""What layers ask of attention, learned from one run on the meta device, and whether the paged cache can serve it.

Nothing is computed there, so that a model of any size runs in an instant. Knows torch and shapes only: whose layers
they are, and how they call, is fallback.py's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NUM_TOKENS = 16  # of the run

# What may come with a call: what is served, and what does not change which tokens a query sees, or how much of each.
# Anything else would be dropped in silence, so it is refused.
SERVED = ("scaling", "sliding_window", "softcap", "s_aux", "is_causal")
HARMLESS = ("dropout", "position_ids", "position_embeddings", "return_dict", "logits_to_keep")


class Unserved(Exception):
    """Half a sentence: what the model does that cannot be served."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One layer's call."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens a query sees, itself included; 0: all


class Recorder:
    """Stands where a `StepAttention` will."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not q.shape[2] == k.shape[2] == v.shape[2] or k.shape != v.shape:
            raise Unserved(f"the values of its layer {layer} are not shaped like its keys")
        if len(q) != len(k):
            raise Unserved(f"its layer {layer} looks at {len(k)} entries where there are {len(q)} tokens")
        self.asked.append(Asked(layer, q.shape[1], k.shape[1], q.shape[2], window))
        return q.flatten(1)


def own_values(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Attention in which every token sees itself alone, without a cache. Arguments as `Recorder`'s."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).flatten(1)


def check_call(layer: int, arguments: dict[str, Any], sees: Callable[[int, int], bool] | None, window: int) -> None:
    """``sees(query, key)`` is the layer's own mask over positions, None where it has none. Raises `Unserved` unless
    that is the plain causal one, or a plain window, and nothing else was asked for."""
    given = (name for name, value in arguments.items() if value is not None and value is not False)
    others = sorted(set(given).difference(SERVED, HARMLESS))
    if others:
        raise Unserved(f"its layer {layer} asks attention for {', '.join(others)}")
    if arguments.get("is_causal") is False:
        raise Unserved(f"its layer {layer} looks ahead")
    if sees is None:
        return
    far = 2 * window if window else 1 << 20
    seen = [(0, 0), (far, far), (far, far - window + 1 if window else 0)]
    hidden = [(0, 1), (far, far + 1), *([(far, far - window)] if window else [])]
    if not all(sees(*pair) for pair in seen) or any(sees(*pair) for pair in hidden):
        raise Unserved(f"its layer {layer} has a mask of its own, neither causal nor a window of the last tokens")


def check_layers(asked: list[Asked], num_layers: int) -> Asked:
    """One call of each layer, all of one shape. Returns the first."""
    silent = sorted(set(range(num_layers)) - {call.layer for call in asked})
    if silent:
        shown = ", ".join(map(str, silent[:4])) + (", ..." if len(silent) > 4 else "")
        raise Unserved(f"layers {shown} of {num_layers} call no attention function (state-space, linear or their own)")
    if len(asked) != num_layers:
        raise Unserved(f"its {num_layers} layers call attention {len(asked)} times")
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in asked}
    if len(shapes) > 1:
        raise Unserved("its layers differ in heads or their size")
    return asked[0]
