"""One step as tensors. Made from a plan and the slot table without a loop over sequences; knows no layers.

Rows are put in an order of the batch's own: rows of one token (decodes) first, by context length, then longer chunks.
So a backend takes both as slices, and rows of like length lie side by side. ``order`` leads back to the plan.

    plan rows      A(1)  B(5)  C(1)  D(3)
    batch rows     C  A | B          D            order = [2, 0, 1, 3]
    tokens         c  a   b b b b b  d d d        num_decodes = 2
"""

from dataclasses import dataclass

import numpy as np
import torch

from paceline.proto.step import NULL_BLOCK, TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE, TOKEN_IN_TABLE, StepPlan
from paceline.worker.table import SlotTable, column


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt ids whose log-probabilities are wanted, each by the token before it. One entry an id, row by row."""

    rows: np.ndarray  # [ids] batch row
    counts: np.ndarray  # [ids] how many are wanted beside it
    tokens: torch.Tensor  # [ids] int64, index of the token before
    ids: torch.Tensor  # [ids] int64


@dataclass(frozen=True, slots=True)
class Batch:
    """Host columns have one entry a batch row; device tensors one a token, or one a drawing row."""

    order: np.ndarray  # [rows] the plan's row
    slots: np.ndarray  # [rows]
    starts: np.ndarray  # [rows] first position that is computed
    lengths: np.ndarray  # [rows] positions that are computed
    num_decodes: int  # the first rows, one token each
    blocks: np.ndarray  # [groups, rows, blocks] block tables, as far as the longest row reaches
    ids: torch.Tensor  # [tokens] int32
    positions: torch.Tensor  # [tokens] int64
    write_to: torch.Tensor  # [groups, tokens] int64, block * block_size + offset; unwritten: the null block's
    samples: np.ndarray  # [draws] batch rows that draw an id
    last_tokens: torch.Tensor  # [draws] int64, index of the drawing row's last token
    scored: Scored | None

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def context_lens(self) -> np.ndarray:
        """[rows] tokens that a row's last query looks at, itself included."""
        return self.starts + self.lengths

    @property
    def first_tokens(self) -> np.ndarray:
        """[rows] where a row's tokens begin."""
        return np.cumsum(self.lengths) - self.lengths


def build_batch(plan: StepPlan, table: SlotTable, block_size: int) -> Batch:
    """The plan's chunks as a `Batch`; ids that the plan names are put into the table first.

    The table has the plan applied already. Rows of an epoch that the table does not hold are our own bug, an
    AssertionError.
    """
    assert not plan.draft_ids, "drafts are not verified by this version"
    starts, lengths = column(plan.chunk_starts), column(plan.chunk_lens)
    order = np.lexsort((np.where(lengths == 1, starts, 0), lengths != 1))
    slots, starts, lengths = column(plan.chunk_slots)[order], starts[order], lengths[order]
    epochs = column(plan.chunk_epochs)[order]
    assert np.array_equal(table.slots["epoch"][slots], epochs), f"plan {plan.step_id} has rows of another epoch"

    tokens = column(plan.chunk_tokens)[order]
    known = np.flatnonzero(tokens != TOKEN_IN_TABLE)
    if known.size:
        table.write_ids(slots[known], starts[known], table.on_device(tokens[known]))

    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
    token_slots = np.repeat(slots, lengths)
    writes = np.repeat(column(plan.chunk_writes)[order] != 0, lengths)
    written = table.block_table[:, token_slots, positions // block_size]  # [groups, tokens]
    block = np.where(writes, written, NULL_BLOCK).astype(np.int64)
    takes = column(plan.chunk_takes)[order]
    assert not (takes & ~(TAKE_SAMPLE | TAKE_PROMPT_LOGPROBS)).any(), "this version takes ids and log-probabilities"
    samples = np.flatnonzero(takes & TAKE_SAMPLE)

    num_blocks = -(-int((starts + lengths).max(initial=0)) // block_size)
    device_positions = table.on_device(positions)
    return Batch(
        order=order,
        slots=slots,
        starts=starts,
        lengths=lengths,
        num_decodes=int((lengths == 1).sum()),
        blocks=table.block_table[:, slots, :num_blocks],
        ids=table.token_ids[table.on_device(token_slots), device_positions],
        positions=device_positions,
        write_to=table.on_device(block * block_size + positions % block_size),
        samples=samples,
        last_tokens=table.on_device(ends[samples] - 1),
        scored=_scored(np.flatnonzero(takes & TAKE_PROMPT_LOGPROBS), slots, starts, lengths, table),
    )


def _scored(
    rows: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, table: SlotTable
) -> Scored | None:
    """Of the batch rows ``rows``; None where no prompt id follows their tokens."""
    records = table.slots[slots[rows]]
    num_ids = np.clip(records["num_prompt"] - 1 - starts[rows], 0, lengths[rows])
    if not num_ids.any():
        return None
    nth = np.arange(num_ids.sum()) - np.repeat(np.cumsum(num_ids) - num_ids, num_ids)
    positions = np.repeat(starts[rows], num_ids) + nth + 1
    first_tokens = (np.cumsum(lengths) - lengths)[rows]
    wanted = np.repeat(rows, num_ids)
    return Scored(
        rows=wanted,
        counts=np.repeat(records["prompt_logprobs"], num_ids),
        tokens=table.on_device(np.repeat(first_tokens, num_ids) + nth),
        ids=table.token_ids[table.on_device(slots[wanted]), table.on_device(positions)].long(),
    )
