"""The slot table holds what plans say, and nothing of a sequence that has left."""

import numpy as np
import pytest
import torch

from paceline.proto.request import SamplingParams
from paceline.proto.step import NULL_BLOCK, SlotInit, StepPlan, column
from paceline.worker.table import FREE, NO_LOGPROBS, SlotTable


def admission(slot, ids=(1, 2, 3), epoch=1, **params) -> SlotInit:
    settings = SamplingParams(**({"seed": 7} | params))
    return SlotInit(slot=slot, epoch=epoch, token_ids=column(ids), num_prompt=2, choice=4, params=settings)


def writes(*entries) -> dict:
    slots, indices, blocks = zip(*entries, strict=True)
    return {
        "table_slots": column(slots),
        "table_groups": column([0] * len(slots)),
        "table_indices": column(indices),
        "table_blocks": column(blocks),
    }


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(num_slots=4, max_model_len=64, block_size=16)


def test_an_admission_brings_ids_and_every_parameter(table):
    wanted = {
        "seed": 2**64 - 3,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
    }
    table.apply(StepPlan(step_id=1, admissions=[admission(2, (5, 6, 7), repetition_penalty=1.5, logprobs=3, **wanted)]))
    row = table.slots[2]
    assert {name: row[name] for name in wanted} == wanted
    assert (row["repetition_penalty"], row["logprobs"], row["epoch"], row["num_prompt"], row["choice"]) == (
        1.5,
        3,
        1,
        2,
        4,
    )
    assert table.token_ids[2, :3].tolist() == [5, 6, 7]
    assert table.slots["epoch"].tolist() == [FREE, FREE, 1, FREE]


def test_a_negative_seed_is_taken_as_64_bits_and_no_logprobs_are_told_apart_from_none_beside(table):
    table.apply(StepPlan(step_id=1, admissions=[admission(0, seed=-1), admission(1, logprobs=0)]))
    assert table.slots["seed"][0] == 2**64 - 1
    assert table.slots["logprobs"][:2].tolist() == [NO_LOGPROBS, 0]


def test_one_plan_releases_then_admits_then_writes_the_same_slot(table):
    table.apply(StepPlan(step_id=1, admissions=[admission(1, logit_bias={3: 1.0})], **writes((1, 0, 9), (1, 1, 8))))
    table.apply(
        StepPlan(step_id=2, releases=column([1]), admissions=[admission(1, (8,), epoch=2)], **writes((1, 0, 5)))
    )
    assert table.slots["epoch"][1] == 2
    assert table.block_table[0, 1].tolist() == [5, NULL_BLOCK, NULL_BLOCK, NULL_BLOCK]
    assert table.logit_bias == {}


def test_a_release_leaves_no_blocks_and_no_bias_behind(table):
    table.apply(StepPlan(step_id=1, admissions=[admission(3, logit_bias={0: -5.0})], **writes((3, 2, 7))))
    assert table.logit_bias == {3: {0: -5.0}}
    table.apply(StepPlan(step_id=2, releases=column([3])))
    assert not table.block_table.any()
    assert table.logit_bias == {}
    assert table.slots["epoch"][3] == FREE


def test_min_tokens_count_from_the_prompts_end_and_only_then_are_stop_ids_kept(table):
    table.apply(
        StepPlan(step_id=1, admissions=[admission(0, min_tokens=4, stop_ids=(9, 8)), admission(1, stop_ids=(9,))])
    )
    assert table.slots["min_len"][:2].tolist() == [2 + 4, 0]
    assert table.early_stop_ids == {0: (9, 8)}
    table.apply(StepPlan(step_id=2, releases=column([0]), admissions=[admission(1, epoch=2, min_tokens=1)]))
    assert table.early_stop_ids == {}


def test_table_writes_of_many_slots_land_at_their_own_entries(table):
    table.apply(StepPlan(step_id=1, **writes((0, 3, 11), (2, 0, 12), (3, 1, 13))))
    filled = {(int(s), int(i)): int(table.block_table[0, s, i]) for s, i in np.argwhere(table.block_table[0])}
    assert filled == {(0, 3): 11, (2, 0): 12, (3, 1): 13}


def test_ids_can_be_written_up_to_the_limit(table):
    table.write_ids(np.array([0, 3]), np.array([64, 0]), torch.tensor([41, 42]))
    assert table.token_ids[0, 64] == 41
    assert table.token_ids[3, 0] == 42


def test_an_admission_without_ids_is_legal(table):
    table.apply(StepPlan(step_id=1, admissions=[admission(0, ())]))
    assert table.slots["epoch"][0] == 1
