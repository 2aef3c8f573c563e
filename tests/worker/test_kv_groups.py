"""Layers of one window share tables, a block is as large as the largest group needs, each layer has its own place."""

from collections import Counter

import pytest
import torch

from paceline.proto.errors import StartupError
from paceline.proto.request import SamplingParams
from paceline.proto.step import SlotInit, StepPlan, column
from paceline.worker.attention.base import StepAttention
from paceline.worker.batch import build_batch
from paceline.worker.kv_cache import KVCache, bytes_per_token
from paceline.worker.kv_groups import MOST_TABLES, kv_groups, locate, num_pairs
from paceline.worker.memory import fit_length
from paceline.worker.models.spec import ModelSpec
from paceline.worker.shards import Shards
from paceline.worker.table import SlotTable

CPU = torch.device("cpu")


def spec_of(*windows: int, **fields) -> ModelSpec:
    defaults = {
        "architecture": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": len(windows),
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 8,
        "max_position": 256,
        "norm_eps": 1e-5,
        "windows": windows,
    }
    return ModelSpec(**(defaults | fields))


def alternating(period: int, count: int, window: int = 32) -> ModelSpec:
    """Every ``period``-th layer sees all, as in Gemma 3 and Cohere 2."""
    return spec_of(*(0 if layer % period == period - 1 else window for layer in range(count)))


def sizes(spec: ModelSpec) -> list[tuple[int, int]]:
    return [(group.window, len(group.layers)) for group in kv_groups(spec)]


def test_a_model_that_sees_all_and_one_that_sees_one_window_have_one_group():
    assert sizes(spec_of(num_layers=5)) == sizes(spec_of(0, 0, 0, 0, 0)) == [(0, 5)]
    assert sizes(spec_of(32, 32, 32)) == [(32, 3)]


@pytest.mark.parametrize(
    ("period", "count", "expected"),
    [
        (2, 26, [(0, 13), (32, 13)]),
        (4, 64, [(0, 16), *[(32, 16)] * 3]),
        (6, 26, [(0, 4), *[(32, 4)] * 4, *[(32, 3)] * 2]),
        (6, 62, [(0, 10), *[(32, 9)] * 4, *[(32, 8)] * 2]),
    ],
    ids=["Gemma 2 2B", "EXAONE 4 32B", "Gemma 3 1B", "Gemma 3 27B"],
)
def test_groups_of_known_layouts_are_few_and_padded_little(period, count, expected):
    assert sizes(alternating(period, count)) == expected


@pytest.mark.parametrize("windows", [(0, *[8] * 31), (0, 0, *[8] * 90, *[16] * 5), tuple(range(1, 41)), (0, 4, 8, 8)])
def test_every_layer_is_in_one_group_of_its_window_and_tables_stay_few(windows):
    spec = spec_of(*windows)
    groups = kv_groups(spec)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(spec.window_of(layer) == group.window for group in groups for layer in group.layers)
    assert len(groups) <= max(MOST_TABLES, len(set(windows)))
    reach = [group.window or 10_000 for group in groups]
    assert reach == sorted(reach, reverse=True)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [alternating(6, 26), alternating(4, 16), alternating(2, 7)])
def test_layers_of_a_stage_have_places_of_their_own_and_stages_share_the_groups_evenly(spec, stages):
    groups = kv_groups(spec)
    largest = max(len(group.layers) for group in groups)
    for part in Shards.of(spec, pp=stages).layers:
        places = locate(groups, part.start, part.stop)
        assert len(set(places)) == part.size
        assert all(layer in groups[place.group].layers for layer, place in enumerate(places, part.start))
        assert num_pairs(places) <= -(-largest // stages) + 1
        counts = Counter(place.group for place in places)
        assert num_pairs(places) == max(counts.values())


def test_a_block_has_room_for_the_largest_group():
    spec = alternating(6, 12)
    cache = KVCache(spec, Shards.of(spec).of_rank(), 3, 4, torch.float32, CPU)
    assert len(cache.keys) == len(cache.values) == 2
    assert bytes_per_token(spec, Shards.of(spec).of_rank(), torch.float32) == 2 * 2 * 2 * 4 * 4
    stage = Shards.of(spec, pp=2).of_rank(pp_rank=1)
    assert len(KVCache(spec, stage, 3, 4, torch.float32, CPU).keys) == 1
    assert cache.windows == {0: 0, 1: 32, 2: 32, 3: 32, 4: 32, 5: 32}


class Told:
    """A backend that keeps what it was asked."""

    def __init__(self):
        self.prepared, self.calls = [], []

    def prepare(self, batch, block_size, group, window):
        self.prepared.append((group, window))
        return batch.write_to[group]

    def forward(self, q, k, v, keys, values, metadata, **how):
        self.calls.append((keys, values, metadata.tolist(), how))
        return q


def test_each_layer_attends_with_its_groups_table_and_in_its_own_tensors():
    spec = spec_of(8, 0, 8, 0)
    stage = Shards.of(spec, pp=2).of_rank(pp_rank=1)  # layers 2 and 3
    cache = KVCache(spec, stage, 9, 4, torch.float32, CPU)
    table = SlotTable(num_slots=1, max_model_len=8, block_size=4, num_groups=2)
    init = SlotInit(slot=0, epoch=1, token_ids=column([1] * 5), num_prompt=5, choice=0, params=SamplingParams(seed=0))
    plan = StepPlan(
        step_id=1,
        admissions=[init],
        table_slots=column([0] * 4),
        table_groups=column([0, 0, 1, 1]),
        table_indices=column([0, 1, 0, 1]),
        table_blocks=column([1, 2, 3, 4]),
        chunk_slots=column([0]),
        chunk_epochs=column([1]),
        chunk_starts=column([0]),
        chunk_lens=column([5]),
        chunk_tokens=column([-1]),
        chunk_takes=column([0]),
        chunk_writes=column([1]),
        num_drafts=column([0]),
    )
    table.apply(plan)
    backend = Told()
    attn = StepAttention.of(backend, cache, build_batch(plan, table, 4))
    assert backend.prepared == [(0, 0), (1, 8)]
    q = torch.zeros(5, 2, 4)
    attn(0, q, q, q, scale=0.5, window=8, softcap=30.0)
    attn(1, q, q, q, scale=0.5)
    (keys, values, writes, how), (other_keys, _, other_writes, other_how) = backend.calls
    assert (keys is cache.keys[0], values is cache.values[0], other_keys is cache.keys[0]) == (True, True, True)
    assert writes == [12, 13, 14, 15, 16]
    assert other_writes == [4, 5, 6, 7, 8]
    assert how == {"scale": 0.5, "window": 8, "softcap": 30.0, "sinks": None}
    assert (other_how["window"], other_how["softcap"]) == (0, 0.0)
    with pytest.raises(AssertionError, match="another window"):
        attn(1, q, q, q, scale=0.5, window=8)


def test_a_pool_with_fewer_blocks_than_groups_is_refused():
    with pytest.raises(StartupError, match="--num-kv-blocks"):
        fit_length(256, None, 0)
