"""Log-probabilities of a prompt's ids: those of transformers, however the prompt is cut and whoever computes it."""

import pytest
import torch

from paceline.proto.request import SamplingParams, TokenLogprobs
from paceline.proto.step import TAKE_NONE, TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE
from paceline.worker.runner import SCORED_AT_ONCE
from tests.models import UNEVEN, tiny_llama_folder
from tests.worker.crew import gang_config
from tests.worker.drive import Driver, Row, rank_of

K = 3
ASKS = SamplingParams(seed=0, temperature=0.0, prompt_logprobs=K)
PROMPT = [(31 * i + i * i) % 384 for i in range(2 * SCORED_AT_ONCE + 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("prompts") / "model", **UNEVEN)


@pytest.fixture(scope="module")
def expected(folder) -> torch.Tensor:
    """[ids - 1, vocab], of the ids from the second on."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


@pytest.fixture(scope="module")
def rank(folder):
    return rank_of(folder)


@pytest.fixture
def driver(rank):
    driver = Driver(rank)
    yield driver
    for slot in list(driver.tables):
        driver.release(slot)
    driver.step()


def told_of(driver: Driver, chunk: int, beside: bool = False) -> list[TokenLogprobs]:
    """The prompt in chunks; ``beside``: with another that asks for nothing in every step."""
    driver.admit(0, PROMPT, ASKS)
    driver.admit(1, PROMPT)
    told = []
    for start in range(0, len(PROMPT), chunk):
        length = min(chunk, len(PROMPT) - start)
        take = TAKE_PROMPT_LOGPROBS | (TAKE_SAMPLE if start + length == len(PROMPT) else TAKE_NONE)
        rows = [Row(1, start, length, take & TAKE_SAMPLE)] if beside else []
        result = driver.step(*rows, Row(0, start, length, take))
        assert set(result.prompt_logprobs) <= {len(rows)}
        told += result.prompt_logprobs.get(len(rows), [])
    driver.release(0)
    driver.release(1)
    return told


def check(told: list[TokenLogprobs], expected: torch.Tensor) -> None:
    assert len(told) == len(PROMPT) - 1
    top = expected.topk(K)
    for i, token in enumerate(told):
        assert token.logprob == pytest.approx(float(expected[i, PROMPT[i + 1]]), abs=1e-4)
        assert token.top_logprobs == pytest.approx(top.values[i].tolist(), abs=1e-4)
        assert token.top_ids == top.indices[i].tolist()


@pytest.mark.parametrize("chunk", [1, 16, SCORED_AT_ONCE + 1, len(PROMPT)])
def test_they_are_those_of_transformers_in_chunks_of_any_length(driver, expected, chunk):
    check(told_of(driver, chunk), expected)


def test_a_neighbour_that_asks_for_nothing_changes_nothing(driver, expected):
    check(told_of(driver, 50, beside=True), expected)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_of_a_gang_tell_the_same(crew, folder, expected, tp, pp):
    check(told_of(Driver(crew.gang(gang_config(folder, tp, pp))), 70), expected)


def test_a_prompt_may_be_computed_for_them_alone(driver):
    driver.admit(0, PROMPT, ASKS)
    result = driver.step(Row(0, 0, len(PROMPT), TAKE_PROMPT_LOGPROBS))
    assert (result.num_ids.tolist(), result.ids.tolist()) == ([0], [])
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 1


def test_each_row_gets_as_many_beside_as_it_asked_for(driver):
    for slot, k in enumerate((0, 5)):
        driver.admit(slot, PROMPT[:9], SamplingParams(seed=0, prompt_logprobs=k))
    told = driver.step(*(Row(slot, 0, 9, TAKE_PROMPT_LOGPROBS) for slot in (1, 0))).prompt_logprobs
    assert {len(token.top_ids) for token in told[0]} == {5}
    assert {len(token.top_ids) for token in told[1]} == {0}
    assert [token.logprob for token in told[0]] == pytest.approx([token.logprob for token in told[1]], abs=1e-6)


def test_ids_behind_the_prompt_are_none_of_it(driver):
    """A sequence that was preempted computes emitted ids anew."""
    driver.admit(0, PROMPT[:20], ASKS, num_prompt=12)
    result = driver.step(Row(0, 0, 20, TAKE_PROMPT_LOGPROBS | TAKE_SAMPLE))
    assert len(result.prompt_logprobs[0]) == 11
    assert driver.step(Row(0, 20, 1, TAKE_PROMPT_LOGPROBS | TAKE_SAMPLE)).prompt_logprobs == {}


def test_a_row_whose_logits_are_not_finite_faults_and_tells_nothing(driver):
    model = driver.rank.runner.model
    compute = model.logits

    def broken(hidden):
        logits = compute(hidden)
        if len(logits) > 1:
            logits[0] = float("nan")
        return logits

    driver.admit(0, PROMPT[:9], ASKS)
    driver.admit(1, PROMPT[:9])
    model.logits = broken
    try:
        result = driver.step(Row(0, 0, 9, TAKE_PROMPT_LOGPROBS), Row(1, 0, 9))
    finally:
        del model.logits
    assert result.faults == {0: "the model's logits are not finite"}
    assert result.prompt_logprobs == {}
    assert result.num_ids.tolist() == [0, 1]
