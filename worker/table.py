"""The slot table: all that a rank remembers of its sequences, rebuilt from plans only. Draws and computes nothing.

Ids live on the device, because ids that were just sampled are read by the next step without passing through the host.
Everything else is known from the plan, so it stays in host columns: a step decides from them what to do, without
waiting for the device.
"""

from array import array

import numpy as np
import torch

from paceline.proto.request import SamplingParams
from paceline.proto.step import NULL_BLOCK, SlotInit, StepPlan

FREE = -1  # the epoch of a slot that nobody holds
NO_LOGPROBS = -1

# Steps of the sampler that a slot's parameters call for.
PENALTIES, BIAS, NO_EARLY_END, RANDOM, LOGPROBS = 1, 2, 4, 8, 16

# One row a slot. Neutral values switch a step of the sampler off; see SamplingParams.
SLOT = np.dtype(
    [
        ("epoch", "i4"),
        ("num_prompt", "i4"),
        ("choice", "i4"),
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("repetition_penalty", "f4"),
        ("logprobs", "i4"),
        ("prompt_logprobs", "i4"),
        ("min_len", "i4"),  # at positions before it no end is drawn
        ("needs", "i4"),  # steps of the sampler, together
    ],
    align=True,
)


def column(values: array) -> np.ndarray:
    """A plan's int32 column as indices, without a loop."""
    return np.frombuffer(values, dtype=np.int32).astype(np.int64) if len(values) else np.zeros(0, np.int64)


class SlotTable:
    """Ids, block tables and sampling parameters of up to ``num_slots`` sequences.

    token_ids: [num_slots, max_model_len + 1] int32 on the device; the last column takes the id drawn at the limit.
    block_table: [num_groups, num_slots, max_blocks] int32 on the host; entries that are not set point to NULL_BLOCK,
    those before the window of a group may point to blocks that have become somebody else's: nobody reads them.
    slots: [num_slots] records of SLOT. For the few that have some: logit_bias, slot -> {id: bias}, and early_stop_ids,
    slot -> ids that are not drawn before its min_len.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, num_groups: int = 1, device="cpu"):
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = np.full((num_groups, num_slots, max_blocks), NULL_BLOCK, dtype=np.int32)
        self.slots = np.zeros(num_slots, dtype=SLOT)
        self.slots["epoch"] = FREE
        self._is_on_host = self.token_ids.device.type == "cpu"
        self.logit_bias: dict[int, dict[int, float]] = {}
        self.early_stop_ids: dict[int, tuple[int, ...]] = {}

    def apply(self, plan: StepPlan) -> None:
        """Releases, admissions, table writes, in that order (the ordering law). Copies are the cache's."""
        if plan.releases:
            self._release(column(plan.releases))
        for init in plan.admissions:
            self._admit(init)
        if plan.table_slots:
            where = column(plan.table_groups), column(plan.table_slots), column(plan.table_indices)
            self.block_table[where] = column(plan.table_blocks)

    def write_ids(self, slots: np.ndarray, positions: np.ndarray, ids: torch.Tensor) -> None:
        """Puts ids [n] at (slots, positions), both [n], on the device and without waiting for it."""
        where = self.on_device(slots), self.on_device(positions)
        self.token_ids.index_put_(where, ids.to(torch.int32))

    def on_device(self, values: np.ndarray) -> torch.Tensor:
        on_host = torch.from_numpy(np.ascontiguousarray(values))
        return on_host if self._is_on_host else on_host.to(self.token_ids.device, non_blocking=True)

    def _release(self, slots: np.ndarray) -> None:
        self.slots["epoch"][slots] = FREE
        self.block_table[:, slots] = NULL_BLOCK
        for few in (self.logit_bias, self.early_stop_ids):
            for slot in slots.tolist() if few else ():
                few.pop(slot, None)

    def _admit(self, init: SlotInit) -> None:
        slot, ids = init.slot, init.token_ids
        if ids:
            known = torch.from_numpy(np.frombuffer(ids, dtype=np.int32).copy())
            self.token_ids[slot, : len(ids)] = known.to(self.token_ids.device, non_blocking=True)
        self.block_table[:, slot] = NULL_BLOCK
        self.slots[slot] = _record(init, init.params)
        self.logit_bias.pop(slot, None)
        self.early_stop_ids.pop(slot, None)
        if init.params.logit_bias:
            self.logit_bias[slot] = dict(init.params.logit_bias)
        if init.params.min_tokens and init.params.stop_ids:
            self.early_stop_ids[slot] = init.params.stop_ids


def _record(init: SlotInit, params: SamplingParams) -> tuple:
    return (
        init.epoch,
        init.num_prompt,
        init.choice,
        params.seed & 0xFFFF_FFFF_FFFF_FFFF,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        NO_LOGPROBS if params.logprobs is None else params.logprobs,
        NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs,
        init.num_prompt + params.min_tokens if params.min_tokens else 0,
        _needs(params),
    )


def _needs(params: SamplingParams) -> int:
    penal = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return (
        (PENALTIES if penal else 0)
        | (BIAS if params.logit_bias else 0)
        | (NO_EARLY_END if params.min_tokens else 0)
        | (RANDOM if params.temperature > 0 else 0)
        | (LOGPROBS if params.logprobs is not None else 0)
    )
