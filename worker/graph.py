"""A model's layers as one list of kernel calls, made at the first step and run whole in every other: to a CPU what a
CUDA graph is to a GPU.

Between calls Python and torch take some microseconds, in which the other threads fall asleep and have to be woken: of a
step of one token that was a third. Layers that do what no kernel of ours does, or that wait for other ranks, run call
by call as they are written.
"""

import logging
from dataclasses import dataclass

import torch

from paceline.worker.attention.base import StepAttention
from paceline.worker.kernels import native
from paceline.worker.kernels.program import NotOurs, Program
from paceline.worker.layers.rotary import Turn, Turns
from paceline.worker.models.decoder import CausalLM, Decoder
from paceline.worker.parallel import Groups

log = logging.getLogger("paceline.worker")


def layers_of(model: CausalLM, num_tokens: int, device: torch.device, groups: Groups) -> "CausalLM | LayersGraph":
    """What a runner calls. ``num_tokens``: the most of a step."""
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, Decoder) or device.type != "cpu" or groups.place.tp > 1 or native.library() is None:
        return model
    return LayersGraph(decoder, num_tokens)


@dataclass(frozen=True, slots=True)
class _Captured:
    program: Program
    x: torch.Tensor
    turns: Turns


class LayersGraph:
    """Called as the model is. One thread's: what comes out is overwritten by the next call."""

    def __init__(self, decoder: Decoder, num_tokens: int):
        self._decoder, self._num_tokens = decoder, num_tokens
        self._captured: _Captured | None = None
        self._is_tried = False

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        """x: fp32 [tokens, hidden]; positions: [tokens]. Returns fp32 [tokens, hidden]."""
        turns = self._decoder.rotary(positions)
        if not self._is_tried:
            self._is_tried = True
            self._capture(x, turns, attn)
        num_tokens, captured = len(x), self._captured
        if captured is None or num_tokens > self._num_tokens:
            return self._decoder.through(x, turns, attn)
        captured.x[:num_tokens].copy_(x)
        for kept, new in zip(_tensors(captured.turns), _tensors(turns), strict=True):
            kept[:num_tokens].copy_(new)
        captured.program.run(num_tokens)
        return captured.program.result[:num_tokens]

    def _capture(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> None:
        kept_x = self._like(x)
        wide: Turn = (self._like(turns.wide[0]), self._like(turns.wide[1]))
        local = wide if turns.local is turns.wide else (self._like(turns.local[0]), self._like(turns.local[1]))
        kept_turns = Turns(wide, local)
        try:
            program = Program(lambda: self._decoder.through(kept_x, kept_turns, attn), self._num_tokens)
        except NotOurs as reason:
            log.info("layers run call by call: no kernel of ours does %s", reason)
            return
        self._captured = _Captured(program, kept_x, kept_turns)
        log.debug("%d layers are %d kernel calls", len(self._decoder.layers), program.num_calls)

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._num_tokens, *x.shape[1:], dtype=x.dtype)


def _tensors(turns: Turns) -> tuple[torch.Tensor, ...]:
    return turns.wide if turns.local is turns.wide else (*turns.wide, *turns.local)
