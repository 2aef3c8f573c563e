"""The plan being made: rows and columns of one step, and what is left of its budget. Decides nothing."""

from array import array

from paceline.cluster.engine.sequence import Sequence
from paceline.proto.step import NULL_BLOCK, TAKE_NONE, TAKE_SAMPLE, TOKEN_IN_TABLE, SlotInit, StepPlan


class Draft:
    """``rows`` are the sequences of the chunks, in order; ``preempted`` pairs (victim, for whom). ``budget`` tokens and
    ``draws`` ids are what it still has room for."""

    __slots__ = (
        "admissions",
        "budget",
        "copies",
        "draws",
        "lens",
        "num_decode",
        "preempted",
        "rows",
        "starts",
        "step_id",
        "table_blocks",
        "table_groups",
        "table_indices",
        "table_slots",
        "takes",
        "tokens",
        "waits_for",
        "writes",
    )

    def __init__(self, step_id: int, budget: int, draws: int):
        self.step_id = step_id
        self.budget = budget
        self.draws = draws
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.lens: list[int] = []
        self.tokens: list[int] = []
        self.takes: list[int] = []
        self.writes: list[int] = []
        self.admissions: list[SlotInit] = []
        self.table_slots: list[int] = []
        self.table_groups: list[int] = []
        self.table_indices: list[int] = []
        self.table_blocks: list[int] = []
        self.copies: list[tuple[int, int, int]] = []  # group, source, destination
        self.num_decode = 0
        self.preempted: list[tuple[str, str]] = []
        self.waits_for: str | None = None  # what the waiting head lacks

    def put_block(self, seq: Sequence, group: int, index: int, block: int) -> None:
        self.table_slots.append(seq.slot)
        self.table_groups.append(group)
        self.table_indices.append(index)
        self.table_blocks.append(block)

    def seat(self, seq: Sequence) -> None:
        """The sequence's slot starts from scratch: all its ids and all blocks that it holds."""
        self.admissions.append(
            SlotInit(
                slot=seq.slot,
                epoch=seq.epoch,
                token_ids=array("i", seq.token_ids),
                num_prompt=seq.num_prompt,
                choice=seq.choice,
                params=seq.request.params,
            )
        )
        for group, block_ids in enumerate(seq.block_ids):
            for index, block in enumerate(block_ids):
                if block != NULL_BLOCK:
                    self.put_block(seq, group, index, block)

    def put_chunk(self, seq: Sequence, end: int, write: int, take: int = TAKE_NONE) -> None:
        """A row for [num_planned, end), and the cursors that follow from it. It draws, beside what is to be taken, if
        it ends where the next id is wanted: nowhere, where max_tokens is 0."""
        start = seq.num_planned
        self.rows.append(seq)
        self.starts.append(start)
        self.lens.append(end - start)
        self.tokens.append(seq.token_ids[start] if end - start == 1 and not seq.num_pending else TOKEN_IN_TABLE)
        self.writes.append(write)
        if end == len(seq.token_ids) + seq.num_pending and end < seq.max_len:
            take |= TAKE_SAMPLE
            self.draws -= 1
            seq.num_pending += 1
        self.takes.append(take)
        seq.num_planned = end
        seq.planned_in = self.step_id
        self.budget -= end - start

    def plan(self, releases: list[int]) -> StepPlan:
        rows = self.rows
        return StepPlan(
            step_id=self.step_id,
            releases=array("i", releases),
            admissions=self.admissions,
            table_slots=array("i", self.table_slots),
            table_groups=array("i", self.table_groups),
            table_indices=array("i", self.table_indices),
            table_blocks=array("i", self.table_blocks),
            copy_groups=array("i", [group for group, _, _ in self.copies]),
            copy_srcs=array("i", [src for _, src, _ in self.copies]),
            copy_dsts=array("i", [dst for _, _, dst in self.copies]),
            chunk_slots=array("i", [seq.slot for seq in rows]),
            chunk_epochs=array("i", [seq.epoch for seq in rows]),
            chunk_starts=array("i", self.starts),
            chunk_lens=array("i", self.lens),
            chunk_tokens=array("i", self.tokens),
            chunk_takes=array("i", self.takes),
            chunk_writes=array("i", self.writes),
            num_drafts=array("i", bytes(4 * len(rows))),
        )
