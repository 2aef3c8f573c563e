"""Whole engines on models with windows: ids as transformers gives them, well past the window, however they are run.

Mistral has one window for all layers, Gemma 3 layers that see a window and others that see all.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.proto.paging import Paging
from tests.e2e.engine import Bench
from tests.worker.families import FAMILIES

WINDOW, NUM_TOKENS = 32, 40
CLOSE = 1e-3  # of the oracle's two best logits: nearer ones could change places by rounding
KINDS = {
    "mistral": {"sliding_window": WINDOW},
    "gemma3": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
}
WINDOWS = {"mistral": (WINDOW,), "gemma3": (0, WINDOW, WINDOW)}


@dataclass(frozen=True)
class Made:
    name: str
    folder: Path
    prompts: list[list[int]]
    ids: list[list[int]]  # that follow each prompt


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    """Without a cache of any kind."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > CLOSE, "a near tie: take another seed"
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("windows") / request.param
    model = FAMILIES[request.param].make(folder, **KINDS[request.param])
    # Of one beginning, and beyond it all longer than the window: 33 to 150 ids.
    shared = [3 + (7 * k + k * k) % 380 for k in range(150)]
    prompts = [[*shared[: 33 + 39 * i], *(3 + (31 * i + 5 * k) % 380 for k in range(9 * (i % 2)))] for i in range(4)]
    return Made(request.param, folder, prompts, [greedy(model, prompt) for prompt in prompts])


@pytest.fixture(scope="module")
def bench(made):
    bench = Bench(made.folder, max_model_len=256, num_kv_blocks=128)
    yield bench
    bench.close()


def ids_of(bench: Bench, made: Made, **params) -> list[list[int]]:
    """Of choice 0, all prompts at once."""
    requests = [bench.request(str(i), prompt, NUM_TOKENS, **params) for i, prompt in enumerate(made.prompts)]
    answers = bench.run(*requests)
    return [answers[str(i), 0].ids for i in range(len(requests))]


def test_the_card_names_the_groups(bench, made):
    assert bench.card.windows == WINDOWS[made.name]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_past_the_window_in_chunks_of_any_budget(bench, made, budget, depth):
    bench.new(max_num_batched_tokens=budget, depth=depth, enable_prefix_caching=False)
    assert ids_of(bench, made) == made.ids
    assert bench.scheduler.pool.num_referenced == 0


def test_with_the_prefix_cache_cold_and_warm(bench, made):
    bench.new(max_num_batched_tokens=64)
    assert ids_of(bench, made) == made.ids
    cold = bench.scheduler.counters.cached
    assert ids_of(bench, made) == made.ids
    warm = bench.scheduler.counters.cached - cold
    assert warm == sum((len(prompt) - 1) // 16 * 16 for prompt in made.prompts)


def test_one_after_the_other_each_finds_what_the_ones_before_left(bench, made):
    bench.new(max_num_batched_tokens=64)
    for prompt, ids in zip(made.prompts, made.ids, strict=True):
        assert bench.run(bench.request("a", prompt, NUM_TOKENS))["a", 0].ids == ids
    assert bench.scheduler.counters.cached > 0


@pytest.mark.parametrize("caching", [False, True])
def test_in_a_pool_so_small_that_sequences_are_preempted_and_with_forks(bench, made, caching):
    groups = bench.card.windows
    num_blocks = Paging(16, groups, 64).num_blocks(208) + 4 * len(groups)
    bench.new(
        num_blocks=num_blocks, max_model_len=208, depth=2, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    requests = [bench.request(str(i), prompt, NUM_TOKENS, n=2) for i, prompt in enumerate(made.prompts)]
    answers = bench.run(*requests)
    for i, ids in enumerate(made.ids):
        assert answers[str(i), 0].ids == answers[str(i), 1].ids == ids
    assert bench.scheduler.counters.preemptions > 0


def test_blocks_in_use_follow_the_windows(bench, made):
    bench.new(max_num_batched_tokens=64)
    prompt = made.prompts[0]
    bench.scheduler.add(bench.request("a", prompt, 200), 0.0)
    most: dict[int, int] = {}
    while bench.scheduler.has_work:
        bench.engine.step()
        for seq in bench.scheduler.running:
            for group, block_ids in enumerate(seq.block_ids):
                count = sum(block != 0 for block in block_ids)
                if seq.num_planned > len(prompt) + 16:
                    most[group] = max(most.get(group, 0), count)
    whole = -(-(len(prompt) + 199) // 16)
    print(f"in use: {made.name}, {len(prompt) + 199} ids, blocks of 16 by group at most {list(most.values())}")
    assert most == {group: WINDOW // 16 + 1 if window else whole for group, window in enumerate(bench.card.windows)}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("made", ["gemma3"], indirect=True)
def test_ranks_of_a_gang_give_the_same_ids_cold_and_warm(made, tp, pp):
    bench = Bench(made.folder, max_model_len=256, num_kv_blocks=128, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    try:
        bench.new(max_num_batched_tokens=64)
        assert ids_of(bench, made) == made.ids
        assert ids_of(bench, made) == made.ids
        assert bench.scheduler.counters.cached > 0
    finally:
        bench.close()
