"""Runs a dump of plans again, on the reference backend. What the rank had in its cache before is not in a dump.

Plans say nothing of who holds what, so those of a gang run on one rank that holds the whole model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.proto.step import StepPlan, column
from paceline.worker.dump import read_dump
from paceline.worker.rank import Rank

ROW_COLUMNS = ("slots", "epochs", "starts", "lens", "tokens", "takes", "writes")


class Replayed(NamedTuple):
    step_id: int
    ids: dict[int, int]  # slot -> drawn id
    faults: dict[int, str]  # slot -> reason
    num_left_out: int  # rows of sequences that were admitted before the dump begins


def replay(path: Path, model: str | None = None) -> Iterator[Replayed]:
    """Step by step, what the plans draw. ``model``: where the model lies now, if it has moved.

    The rank keeps its last plans only. Sequences that are older than the first of them cannot be rebuilt and are left
    out; a younger one that shared cached blocks with them may draw other ids than it did.
    """
    header, plans = read_dump(path)
    rank = Rank(
        msgspec.structs.replace(
            header.config,
            model=model or header.config.model,
            num_kv_blocks=header.num_kv_blocks,
            max_model_len=header.max_model_len,
            attention_backend="torch",
            device=header.config.device.partition(":")[0],
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            rank_memory=None,
            dump_dir=None,
        )
    )
    live: dict[int, int] = {}  # slot -> epoch
    for plan in plans:
        for slot in plan.releases:
            live.pop(slot, None)
        live |= {init.slot: init.epoch for init in plan.admissions}
        rows = zip(plan.chunk_slots, plan.chunk_epochs, strict=True)
        kept = [row for row, (slot, epoch) in enumerate(rows) if live.get(slot) == epoch]
        left_out = len(plan.chunk_slots) - len(kept)
        result = rank.execute(_only(plan, kept) if left_out else plan).result()
        slots = [plan.chunk_slots[row] for row in kept]
        drew = [slot for slot, count in zip(slots, result.num_ids, strict=True) if count]
        ids = dict(zip(drew, result.ids, strict=True))
        yield Replayed(plan.step_id, ids, {slots[row]: text for row, text in result.faults.items()}, left_out)


def _only(plan: StepPlan, rows: list[int]) -> StepPlan:
    """The plan with these rows alone. Its table writes stay: a slot that nobody holds is never read."""
    columns = {f"chunk_{name}": getattr(plan, f"chunk_{name}") for name in ROW_COLUMNS}
    chosen = {name: column([values[row] for row in rows]) for name, values in columns.items()}
    return msgspec.structs.replace(plan, **chosen, num_drafts=column([0] * len(rows)))
