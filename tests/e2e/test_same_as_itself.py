"""One set of prompts, every way to run it: the ids may not change. Each way proves by counters that it was taken."""

import random
from itertools import pairwise

import pytest

NUM_TOKENS = 24
LENGTHS = (15, 16, 17, 31, 32, 33)
TEXT = (
    "The lighthouse stood at the very end of the land, where the road stopped and the sea began. Every evening, when "
    "the light went on, the keeper wrote down the names of the ships that passed, and every morning he read them again."
)


@pytest.fixture(scope="module")
def prompts(bench) -> dict[int, list[int]]:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_str(bench.card.tokenizer_json).encode(TEXT).ids
    assert len(ids) > max(LENGTHS)
    return {length: ids[:length] for length in LENGTHS}


@pytest.fixture(scope="module")
def alone(bench, prompts) -> dict[int, list[int]]:
    """Each prompt by itself, in one chunk, without a prefix cache."""
    expected = {}
    for length, ids in prompts.items():
        bench.new(enable_prefix_caching=False, max_num_batched_tokens=100_000)
        expected[length] = bench.run(bench.request("a", ids, NUM_TOKENS))["a", 0].ids
        counters = bench.scheduler.counters
        assert counters.computed == length + NUM_TOKENS - 1
        assert counters.cached == counters.preemptions == 0
    return expected


def together(bench, prompts, **params) -> dict[int, list[int]]:
    answers = bench.run(*(bench.request(str(n), ids, NUM_TOKENS, **params) for n, ids in prompts.items()))
    return {n: answers[str(n), 0].ids for n in prompts}


def needed(prompts) -> int:
    return sum(length + NUM_TOKENS - 1 for length in prompts)


def chunks_of(bench, count: int) -> int:
    """Rows that computed prompt tokens, less one for each of ``count`` prompts."""
    rows = sum(sum(length > 1 for length in plan.chunk_lens) for plan in bench.executor.plans)
    return rows - count


@pytest.mark.parametrize("depth", [1, 2])
def test_with_the_prefix_cache_cold_and_warm(bench, prompts, alone, depth):
    bench.new(depth=depth)
    for length, ids in prompts.items():  # one after the other, longest last: each finds the one before
        got = bench.run(bench.request(f"cold{length}", ids, NUM_TOKENS))
        assert got[f"cold{length}", 0].ids == alone[length]
    cold = bench.scheduler.counters.cached
    assert together(bench, prompts) == alone
    counters = bench.scheduler.counters
    assert counters.cached - cold == sum((length - 1) // 16 * 16 for length in LENGTHS)
    assert counters.computed == 2 * needed(prompts) - counters.cached + counters.discarded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 64, 100_000])
def test_in_chunks_of_any_budget(bench, prompts, alone, budget, depth):
    bench.new(enable_prefix_caching=False, max_num_batched_tokens=budget, depth=depth)
    assert together(bench, prompts) == alone
    assert bench.scheduler.counters.computed == needed(prompts) + bench.scheduler.counters.discarded
    if budget == 7:
        assert chunks_of(bench, len(prompts)) > len(prompts)
    if budget == 64:
        assert chunks_of(bench, len(prompts)) > 0
    if budget == 100_000:
        assert chunks_of(bench, len(prompts)) == 0


def test_however_prompts_are_cut_beside_streams(bench, prompts, alone):
    cuts = []
    for target in (0.0, 1e-6):  # no step is as fast
        bench.new(enable_prefix_caching=False, max_num_batched_tokens=64, target_itl=target)
        assert together(bench, prompts) == alone
        cuts.append(chunks_of(bench, len(prompts)))
    assert cuts[1] > cuts[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_among_fifteen_others(bench, prompts, alone, depth):
    rng = random.Random(5)
    for length in (17, 32):
        bench.new(depth=depth)
        others = [
            bench.request(f"o{i}", [rng.randrange(100, 49000) for _ in range(rng.randint(5, 60))], rng.randint(5, 40))
            for i in range(15)
        ]
        mine = bench.request("mine", prompts[length], NUM_TOKENS)
        assert bench.run(*others[:8], mine, *others[8:])["mine", 0].ids == alone[length]
        assert max(len(plan.chunk_slots) for plan in bench.executor.plans) == 16


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_in_a_pool_so_small_that_sequences_are_preempted(bench, prompts, alone, depth, caching):
    bench.new(num_blocks=11, max_model_len=100, depth=depth, enable_prefix_caching=caching)
    assert together(bench, prompts) == alone
    counters = bench.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed > 0
    if not caching:
        assert counters.computed == needed(prompts) + counters.recomputed + counters.discarded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_as_choice_0_of_3(bench, prompts, alone, depth, caching):
    bench.new(depth=depth, enable_prefix_caching=caching)
    assert together(bench, prompts, n=3) == alone
    counters = bench.scheduler.counters
    assert counters.copies == 2 * sum(length % 16 != 0 for length in LENGTHS)
    forked = 2 * NUM_TOKENS * len(prompts)
    assert counters.computed == needed(prompts) - counters.cached + forked + counters.discarded


def test_all_greedy_choices_of_one_prompt_are_equal(bench, prompts, alone):
    answers = bench.new().run(bench.request("a", prompts[33], NUM_TOKENS, n=3))
    assert [answers["a", choice].ids for choice in range(3)] == [alone[33]] * 3


def test_with_physical_blocks_scattered(bench, prompts, alone):
    order = list(range(1, bench.loaded.num_blocks + 1))
    random.Random(3).shuffle(order)
    bench.new(free_ids=order)
    assert together(bench, prompts) == alone
    used = [block for plan in bench.executor.plans for block in plan.table_blocks]
    assert sum(abs(a - b) != 1 for a, b in pairwise(used)) > len(used) * 0.9


@pytest.mark.parametrize("way", ["chunks", "preempted", "depth 2", "among others", "fork"])
def test_seeded_sampling_draws_the_same_ids_however_it_is_run(bench, prompts, way):
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 77}
    bench.new(enable_prefix_caching=False, max_num_batched_tokens=100_000)
    lone = bench.run(bench.request("a", prompts[33], NUM_TOKENS, **params))["a", 0].ids
    config = {
        "chunks": {"max_num_batched_tokens": 7},
        "preempted": {"num_blocks": 11, "max_model_len": 100},
        "depth 2": {"depth": 2},
    }.get(way, {})
    bench.new(**config)
    others = [] if way in ("chunks", "fork") else [bench.request(f"o{n}", prompts[n], 30) for n in LENGTHS[:5]]
    mine = bench.request("a", prompts[33], NUM_TOKENS, **params, n=3 if way == "fork" else 1)
    answers = bench.run(*others, mine)
    assert answers["a", 0].ids == lone
    if way == "preempted":
        assert bench.scheduler.counters.preemptions > 0
    if way == "fork":
        assert answers["a", 1].ids != lone
