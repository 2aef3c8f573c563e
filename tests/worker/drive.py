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
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.config import RankConfig
from paceline.worker.kv_groups import kv_groups
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
    """Blocks are handed out in a shuffled order, so that a sequence's blocks lie scattered. Those of a group with a
    window are given to others as soon as they left it.

    ``tables``: slot -> blocks of the first group, 0 where one was given up; ``more``: those of the other groups.
    """

    rank: Rank
    seed: int = 0
    step_id: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    more: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self):
        groups = kv_groups(open_checkpoint(Path(self.rank.config.model)).spec)
        self.windows = [group.window for group in groups]
        self.free = list(range(1, self.rank.num_kv_blocks + 1))
        random.Random(self.seed).shuffle(self.free)
        self._next = StepPlan(step_id=0)

    def admit(self, slot: int, ids, params=GREEDY, *, num_prompt=None, choice=0, shared_blocks=()) -> int:
        """``shared_blocks`` head the block table, as a prefix hit or a fork would have it. Returns the slot."""
        self.step_id += 1
        self.epochs[slot], self.tables[slot] = self.step_id, []
        self.more[slot] = [[] for _ in self.windows[1:]]
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
        for table in (self.tables.pop(slot), *self.more.pop(slot)):
            self.free.extend(block for block in table if block)

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
            for group, window in enumerate(self.windows):
                if window:
                    self._give_up(row.slot, group, (row.start - window + 1) // self.rank.config.block_size, plan)
                while len(self._table(row.slot, group)) * self.rank.config.block_size < row.start + row.length:
                    self._append_block(row.slot, self.free.pop(), plan, group)
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

    def _table(self, slot: int, group: int) -> list[int]:
        return self.more[slot][group - 1] if group else self.tables[slot]

    def _give_up(self, slot: int, group: int, num: int, plan: StepPlan) -> None:
        """The first ``num`` blocks, which no query sees any more."""
        table = self._table(slot, group)
        for index, block in enumerate(table[: max(num, 0)]):
            if block:
                self.free.append(block)
                table[index] = 0
                self._write(plan, slot, group, index, 0)

    def _append_block(self, slot: int, block: int, plan: StepPlan | None = None, group: int = 0) -> None:
        table = self._table(slot, group)
        self._write(plan or self._next, slot, group, len(table), block)
        table.append(block)

    def _write(self, plan: StepPlan, slot: int, group: int, index: int, block: int) -> None:
        plan.table_slots.append(slot)
        plan.table_groups.append(group)
        plan.table_indices.append(index)
        plan.table_blocks.append(block)
