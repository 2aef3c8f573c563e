"""Drives a rank by hand-made plans, without a scheduler: sequences get slots and blocks here and grow as told."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from paceline.proto.request import SamplingParams
from paceline.proto.step import (
    TAKE_NONE,
    TAKE_SAMPLE,
    TOKEN_IN_TABLE,
    SlotInit,
    StepPlan,
    StepResult,
    column,
)
from paceline.worker.config import RankConfig
from paceline.worker.rank import PendingStep, Rank

GREEDY = SamplingParams(seed=0, temperature=0.0)


def rank_of(folder: Path, **fields) -> Rank:
    """A small fp32 rank of the model in ``folder``."""
    defaults = {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "num_kv_blocks": 128,
        "max_num_seqs": 16,
    }
    return Rank(RankConfig(**(defaults | fields)))


@dataclass
class Row:
    slot: int
    start: int
    length: int
    take: int = TAKE_SAMPLE
    write: bool = True
    token: int = TOKEN_IN_TABLE


@dataclass
class Driver:
    """``blocks`` are handed out in a shuffled order, so that a sequence's blocks lie scattered."""

    rank: Rank
    seed: int = 0
    step_id: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        self.free = list(range(1, self.rank.num_kv_blocks + 1))
        random.Random(self.seed).shuffle(self.free)
        self._next = StepPlan(step_id=0)

    def admit(self, slot: int, ids, params=GREEDY, *, num_prompt=None, choice=0, shared_blocks=()) -> int:
        """``shared_blocks`` head the block table, as a prefix hit or a fork would have it. Returns the slot."""
        self.step_id += 1
        self.epochs[slot], self.tables[slot] = self.step_id, []
        self._next.admissions.append(
            SlotInit(
                slot=slot,
                epoch=self.step_id,
                token_ids=column(ids),
                num_prompt=len(ids) if num_prompt is None else num_prompt,
                choice=choice,
                params=params,
            )
        )
        for block in shared_blocks:
            self._append_block(slot, block)
        return slot

    def release(self, slot: int) -> None:
        self._next.releases.append(slot)
        self.free.extend(self.tables.pop(slot))

    def copy_block(self, src: int, dst: int) -> None:
        self._next.copy_groups.append(0)
        self._next.copy_srcs.append(src)
        self._next.copy_dsts.append(dst)

    def plan(self, *rows: Row) -> StepPlan:
        """A plan of these rows and of all that was asked for since the last one."""
        plan, self._next = self._next, StepPlan(step_id=0)
        self.step_id += 1
        plan.step_id = self.step_id
        for row in rows:
            while len(self.tables[row.slot]) * self.rank.config.block_size < row.start + row.length:
                self._append_block(row.slot, self.free.pop(), plan)
            plan.chunk_slots.append(row.slot)
            plan.chunk_epochs.append(self.epochs[row.slot])
            plan.chunk_starts.append(row.start)
            plan.chunk_lens.append(row.length)
            plan.chunk_tokens.append(row.token)
            plan.chunk_takes.append(row.take)
            plan.chunk_writes.append(int(row.write))
            plan.num_drafts.append(0)
        return plan

    def submit(self, *rows: Row) -> PendingStep:
        return self.rank.execute(self.plan(*rows))

    def step(self, *rows: Row) -> StepResult:
        return self.submit(*rows).result()

    def prefill(self, slot: int, length: int, chunk: int | None = None) -> StepResult:
        """Positions [0, length) in chunks; the last one draws."""
        result = None
        for start in range(0, length, chunk or length):
            size = min(chunk or length, length - start)
            take = TAKE_SAMPLE if start + size == length else TAKE_NONE
            result = self.step(Row(slot, start, size, take))
        assert result is not None
        return result

    def generate(self, slot: int, ids, num_ids: int, params=GREEDY, *, chunk=None, **admit) -> list[int]:
        """Prompt to ``num_ids`` drawn ids, alone in every step, each id sent back by the next plan."""
        self.admit(slot, ids, params, **admit)
        drawn = list(self.prefill(slot, len(ids), chunk).ids)
        while len(drawn) < num_ids:
            drawn += self.step(Row(slot, len(ids) + len(drawn) - 1, 1, token=drawn[-1])).ids
        self.release(slot)
        return drawn

    def _append_block(self, slot: int, block: int, plan: StepPlan | None = None) -> None:
        plan = plan or self._next
        plan.table_slots.append(slot)
        plan.table_groups.append(0)
        plan.table_indices.append(len(self.tables[slot]))
        plan.table_blocks.append(block)
        self.tables[slot].append(block)
