"""Blocks and turns that many share: cases 37 and 38."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cases.stack import stack

COMPLETIONS = "/v1/completions"
BODY = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}


def answer(done: dict, index: int = 0) -> tuple[list[int], int]:
    return done["choices"][index]["token_ids"], done["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_case_37_a_warm_cache_changes_no_answer_and_never_holds_the_whole_prompt(folder):
    lengths = (15, 16, 17, 31, 32, 33)
    prompts = [[60 + length + at for at in range(length)] for length in lengths]
    with stack(folder, replica={"enable_prefix_caching": False}) as off:
        expected = [answer(off.complete(prompt, **BODY))[0] for prompt in prompts]
        forked = [off.complete(prompt, n=3, temperature=1, seed=2, **BODY)["choices"] for prompt in prompts]
    with stack(folder, rank={"num_kv_blocks": 24, "max_model_len": 128}) as running:
        for prompt, ids, choices in zip(prompts, expected, forked, strict=True):
            assert answer(running.complete(prompt, **BODY)) == (ids, 0)
            most = (len(prompt) - 1) // 16 * 16
            assert answer(running.complete(prompt, **BODY)) == (ids, most)
            with ThreadPoolExecutor(8) as many:
                for done in many.map(lambda _, prompt=prompt: running.complete(prompt, **BODY), range(8)):
                    assert done["choices"][0]["token_ids"] == ids
            three = running.complete(prompt, n=3, temperature=1, seed=2, **BODY)["choices"]
            assert [c["token_ids"] for c in three] == [c["token_ids"] for c in choices]
        for other in range(8):  # fills the pool with others
            running.complete([200 + other] * 100, max_tokens=20, ignore_eos=True)
        for prompt, ids in zip(prompts, expected, strict=True):
            assert answer(running.complete(prompt, **BODY))[0] == ids
        running.at_rest()


def test_case_37_a_block_that_choices_share_is_copied_at_the_first_write(folder):
    with stack(folder) as running:
        before = running.loads()[0].block_copies_total
        running.complete(list(range(60, 80)), n=3, temperature=1, seed=1, max_tokens=4, ignore_eos=True)
        running.at_rest()
        assert running.loads()[0].block_copies_total - before in (2, 3)


def test_case_37_salts_keep_prompts_apart(tiny):
    prompt = list(range(100, 140))
    for salt in ("a", "b", None):
        assert answer(tiny.complete(prompt, cache_salt=salt, **BODY))[1] == 0
        assert answer(tiny.complete(prompt, cache_salt=salt, **BODY))[1] == 32


def test_case_37_two_keys_share_no_block(folder, tmp_path):
    keys = tmp_path / "keys.yaml"
    entry = "- sha256: {}\n  tenant: {}\n"
    keys.write_text("".join(entry.format(hashlib.sha256(key.encode()).hexdigest(), key) for key in ("one", "two")))
    with stack(folder, router={"api_key_file": str(keys), "open_routes": ("/health/ready",)}) as running:
        prompt = list(range(100, 140))

        def ask(key: str) -> tuple[list[int], int]:
            response = running.client.post(
                COMPLETIONS,
                json={"prompt": prompt, "temperature": 0} | BODY,
                headers={"authorization": f"Bearer {key}"},
            )
            return answer(response.json())

        ids, cached = ask("one")
        assert cached == 0
        assert ask("one") == (ids, 32)
        assert ask("two") == (ids, 0)
        assert ask("two") == (ids, 32)
        assert running.client.post(COMPLETIONS, json={"prompt": prompt}).status_code == 401


def test_case_38_a_priority_is_refused_where_nothing_heeds_it(folder):
    with stack(folder, replica={"scheduling_policy": "fcfs"}) as running:
        error = running.refused(COMPLETIONS, prompt=[5], priority=5)
        assert error["param"] == "priority"
        assert "first come" in error["message"]
        running.complete(priority=0, max_tokens=2)
        running.at_rest()


def test_case_38_the_lowest_and_latest_give_way_and_nobody_loses_a_token(folder):
    with stack(folder, rank={"num_kv_blocks": 20, "max_model_len": 128}) as running:
        body = {"n": 2, "temperature": 1, "seed": 4} | BODY | {"max_tokens": 64}
        prompts = [list(range(40 + number, 72 + number)) for number in range(5)]
        alone = [[c["token_ids"] for c in running.complete(prompt, **body)["choices"]] for prompt in prompts]
        with ThreadPoolExecutor(5) as many:
            jobs = [many.submit(running.complete, p, priority=at - 2, **body) for at, p in enumerate(prompts)]
            assert [[c["token_ids"] for c in job.result()["choices"]] for job in jobs] == alone
        running.at_rest()
        assert running.loads()[0].preemptions_total > 0


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, "high", True])
def test_case_38_a_priority_that_is_no_number_is_refused(tiny, value):
    assert tiny.refused(COMPLETIONS, prompt=[5], priority=value)["param"] == "priority"
