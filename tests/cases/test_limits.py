"""What does not fit is refused before anything is computed: cases 20, 21, 23 and 36."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.cases.stack import stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("length", [256, 257, 300, 5000])
@pytest.mark.parametrize("more", [{"max_tokens": 1}, {}], ids=repr)
def test_case_20_a_prompt_that_leaves_no_room_is_refused_and_never_cut(tiny, length, more):
    error = tiny.refused(COMPLETIONS, prompt=[5] * length, **more)
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize("more", [{"max_tokens": 1}, {}, {"max_tokens": None}], ids=repr)
def test_case_20_one_token_of_room_gives_one_token(tiny, more):
    done = tiny.complete((5,) * 255, ignore_eos=True, **more)
    assert done["choices"][0]["finish_reason"] == "length"
    assert (done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]) == (255, 1)
    stream = tiny.stream(COMPLETIONS, prompt=[5] * 255, ignore_eos=True, **more)
    assert stream.reasons() == ["length"]


@pytest.mark.parametrize(("prompt", "asked"), [(8, 2045), (8, 2041), (1, 2048), (2000, 49)])
def test_case_21_prompt_and_answer_that_do_not_fit_are_refused_with_the_numbers_that_hold(folder, prompt, asked):
    with long_stack(folder) as running:
        error = running.refused(COMPLETIONS, prompt=[5] * prompt, max_tokens=asked)
        numbers = [int(word.strip(".,;:()")) for word in error["message"].split() if word.strip(".,;:()").isdigit()]
        assert sorted(numbers) == sorted([2048, prompt, asked])
        assert error["code"] == "context_length_exceeded"
        running.complete((5,) * prompt, max_tokens=min(2048 - prompt, 2), ignore_eos=True)
        running.at_rest()


def long_stack(folder, **rank):
    import json
    import shutil

    own = folder.parent / "long"
    if not own.exists():
        shutil.copytree(folder, own)
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return stack(own, rank={"max_model_len": 2048} | rank)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (-1, 10**9, 10**30, "5", 1.5, 2.0, True, [5], {})),
        *(("n", value) for value in (0, -1, 10**6, 10**30, "2", 1.5, True)),
        *(("logprobs", value) for value in (-1, 21, 10**9, "1", 1.5)),
        ("best_of", 0),
        ("echo", "yes"),
        ("stream", 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 10**6),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("priority", 2**31),
        ("user", 5),
        ("cache_salt", 5),
        ("ignore_eos", "no"),
    ],
)
def test_case_23_counts_that_cannot_be_are_refused_by_name_at_once(tiny, field, value):
    """In how short a time, the prover looks."""
    memory = psutil.Process().memory_info().rss
    error = tiny.refused(COMPLETIONS, **{"prompt": [5], field: value})
    assert error["param"] == field
    assert psutil.Process().memory_info().rss - memory < 50 << 20


def test_case_23_best_of_less_than_n_is_refused_and_null_is_unset(tiny):
    assert tiny.refused(COMPLETIONS, prompt=[5], n=3, best_of=2)["param"] == "best_of"
    assert tiny.complete(max_tokens=None, n=None, stop=None, logprobs=None, seed=None, logit_bias=None, top_p=None)


def test_case_36_what_the_pool_can_never_hold_is_refused_with_both_numbers_and_blocks_nobody(folder):
    with stack(folder, rank={"num_kv_blocks": 8, "max_model_len": 128}) as running:
        error = running.refused(COMPLETIONS, prompt=[5] * 130, max_tokens=1)
        assert error["code"] in ("context_length_exceeded", "kv_pool_exceeded")
        running.at_rest()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"logprobs": 2},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 1, "seed": 11},
        {"min_tokens": 60},
        {"prompt_logprobs": 1},
        {"structured_outputs": {"regex": "[a-z ]{64}"}},
    ],
    ids=repr,
)
def test_case_36_a_pool_that_forces_preemption_changes_no_answer(folder, more):
    prompts = [[40 + number + at for at in range(32)] for number in range(8)]
    body = {"max_tokens": 64, "ignore_eos": True, "return_token_ids": True} | more
    with stack(folder, rank={"num_kv_blocks": 20, "max_model_len": 128}) as running:
        lone = [running.complete(prompt, **body)["choices"] for prompt in prompts]
        before = running.loads()[0].preemptions_total
        with ThreadPoolExecutor(8) as many:
            crowd = list(many.map(lambda prompt: running.complete(prompt, **body)["choices"], prompts))
        running.at_rest()
        assert running.loads()[0].preemptions_total > before
        for one, other in zip(lone, crowd, strict=True):
            assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in other]
            assert [choice["text"] for choice in one] == [choice["text"] for choice in other]
