"""How ids are drawn: cases 11, 12, 14 and 15."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cases.stack import stack

COMPLETIONS = "/v1/completions"


def ids(done: dict, index: int = 0) -> list[int]:
    return done["choices"][index]["token_ids"]


def test_case_11_a_seed_draws_the_same_alone_in_a_crowd_preempted_and_on_another_replica(folder):
    body = {
        "prompt": list(range(40, 72)),
        "temperature": 1,
        "max_tokens": 64,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with stack(folder, num_replicas=2, rank={"num_kv_blocks": 20, "max_model_len": 128}) as running:
        alone = [ids(running.complete(**body, seed=seed)) for seed in range(3)]
        assert len(set(map(tuple, alone))) == 3
        assert [ids(running.complete(**body, seed=seed)) for seed in range(3)] == alone  # the other replica's turn
        with ThreadPoolExecutor(17) as many:
            crowd = [many.submit(running.complete, **body) for _ in range(14)]
            again = [many.submit(running.complete, **body, seed=seed) for seed in range(3)]
            assert [ids(one.result()) for one in again] == alone
            assert all(len(ids(one.result())) == 64 for one in crowd)
        assert sum(load.preemptions_total for load in running.loads()) > 0
        running.at_rest()


def test_case_12_greedy_ids_are_those_of_a_lone_prompt_in_any_batch(tiny):
    body = {"prompt": "The quick brown fox", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    alone = ids(tiny.complete(**body))
    with ThreadPoolExecutor(8) as many:
        assert [ids(done) for done in many.map(lambda _: tiny.complete(**body), range(8))] == [alone] * 8
    assert [ids(tiny.complete(**body, n=8), index) for index in range(8)] == [alone] * 8


A, B = 40, 41


def penal(position: int, id: int) -> dict[int, float]:
    return {A: 5.0, B: 4.0} if position == 0 else {A: 4.0, B: 5.0}


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"frequency_penalty": 0}, [A, B, B, B]),
        ({"frequency_penalty": -2}, [A, A, A, A]),
        ({"frequency_penalty": 2}, [A, B, B, A]),
        ({"presence_penalty": 2}, [A, B, B, B]),
        ({"presence_penalty": -2}, [A, A, A, A]),
        ({"repetition_penalty": 1.6}, [A, B, B, B]),
    ],
    ids=repr,
)
def test_case_14_penalties_act_on_what_was_generated(folder, penalties, expected):
    with stack(folder, script=penal) as running:
        assert ids(running.complete(max_tokens=4, return_token_ids=True, **penalties)) == expected
        both = running.complete(max_tokens=4, n=2, return_token_ids=True, **penalties)
        assert [ids(both, 0), ids(both, 1)] == [expected] * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 2.5),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 1.5),
        ("seed", 2**64),
        ("temperature", "hot"),
        ("temperature", True),
    ],
)
def test_case_14_values_out_of_range_are_refused_by_name(tiny, field, value):
    assert tiny.refused(COMPLETIONS, **{"prompt": [5], field: value})["param"] == field


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_case_14_a_tiny_temperature_is_greedy_and_makes_no_nan(tiny, temperature):
    body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    assert ids(tiny.complete(**body, temperature=temperature, seed=1)) == ids(tiny.complete(**body))


def vocabulary(running) -> int:
    return running.card.vocab_size


@pytest.mark.parametrize(
    "fields",
    [
        *({"logit_bias": {key: 1}} for key in ("-1", "V", "999999", "AI", "5.5", "", "1e2", "٣")),
        *({"logit_bias": {"5": value}} for value in (100.5, -101, None, "1", True)),
        *({"logit_bias": value} for value in ([], "5", 5)),
        *({"stop_token_ids": value} for value in ([999_999], [-1], ["V"], ["5"], [1.5], [None], 5)),
        *({"prompt": value} for value in (["V"], [-1], [5, 2**40], [5, None], [5, "a"], [True])),
    ],
    ids=repr,
)
def test_case_15_ids_out_of_range_are_refused_by_name_and_hurt_nobody(tiny, fields):
    (name, value), size = next(iter(fields.items())), vocabulary(tiny)
    if isinstance(value, dict):
        value = {str(size) if key == "V" else key: bias for key, bias in value.items()}
    elif value == ["V"]:
        value = [size]
    usual = tiny.complete("neighbour", max_tokens=24, ignore_eos=True, return_token_ids=True)
    beside: list[dict] = []
    neighbour = threading.Thread(
        target=lambda: beside.append(tiny.complete("neighbour", max_tokens=24, ignore_eos=True, return_token_ids=True))
    )
    neighbour.start()
    assert tiny.refused(COMPLETIONS, **({"prompt": [5]} | {name: value}))["param"].split(".")[0] == name
    neighbour.join()
    assert ids(beside[0]) == ids(usual)


def test_case_15_the_last_id_is_one(tiny):
    last = vocabulary(tiny) - 1
    done = tiny.complete([last], max_tokens=3, logit_bias={str(last): 100}, stop_token_ids=[3], return_token_ids=True)
    assert ids(done) == [last] * 3
