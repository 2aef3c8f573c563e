"""What one step is: the plan that every rank executes, and the result that one rank returns.

Columns of int32, one entry a row, so that a plan of 256 rows is a few hundred bytes to encode and not 256 objects.
This file fixes the meaning of the columns; the scheduler fills them and ranks obey them.

Order inside a step (the ordering law): releases, admissions, table writes, block copies, then per layer all KV writes
before any read. Plans execute in step order, and whole.
"""

import hashlib
from array import array

import msgspec

from paceline.proto.request import SamplingParams, TokenLogprobs

NULL_BLOCK = 0  # padding and dropped writes point here; never allocated
TOKEN_IN_TABLE = -1  # the rank already holds the chunk's ids in its slot table

# What a chunk gives beside KV; values may be added up.
TAKE_NONE = 0
TAKE_SAMPLE = 1  # draw the id that follows the chunk's last token
TAKE_PROMPT_LOGPROBS = 2  # of the prompt's ids that follow the chunk's tokens
TAKE_POOL = 4


def column(values=()) -> array:
    return array("i", values)


class SlotInit(msgspec.Struct, kw_only=True):
    """A sequence takes a slot. All that a rank will ever know of it: rank state is rebuilt from these ids."""

    slot: int
    epoch: int
    token_ids: array  # all ids known: prompt, then emitted ones
    num_prompt: int
    choice: int
    params: SamplingParams
    adapter: str = ""


class StepPlan(msgspec.Struct, kw_only=True):
    """One step, for every rank the same bytes.

    table_*: entry ``index`` of the block table of (slot, group) becomes ``block``.
    copy_*: block ``src`` of a group is copied over block ``dst`` before any write of this step.
    chunk_*: the rows. A row computes positions [start, start + length) of its slot. ``token`` is the id at ``start``
    where the scheduler knows it and the row is one token long, else TOKEN_IN_TABLE. ``write`` 0 means that the
    positions' keys and values are in the cache already (a forked child asks for logits only).
    draft_ids are ragged: ``num_drafts`` per row.
    """

    step_id: int
    releases: array = msgspec.field(default_factory=column)
    admissions: list[SlotInit] = []
    table_slots: array = msgspec.field(default_factory=column)
    table_groups: array = msgspec.field(default_factory=column)
    table_indices: array = msgspec.field(default_factory=column)
    table_blocks: array = msgspec.field(default_factory=column)
    copy_groups: array = msgspec.field(default_factory=column)
    copy_srcs: array = msgspec.field(default_factory=column)
    copy_dsts: array = msgspec.field(default_factory=column)
    chunk_slots: array = msgspec.field(default_factory=column)
    chunk_epochs: array = msgspec.field(default_factory=column)
    chunk_starts: array = msgspec.field(default_factory=column)
    chunk_lens: array = msgspec.field(default_factory=column)
    chunk_tokens: array = msgspec.field(default_factory=column)
    chunk_takes: array = msgspec.field(default_factory=column)
    chunk_writes: array = msgspec.field(default_factory=column)
    num_drafts: array = msgspec.field(default_factory=column)
    draft_ids: array = msgspec.field(default_factory=column)

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_lens)


class StepResult(msgspec.Struct, kw_only=True):
    """One row per chunk of the plan, in its order. ``ids`` is ragged: ``num_ids`` per row (0 where nothing was taken).

    ``logprobs``, ``prompt_logprobs`` and ``faults`` are keyed by row and hold only rows that have some. Of the prompt
    there is an entry for each token of the chunk that a prompt id follows. A fault ends that row's sequence, not the
    gang.
    """

    step_id: int
    epochs: array
    num_ids: array
    ids: array
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    faults: dict[int, str] = {}
    model_seconds: float = 0.0  # that the sampling rank spent on the plan, waiting for other ranks included


def schema_hash() -> str:
    """Names and order of every field above: engine and ranks compare it before the first step."""
    shape = [(t.__name__, t.__struct_fields__) for t in (SamplingParams, TokenLogprobs, SlotInit, StepPlan, StepResult)]
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
