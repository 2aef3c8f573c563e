"""A rank does what plans say: the same ids however a sequence is cut, batched, scattered, forked or sent ahead."""

import logging

import pytest
import torch
from llguidance import LLMatcher

from paceline.proto.codec import decode_plan, encode_step
from paceline.proto.errors import StartupError
from paceline.proto.paging import Paging
from paceline.proto.request import SamplingParams
from paceline.proto.step import TAKE_NONE, StepPlan
from paceline.proto.units import GIB
from paceline.worker.config import RankConfig
from paceline.worker.grammar import NO_WAY_ON
from paceline.worker.memory import FreeMemory, check_weights, fit_length, plan_pool
from paceline.worker.rank import Rank, resolve_device, resolve_dtype
from tests.models import tiny_llama_folder
from tests.worker.drive import GREEDY, Driver, Row, rank_of
from tests.worker.families import FAMILIES, WINDOW

SEEDED = SamplingParams(seed=11, temperature=0.8, top_p=0.95)
BOUND = SamplingParams(
    seed=12, min_tokens=3, grammar=LLMatcher.grammar_from_regex("([a-z]{2,5}[0-9]){3}"), frequency_penalty=0.3
)
PROMPTS = [[(7 * i + 13 * j) % 384 for j in range(n)] for i, n in enumerate((5, 15, 16, 17, 40, 33))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("rank") / "model")


@pytest.fixture(scope="module")
def rank(folder) -> Rank:
    return rank_of(folder)


@pytest.fixture
def driver(rank):
    driver = Driver(rank)
    yield driver
    for slot in list(driver.tables):
        driver.release(slot)
    driver.step()


def test_greedy_ids_are_those_of_transformers(folder, driver):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([prompt])
        greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        out = model.generate(ids, max_new_tokens=20, **greedy)
        assert driver.generate(0, prompt, 20) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chunks_do_not_change_ids(driver, params):
    for prompt in PROMPTS:
        whole = driver.generate(2, prompt, 12, params)
        for chunk in (1, 7, 16):
            assert driver.generate(5, prompt, 12, params, chunk=chunk) == whole


