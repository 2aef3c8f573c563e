"""A plan's rows as tensors: flat, decodes first, and back to the plan by ``order``."""

import pytest
import torch

from paceline.proto.request import SamplingParams
from paceline.proto.step import NULL_BLOCK, TAKE_POOL, TOKEN_IN_TABLE, SlotInit, StepPlan, column
from paceline.worker.batch import build_batch
from paceline.worker.table import SlotTable

BLOCK = 4


@pytest.fixture
def table() -> SlotTable:
    """Slot s holds ids 100 s, 100 s + 1, ... and blocks 10 s + 1, 10 s + 2, ...; its epoch is s + 1."""
    table = SlotTable(num_slots=5, max_model_len=40, block_size=BLOCK)
    params = SamplingParams(seed=0)
    table.apply(
        StepPlan(
            step_id=1,
            admissions=[
                SlotInit(
                    slot=s,
                    epoch=s + 1,
                    token_ids=column(100 * s + i for i in range(20)),
                    num_prompt=20,
                    choice=0,
                    params=params,
                )
                for s in range(5)
            ],
        )
    )
    for s in range(5):
        table.block_table[0, s] = 10 * s + 1 + torch.arange(10).numpy()
    return table


def plan_of(*rows, step_id=2, epochs=None) -> StepPlan:
    """Rows: (slot, start, length, token, take, write)."""
    slots, starts, lens, tokens, takes, writes = zip(*rows, strict=True)
    return StepPlan(
        step_id=step_id,
        chunk_slots=column(slots),
        chunk_epochs=column(epochs or [s + 1 for s in slots]),
        chunk_starts=column(starts),
        chunk_lens=column(lens),
        chunk_tokens=column(tokens),
        chunk_takes=column(takes),
        chunk_writes=column(writes),
        num_drafts=column([0] * len(rows)),
    )


def test_decodes_come_first_by_context_and_order_leads_back(table):
    plan = plan_of((0, 9, 1, -1, 1, 1), (1, 0, 5, -1, 0, 1), (2, 3, 1, -1, 1, 1), (3, 4, 3, -1, 1, 1))
    batch = build_batch(plan, table, BLOCK)
    assert batch.order.tolist() == [2, 0, 1, 3]
    assert batch.num_decodes == 2
    assert batch.positions.tolist() == [3, 9, 0, 1, 2, 3, 4, 4, 5, 6]
    assert batch.ids.tolist() == [203, 9, 100, 101, 102, 103, 104, 304, 305, 306]
    assert batch.context_lens.tolist() == [4, 10, 5, 7]
    assert batch.first_tokens.tolist() == [0, 1, 2, 7]


def test_only_rows_that_draw_have_their_last_token_taken(table):
    plan = plan_of((1, 0, 5, -1, 0, 1), (3, 4, 3, -1, 1, 1), (0, 9, 1, -1, 1, 1))
    batch = build_batch(plan, table, BLOCK)
    assert batch.order[batch.samples].tolist() == [2, 1]
    assert batch.ids[batch.last_tokens].tolist() == [9, 306]


def test_writes_go_to_the_slots_own_blocks(table):
    batch = build_batch(plan_of((2, 3, 3, -1, 0, 1)), table, BLOCK)
    assert batch.write_to[0].tolist() == [21 * BLOCK + 3, 22 * BLOCK, 22 * BLOCK + 1]


def test_rows_that_write_nothing_go_to_the_null_block(table):
    batch = build_batch(plan_of((2, 19, 1, -1, 1, 0), (1, 6, 2, -1, 0, 1)), table, BLOCK)
    assert batch.write_to[0, 0] // BLOCK == NULL_BLOCK
    assert (batch.write_to[0, 1:] // BLOCK == 12).all()


def test_every_group_has_its_own_blocks_as_far_as_the_longest_row_reaches():
    table = SlotTable(num_slots=2, max_model_len=40, block_size=BLOCK, num_groups=2)
    table.slots["epoch"] = [1, 2]
    table.block_table[:] = torch.arange(1, 41).view(2, 2, 10).numpy()
    batch = build_batch(plan_of((1, 6, 3, -1, 0, 1), (0, 2, 1, -1, 1, 1)), table, BLOCK)
    assert batch.blocks.tolist() == [[[1, 2, 3], [11, 12, 13]], [[21, 22, 23], [31, 32, 33]]]
    assert (batch.write_to // BLOCK).tolist() == [[1, 12, 12, 13], [21, 32, 32, 33]]
    assert (batch.write_to % BLOCK).tolist() == [[2, 2, 3, 0]] * 2


def test_a_token_in_the_plan_is_put_into_the_table_and_one_in_the_table_is_read(table):
    table.token_ids[4, 20] = 77  # as if drawn by the step before
    batch = build_batch(plan_of((0, 20, 1, 55, 1, 1), (4, 20, 1, TOKEN_IN_TABLE, 1, 1)), table, BLOCK)
    assert batch.ids.tolist() == [55, 77]
    assert table.token_ids[0, 20] == 55


def test_a_plan_without_rows_makes_an_empty_batch(table):
    batch = build_batch(StepPlan(step_id=3), table, BLOCK)
    assert batch.num_tokens == 0
    assert batch.samples.size == 0


def test_rows_of_another_epoch_are_our_own_bug(table):
    with pytest.raises(AssertionError, match="another epoch"):
        build_batch(plan_of((1, 0, 2, -1, 0, 1), epochs=[9]), table, BLOCK)


def test_scored_ids_are_the_prompts_that_follow_a_token_of_the_chunk(table):
    table.slots["num_prompt"] = 12
    table.slots["prompt_logprobs"] = [0, 1, 2, 3, 4]
    plan = plan_of(
        (1, 0, 5, -1, 2, 1), (3, 10, 4, -1, 3, 1), (0, 9, 1, -1, 2, 1), (2, 0, 2, -1, 0, 1), (4, 15, 1, -1, 3, 1)
    )
    batch = build_batch(plan, table, BLOCK)
    assert batch.order[batch.scored.rows].tolist() == [2] + 5 * [0] + [1]
    assert batch.scored.counts.tolist() == [0] + 5 * [1] + [3]
    assert batch.scored.ids.tolist() == [10, 101, 102, 103, 104, 105, 311]
    assert batch.ids[batch.scored.tokens].tolist() == [9, 100, 101, 102, 103, 104, 310]
    assert batch.order[batch.samples].tolist() == [4, 1]


def test_nothing_is_scored_where_nobody_asks_or_no_prompt_follows(table):
    assert build_batch(plan_of((1, 0, 5, -1, 1, 1)), table, BLOCK).scored is None
    assert build_batch(plan_of((1, 19, 1, -1, 3, 1)), table, BLOCK).scored is None


def test_takes_that_this_version_lacks_are_our_own_bug(table):
    with pytest.raises(AssertionError, match="takes"):
        build_batch(plan_of((1, 0, 2, -1, TAKE_POOL, 1)), table, BLOCK)
