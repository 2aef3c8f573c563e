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

from paceline.proto.step import TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE, TOKEN_IN_TABLE, StepPlan
from paceline.worker.table import SlotTable

# Of a plan, taken apart at once: between two steps the model has emptied the caches, so that each function of numpy
# that is called costs about 5 µs, whatever the number of rows. The first two every token of a row is told.
COLUMNS = (
    "chunk_slots",
    "chunk_writes",
    "chunk_starts",
    "chunk_lens",
    "chunk_epochs",
    "chunk_tokens",
    "chunk_takes",
)
STARTS, LENGTHS = COLUMNS.index("chunk_starts"), COLUMNS.index("chunk_lens")
LAST = np.iinfo(np.int32).max  # behind every start


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
    columns = np.frombuffer(b"".join(getattr(plan, name) for name in COLUMNS), np.int32).reshape(len(COLUMNS), -1)
    is_decode = columns[LENGTHS] == 1
    order = np.where(is_decode, columns[STARTS], LAST).argsort(kind="stable")
    rows = columns[:, order].astype(np.int64)
    slots, _, starts, lengths, epochs, tokens, takes = rows
    assert (table.slots["epoch"][slots] == epochs).all(), f"plan {plan.step_id} has rows of another epoch"
    known = (tokens != TOKEN_IN_TABLE).nonzero()[0]
    if known.size:
        table.write_ids(slots[known], starts[known], table.on_device(tokens[known]))

    ends = lengths.cumsum()
    token_slots, token_writes = rows[:2].repeat(lengths, 1)
    positions = (starts - ends + lengths).repeat(lengths)
    positions += np.arange(len(positions))
    indices, offsets = np.divmod(positions, block_size)
    written = table.block_table[:, token_slots, indices] * token_writes  # [groups, tokens]; the null block is 0
    assert takes.max(initial=0) <= TAKE_SAMPLE | TAKE_PROMPT_LOGPROBS, "this version takes ids and log-probabilities"
    samples = (takes & TAKE_SAMPLE).nonzero()[0]

    num_blocks = -(-int((starts + lengths).max(initial=0)) // block_size)
    device_positions = table.on_device(positions)
    return Batch(
        order=order,
        slots=slots,
        starts=starts,
        lengths=lengths,
        num_decodes=int(is_decode.sum()),
        blocks=table.block_table[:, slots, :num_blocks],
        ids=table.token_ids[table.on_device(token_slots), device_positions],
        positions=device_positions,
        write_to=table.on_device(written * block_size + offsets),
        samples=samples,
        last_tokens=table.on_device(ends[samples] - 1),
        scored=_scored((takes & TAKE_PROMPT_LOGPROBS).nonzero()[0], slots, starts, lengths, table),
    )


def _scored(
    rows: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, table: SlotTable
) -> Scored | None:
    """Of the batch rows ``rows``; None where no prompt id follows their tokens."""
    if not rows.size:
        return None
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