@pytest.mark.parametrize("params", [GREEDY, SEEDED, BOUND], ids=["greedy", "seeded", "grammar"])
def test_a_mixed_batch_equals_each_alone(driver, params):
    alone = [driver.generate(0, prompt, 10, params) for prompt in PROMPTS]
    # Sequence i joins at step i, half of its prompt at a time, while the others decode.
    slots = range(len(PROMPTS))
    done, drawn, joined = [0] * len(PROMPTS), [[] for _ in PROMPTS], set()
    step = 0
    while any(len(ids) < 10 for ids in drawn):
        rows = []
        for i in [i for i in slots if i <= step and len(drawn[i]) < 10]:
            if i not in joined:
                driver.admit(i, PROMPTS[i], params)
                joined.add(i)
            left = len(PROMPTS[i]) - done[i]
            if left > 0:
                length = min(left, len(PROMPTS[i]) // 2 + 1)
                rows.append(Row(i, done[i], length, take=int(length == left)))
            else:
                rows.append(Row(i, done[i], 1, token=drawn[i][-1]))
        result = driver.step(*rows)
        ids = iter(result.ids)
        for row, count in zip(rows, result.num_ids, strict=True):
            done[row.slot] += row.length
            drawn[row.slot] += [next(ids) for _ in range(count)]
        step += 1
    assert drawn == alone


def test_a_step_sent_ahead_reads_the_id_from_the_table(driver):
    for params in (GREEDY, SEEDED, BOUND):
        expected = driver.generate(0, PROMPTS[4], 20, params)
        driver.admit(1, PROMPTS[4], params)
        n = len(PROMPTS[4])
        pending = [driver.submit(Row(1, 0, n))] + [driver.submit(Row(1, n + i, 1)) for i in range(19)]
        assert all(step.is_done() for step in pending)  # on a CPU
        results = [step.result() for step in pending]
        assert [result.ids[0] for result in results] == expected
        assert not any(result.faults for result in results)
        driver.release(1)


def test_the_result_has_one_row_per_chunk_in_the_plans_order(driver):
    for slot, prompt in enumerate(PROMPTS[:4]):
        driver.admit(slot, prompt)
    expected = [driver.generate(4 + i, prompt, 1)[0] for i, prompt in enumerate(PROMPTS[:4])]
    lens = [len(prompt) for prompt in PROMPTS[:4]]
    rows = [Row(0, 0, lens[0]), Row(1, 0, lens[1], TAKE_NONE), Row(3, 0, lens[3]), Row(2, 0, 3, TAKE_NONE)]
    plan = driver.plan(*rows)
    result = driver.rank.execute(plan).result()
    assert result.step_id == plan.step_id
    assert result.epochs == plan.chunk_epochs
    assert result.num_ids.tolist() == [1, 0, 1, 0]
    assert result.ids.tolist() == [expected[0], expected[3]]
    assert (result.logprobs, result.faults) == ({}, {})


def test_a_forked_row_asks_for_logits_and_writes_nothing(driver):
    prompt = PROMPTS[4]  # 40 ids: two full blocks and a partial one
    parent = driver.admit(0, prompt, SEEDED)
    driver.prefill(parent, len(prompt))
    shared, partial = driver.tables[parent][:2], driver.tables[parent][2]
    cache = driver.rank.runner.cache
    before = [cache.keys[layer][shared].clone() for layer in range(2)]
    expected = [driver.generate(1, prompt, 8, SEEDED, choice=choice) for choice in (1, 2)]
    assert expected[0] != expected[1]

    own = [driver.free.pop(), driver.free.pop()]
    for child, block in zip((2, 3), own, strict=True):
        driver.admit(child, prompt, SEEDED, choice=child - 1, shared_blocks=(*shared, block))
        driver.copy_block(partial, block)
    last = len(prompt) - 1
    drawn = [[i] for i in driver.step(Row(2, last, 1, write=False), Row(3, last, 1, write=False)).ids]
    for step in range(7):
        result = driver.step(*(Row(child, len(prompt) + step, 1, token=drawn[child - 2][-1]) for child in (2, 3)))
        for ids, i in zip(drawn, result.ids, strict=True):
            ids.append(i)
    assert drawn == expected
    assert all(torch.equal(cache.keys[layer][shared], before[layer]) for layer in range(2))
    for child in (2, 3):
        driver.tables[child] = driver.tables[child][2:]  # the shared blocks are the parent's


def test_a_prefix_hit_computes_only_the_rest(driver):
    prompt = PROMPTS[4]
    expected = driver.generate(0, prompt, 6)
    first = driver.admit(1, prompt)
    driver.prefill(first, len(prompt))
    second = driver.admit(2, prompt, shared_blocks=driver.tables[1][:2])
    drawn = list(driver.step(Row(second, 32, len(prompt) - 32)).ids)
    for step in range(5):
        drawn += driver.step(Row(second, len(prompt) + step, 1)).ids
    assert drawn == expected
    driver.tables[second] = driver.tables[second][2:]


PENAL = SamplingParams(seed=3, temperature=1.0, frequency_penalty=0.7, repetition_penalty=1.2)


@pytest.mark.parametrize("params", [PENAL, BOUND], ids=["penalties", "grammar"])
def test_a_preempted_sequence_goes_on_with_the_ids_it_would_have_drawn(driver, params):
    prompt = PROMPTS[3]
    expected = driver.generate(0, prompt, 14, params)
    driver.admit(1, prompt, params)
    drawn = list(driver.prefill(1, len(prompt)).ids)
    drawn += [driver.step(Row(1, len(prompt) + i, 1)).ids[0] for i in range(5)]
    driver.release(1)
    driver.generate(2, PROMPTS[5], 4)  # somebody else takes its blocks
    driver.admit(6, prompt + drawn, params, num_prompt=len(prompt))
    drawn += driver.prefill(6, len(prompt) + 6, 7).ids
    drawn += [driver.step(Row(6, len(prompt) + 6 + i, 1)).ids[0] for i in range(7)]
    assert drawn == expected


def test_logprobs_ride_only_on_rows_that_asked(driver):
    driver.admit(0, PROMPTS[0], SamplingParams(seed=0, temperature=0.0, logprobs=2))
    driver.admit(1, PROMPTS[1])
    result = driver.step(Row(1, 0, 15), Row(0, 0, 5))
    assert set(result.logprobs) == {1}
    [token] = result.logprobs[1]
    assert token.top_ids[0] == result.ids[1]
    assert token.top_logprobs[0] == pytest.approx(token.logprob)
    assert len(token.top_ids) == 2
    assert decode_plan(encode_step(StepPlan(step_id=1))) == StepPlan(step_id=1)


def test_a_row_with_broken_logits_faults_and_its_neighbours_go_on(driver):
    model = driver.rank.runner.model
    compute = model.logits

    def broken(hidden):
        logits = compute(hidden)
        logits[0] = float("nan")
        return logits

    expected = driver.generate(0, PROMPTS[1], 1)
    driver.admit(1, PROMPTS[0])
    driver.admit(2, PROMPTS[1])
    model.logits = broken
    try:
        result = driver.step(Row(1, 0, 5), Row(2, 0, 15))
    finally:
        del model.logits
    assert result.faults == {0: "the model's logits are not finite"}
    assert result.num_ids.tolist() == [0, 1]
    assert result.ids.tolist() == expected


def test_a_row_whose_grammar_cannot_be_followed_faults_and_its_neighbours_go_on(driver):
    expected = driver.generate(0, PROMPTS[1], 1)
    driver.admit(1, PROMPTS[0], SamplingParams(seed=0, grammar="no grammar {"))
    driver.admit(2, PROMPTS[1])
    result = driver.step(Row(2, 0, 15), Row(1, 0, 5))
    assert result.faults == {1: NO_WAY_ON}
    assert (result.num_ids.tolist(), result.ids.tolist()) == ([1, 0], expected)


def test_a_plan_without_rows_runs(driver):
    result = driver.step()
    assert len(result.num_ids) == len(result.ids) == 0


def test_a_sequence_may_fill_its_context_to_the_last_id(folder):
    driver = Driver(rank_of(folder, max_model_len=32, num_kv_blocks=4))
    assert len(driver.generate(0, PROMPTS[3], 32 - 17)) == 15


# -- start -------------------------------------------------------------------------------------------------------------


def test_the_start_tells_weights_kv_bytes_blocks_and_what_fits(folder, caplog):
    phases = []
    with caplog.at_level(logging.INFO, logger="paceline.worker"):
        rank = Rank(
            RankConfig(model=str(folder), served_model_name="tiny", dtype="float32", num_kv_blocks=33),
            on_phase=lambda phase, seconds: phases.append((phase, seconds)),
        )
    assert [phase for phase, _ in phases] == ["open", "weights", "kv pool", "card", "warm-up"]
    assert all(seconds >= 0 for _, seconds in phases)
    # 2 layers x 2 KV heads x 16 dims x keys and values x 4 bytes
    assert rank.memory.kv_bytes_per_token == rank.card.kv_bytes_per_token == 512
    assert (rank.num_kv_blocks, rank.memory.full_length_requests) == (33, 2)
    assert "KV 512 bytes per token, 33 blocks of 16 tokens" in caplog.text
    assert "2 requests of 256 tokens fit" in caplog.text


def test_the_warm_up_leaves_no_trace(rank):
    table = rank.runner.table
    assert not table.block_table.any()
    assert (table.slots["epoch"] == -1).all()
    assert not rank.runner.cache.keys[0][1:].any() or rank._plans  # only plans of tests have written


def test_bf16_runs(folder):
    driver = Driver(rank_of(folder, dtype="bfloat16"))
    assert len(driver.generate(0, PROMPTS[4], 8, chunk=7)) == 8


def test_an_explicit_pool_wins_and_a_share_is_of_what_is_free():
    block = 4096
    memory = FreeMemory(GIB, is_host=True)
    assert plan_pool(block, 16, 50, 0.5, memory) == 50
    assert plan_pool(block, 16, None, 0.5, memory) == GIB // 2 // block
    assert plan_pool(block, 16, None, None, memory) == int(0.3 * GIB) // block
    big = FreeMemory(400 * GIB, is_host=True)
    assert plan_pool(block, 16, None, None, big) == 4 * GIB // block
    assert plan_pool(block, 16, None, None, FreeMemory(GIB, is_host=False)) == int(0.9 * GIB) // block


def test_the_pool_takes_no_more_than_the_ranks_memory_leaves():
    memory = FreeMemory(GIB, is_host=True)
    assert plan_pool(4096, 16, None, 0.5, memory, limit=10 * 4096) == 10
    assert plan_pool(4096, 16, None, 0.5, memory, limit=GIB - 1) == GIB // 2 // 4096
    with pytest.raises(
        StartupError, match=r"--num-kv-blocks 11 needs 0\.04 MiB .*; 0\.04 MiB is what --rank-memory leaves"
    ):
        plan_pool(4096, 16, 11, None, memory, limit=10 * 4096)


def test_the_models_own_length_is_lowered_to_the_pool_and_an_explicit_one_kept(caplog):
    with caplog.at_level(logging.INFO, logger="paceline.worker"):
        assert fit_length(128, None, 48) == 48
        assert "lowered from 128 to 48" in caplog.text
        assert fit_length(128, 100, 48) == 100
        assert "longer requests are refused" in caplog.text
    assert fit_length(128, None, 128) == 128
    assert fit_length(128, 64, 128) == 64


def test_where_all_layers_have_a_window_a_sequence_may_be_longer_than_the_pool(tmp_path):
    FAMILIES["mistral"].make(tmp_path / "model")
    fields = {"max_num_batched_tokens": 32, "num_threads": 1}
    needed = Paging(16, (WINDOW,), 32).num_blocks(256)
    rank = rank_of(tmp_path / "model", num_kv_blocks=needed, **fields)
    assert needed < 256 // 16
    assert (rank.memory.max_model_len, rank.memory.full_length_requests) == (256, 1)
    rank = rank_of(tmp_path / "model", num_kv_blocks=needed - 1, **fields)
    assert rank.memory.max_model_len == (needed - 1) * 16


def test_a_pool_that_cannot_be_is_refused_with_numbers():
    memory = FreeMemory(4000, is_host=True)
    with pytest.raises(StartupError, match="cannot hold one block: a block of 16 tokens takes 4096 bytes"):
        plan_pool(4096, 16, None, 0.9, memory)
    with pytest.raises(StartupError, match="--num-kv-blocks 50 needs"):
        plan_pool(4096, 16, 50, None, memory)
    with pytest.raises(StartupError, match="--num-kv-blocks is 0"):
        plan_pool(4096, 16, 0, None, memory)


def test_weights_that_do_not_fit_are_refused_with_both_numbers_and_what_would_help():
    memory = FreeMemory(8 * GIB, is_host=True)
    check_weights(8 * GIB - 4096, 4096, None, memory)
    check_weights(2 * GIB - 4096, 4096, 2 * GIB, memory)
    helps = r"; a larger --tensor-parallel-size or --pipeline-parallel-size shares them among more ranks\."
    with pytest.raises(StartupError, match=r"needs 3\.00 GiB .*, but --rank-memory is 2\.50 GiB" + helps):
        check_weights(3 * GIB, 4096, int(2.5 * GIB), memory)
    with pytest.raises(StartupError, match=r"needs 12\.00 GiB .*, but 8\.00 GiB of its memory is free" + helps):
        check_weights(12 * GIB, 4096, 16 * GIB, memory)


def test_unknown_devices_and_dtypes_are_refused():
    cpu = torch.device("cpu")
    with pytest.raises(StartupError, match="--dtype float8"):
        resolve_dtype("float8", cpu)
    with pytest.raises(StartupError, match="--device warp"):
        resolve_device("warp")
    assert resolve_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
