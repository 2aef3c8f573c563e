"""Real ranks in real processes: together they compute what one rank computes, and each holds its share only."""

import itertools

import pytest
from llguidance import LLMatcher

from paceline.proto.errors import StartupError
from paceline.proto.request import SamplingParams
from paceline.worker.parallel import Groups, Place
from paceline.worker.rank import Rank
from paceline.worker.replay import replay
from tests.models import EVEN, UNEVEN, tiny_llama_folder, write_gguf
from tests.worker.crew import gang_config, weight_bytes
from tests.worker.drive import Driver, Row, rank_of
from tests.worker.test_models_llama import Recorder

BOUND = SamplingParams(seed=12, min_tokens=3, grammar=LLMatcher.grammar_from_regex("([a-z]{2,5}[0-9]){3}"))
SEEDED = SamplingParams(seed=11, temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3)
PROMPTS = [[(7 * i + 13 * j) % 384 for j in range(n)] for i, n in enumerate((5, 17, 40))]
NUM_IDS = 10

LAYOUTS = {
    "TP 2, 9 heads over 3 KV heads, tied, biases": (UNEVEN, 2, 1),
    "TP 3, 4 heads over 2 KV heads": (EVEN, 3, 1),
    "PP 2, 3 layers, tied, biases": (UNEVEN, 1, 2),
    "TP 2 x PP 2": (EVEN, 2, 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    return {id(shape): tiny_llama_folder(path / str(i), **shape) for i, shape in enumerate((EVEN, UNEVEN))}


@pytest.fixture(params=LAYOUTS)
def layout(request, crew, folders):
    """A gang, and one rank that holds its whole model."""
    shape, tp, pp = LAYOUTS[request.param]
    folder = folders[id(shape)]
    return crew.gang(gang_config(folder, tp, pp)), rank_of(folder)


def released(driver: Driver) -> None:
    for slot in list(driver.tables):
        driver.release(slot)
    driver.step()


def together(driver: Driver, params: SamplingParams, chunk: int) -> list[list[int]]:
    """All prompts in one batch, each in chunks, each id carried by the next plan."""
    for slot, prompt in enumerate(PROMPTS):
        driver.admit(slot, prompt, params)
    done, drawn = [0] * len(PROMPTS), [[] for _ in PROMPTS]
    while any(len(ids) < NUM_IDS for ids in drawn):
        rows = []
        for slot, prompt in enumerate(PROMPTS):
            left = len(prompt) - done[slot]
            if left > 0:
                rows.append(Row(slot, done[slot], min(left, chunk), take=int(left <= chunk)))
            elif len(drawn[slot]) < NUM_IDS:
                rows.append(Row(slot, done[slot], 1, token=drawn[slot][-1]))
        result = driver.step(*rows)
        ids = iter(result.ids)
        for row, count in zip(rows, result.num_ids, strict=True):
            done[row.slot] += row.length
            drawn[row.slot] += [next(ids) for _ in range(count)]
    released(driver)
    return drawn


PARAMS = {"greedy": SamplingParams(seed=0, temperature=0.0), "seeded": SEEDED, "grammar": BOUND}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_logits_and_ids_are_those_of_one_rank(layout, params):
    gang, alone = layout
    recorder = Recorder(alone)
    for chunk in (7, 64):
        expected = together(Driver(alone), params, chunk)
        assert together(Driver(gang), params, chunk) == expected
        theirs, ours = recorder.take(), gang.take()
        difference = (ours - theirs).abs().max().item()
        print(f"chunk {chunk}: logits up to {theirs.abs().max():.1f}, largest difference {difference:.1e}")
        assert ours.shape == theirs.shape
        assert difference <= 1e-5 * theirs.abs().max().item()


@pytest.mark.parametrize("layout", [name for name, (_, _, pp) in LAYOUTS.items() if pp == 1], indirect=True)
def test_a_step_sent_ahead_reads_the_id_that_another_rank_drew(layout):
    gang, alone = layout
    driver, start = Driver(gang), len(PROMPTS[2])
    for params in (SEEDED, BOUND):
        expected = Driver(alone).generate(0, PROMPTS[2], NUM_IDS, params)
        driver.admit(1, PROMPTS[2], params)
        pending = [driver.submit(Row(1, 0, start))] + [driver.submit(Row(1, start + i, 1)) for i in range(NUM_IDS - 1)]
        assert [step.result().ids[0] for step in pending] == expected
        released(driver)


def test_logprobs_come_from_the_whole_vocabulary(layout):
    gang, alone = layout
    told = []
    for rank in (alone, gang):
        driver = Driver(rank)
        driver.admit(0, PROMPTS[1], SamplingParams(seed=0, temperature=0.0, logprobs=5))
        told.append(driver.prefill(0, len(PROMPTS[1])).logprobs[0][0])
        released(driver)
    assert told[0].top_ids == told[1].top_ids
    assert told[1].top_logprobs == pytest.approx(told[0].top_logprobs, abs=1e-4)


def test_the_time_of_the_model_is_told(layout):
    gang, _ = layout
    driver = Driver(gang)
    driver.admit(0, PROMPTS[1])
    assert driver.prefill(0, len(PROMPTS[1])).model_seconds > 0
    released(driver)


@pytest.mark.parametrize("layout", ["TP 2 x PP 2"], indirect=True)
def test_four_ranks_hold_a_quarter_each_of_layers_and_cache(layout):
    gang, alone = layout
    layers = weight_bytes(alone.runner.model.model.layers)
    for held, layer_bytes in zip(gang.held, gang.layer_bytes, strict=True):
        assert layer_bytes <= 0.27 * layers
        assert held.kv_bytes_per_token <= 0.27 * alone.memory.kv_bytes_per_token
        assert held.kv_bytes == 128 * 16 * held.kv_bytes_per_token
    assert [held.rank for held in gang.held] == [0, 1, 2, 3]
    assert sum(held.kv_bytes_per_token for held in gang.held) == alone.memory.kv_bytes_per_token


@pytest.mark.parametrize("layout", ["TP 2 x PP 2"], indirect=True)
def test_every_rank_says_which_part_it_holds(layout):
    gang, alone = layout
    assert "rank 2 of 4 (stage 1: layers 2-3 of 4, heads 0-1 of 4, KV heads 0-0 of 2)" in gang.lines[2]
    assert "stage" not in alone.describe()


def test_the_pool_and_the_context_are_those_of_the_smallest_rank(crew, folders):
    """Three layers in two stages: a block of the first takes twice the bytes of one of the second."""
    token_bytes = 2 * 3 * 16 * 4  # of one layer
    weights = rank_of(folders[id(UNEVEN)]).memory.weight_bytes
    gang = crew.gang(gang_config(folders[id(UNEVEN)], 1, 2, num_kv_blocks=None, rank_memory=(weights + 2**20) / 2**30))
    held = gang.held[0]
    assert held.kv_bytes_per_token == 2 * token_bytes
    room = weights + 2**20 - held.weight_bytes
    assert gang.num_kv_blocks == room // (16 * 2 * token_bytes)
    assert gang.held[1].kv_bytes == held.kv_bytes // 2


def test_a_model_too_large_for_one_rank_runs_on_two(crew, folders):
    folder = folders[id(EVEN)]
    limit = 0.7 * rank_of(folder).memory.weight_bytes / 2**30
    with pytest.raises(StartupError, match=r"needs 0.* MiB \(0.* MiB of weights, .*\), but --rank-memory is 0.* MiB"):
        rank_of(folder, rank_memory=limit)
    expected = Driver(rank_of(folder)).generate(0, PROMPTS[1], 5)
    gang = crew.gang(gang_config(folder, 2, 1, rank_memory=limit, num_kv_blocks=None))
    assert Driver(gang).generate(0, PROMPTS[1], 5) == expected


def test_gguf_blocks_that_heads_cut_through_are_read_alike(crew, tmp_path):
    """16 columns a head, quantized in blocks of 32: the second of three ranks begins within one."""
    folder = tiny_llama_folder(tmp_path / "model", hidden_size=96, num_attention_heads=6, head_dim=16)
    file = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    expected = Driver(rank_of(file)).generate(0, PROMPTS[2], NUM_IDS)
    gang = crew.gang(gang_config(file, 3, 1))
    assert Driver(gang).generate(0, PROMPTS[2], NUM_IDS) == expected


def test_bf16_ranks_agree_with_one_rank_as_far_as_bf16_goes(crew, folders):
    alone = rank_of(folders[id(EVEN)], dtype="bfloat16")
    recorder = Recorder(alone)
    gang = crew.gang(gang_config(folders[id(EVEN)], 2, 2, dtype="bfloat16"))
    for rank in (alone, gang):
        driver = Driver(rank)
        driver.admit(0, PROMPTS[2])
        driver.prefill(0, len(PROMPTS[2]), 7)
        released(driver)
    one, four = recorder.take(), gang.take()
    assert (one - four).abs().mean() < 0.05 * one.std()


def test_what_a_rank_of_a_gang_dumps_runs_again_on_one_rank(crew, folders, tmp_path):
    gang = crew.gang(gang_config(folders[id(EVEN)], 2, 2, dump_dir=str(tmp_path)))
    driver = Driver(gang)
    driver.admit(0, PROMPTS[1], SEEDED)
    drawn = list(driver.prefill(0, len(PROMPTS[1])).ids)
    for i in range(6):
        drawn += driver.step(Row(0, len(PROMPTS[1]) + i, 1, token=drawn[-1])).ids
    driver.epochs[0] += 1  # as no scheduler would: every rank refuses the plan
    with pytest.raises(AssertionError, match="another epoch"):
        driver.step(Row(0, 0, 1))
    dumps = list(tmp_path.glob("*.dump"))
    assert len(dumps) == 4
    for dump in dumps:
        steps = list(itertools.islice(replay(dump), 7))
        assert [step.ids[0] for step in steps] == drawn


@pytest.mark.parametrize(
    ("tp", "pp", "told"),
    [(5, 1, "--tensor-parallel-size 5 .* 1 to 4 work"), (1, 5, "--pipeline-parallel-size 5 .* 1 to 4 work")],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(folders, tp, pp, told):
    config = gang_config(folders[id(EVEN)], tp, pp)
    with pytest.raises(StartupError, match=told):
        Rank(config, groups=Groups(Place.of(0, tp, pp)))
