"""When a choice ends: at no ids at all, not before min_tokens, where its grammar does."""

import pytest

from paceline.proto.errors import ContextLengthExceeded, InvalidRequest, KVPoolExceeded
from paceline.proto.request import FINISH_LENGTH, FINISH_STOP, Usage
from paceline.proto.step import TAKE_NONE
from tests.cluster.engine.fakes import (
    Drive,
    FakeExecutor,
    expected_ids,
    expected_prompt_logprobs,
    make_request,
    make_scheduler,
    scripted,
)

EOS = 50_500


def drive(num_blocks: int = 64, executor: FakeExecutor | None = None, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **({"eos_ids": (EOS,)} | config)), executor)


# -- max_tokens 0 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"depth": 2}, {"num_stages": 3, "depth": 3}, {"windows": (24,)}])
@pytest.mark.parametrize("budget", [1, 16, 39, 100_000])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_prompt", [1, 16, 40])
def test_without_any_tokens_the_prompt_is_computed_and_every_choice_ends_by_length(num_prompt, n, budget, config):
    d = drive(max_num_batched_tokens=budget, **config)
    request = make_request("a", num_prompt, 0, n=n, prompt_logprobs=1)
    d.add(request)
    d.run()
    assert all(not ids for ids in d.emitted.values())
    assert sorted(d.endings) == [("a", choice) for choice in range(n)]
    for ending in d.endings.values():
        assert (ending.finish_reason, ending.usage) == (FINISH_LENGTH, Usage(num_prompt, 0, 0))
    assert d.told.get("a", []) == expected_prompt_logprobs(request)
    counters = d.scheduler.counters
    assert (counters.computed, counters.discarded, counters.generated) == (num_prompt, 0, 0)
    assert counters.finished == {FINISH_LENGTH: n}
    assert d.scheduler.pool.num_referenced == 0
    assert not d.scheduler.has_work


def test_what_was_computed_for_no_tokens_is_found_by_the_next_prompt():
    d = drive()
    d.add(make_request("a", list(range(48)), 0))
    d.run()
    assert {take for plan in d.executor.plans for take in plan.chunk_takes} == {TAKE_NONE}
    d.add(make_request("b", list(range(49)), 2))
    d.run()
    assert d.endings["b", 0].usage.num_cached == 48


def test_who_wants_no_tokens_may_fill_the_context_and_the_pool_with_its_prompt():
    d = drive(4, max_model_len=64)
    d.add(make_request("a", 64, 0))
    d.run()
    assert d.endings["a", 0].finish_reason == FINISH_LENGTH
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens: the prompt has 65 and max_tokens asks for 0 more"):
        d.add(make_request("b", 65, 0))
    with pytest.raises(KVPoolExceeded, match="need 5 KV blocks"):
        drive(4).add(make_request("b", 65, 0))


def test_nothing_can_be_resumed_where_no_tokens_are_wanted():
    with pytest.raises(InvalidRequest, match="resume"):
        drive().add(make_request("a", 20, 0, resume=((5,),)))


def test_neighbours_go_on_when_one_wants_no_tokens():
    d = drive(20, max_num_batched_tokens=16, depth=2, max_model_len=256)
    requests = [make_request(f"r{i}", 32, (0, 64)[i % 2], n=1 + i % 3) for i in range(8)]
    d.add(*requests)
    d.run(2000)
    for request in requests:
        for choice in range(request.params.n):
            assert d.emitted.get((request.request_id, choice), []) == expected_ids(request, choice)


# -- min_tokens --------------------------------------------------------------------------------------------------------


def ends_at(*indices: int):
    """A script that says an end token at these indices of what is generated."""
    return lambda prompt, choice, position: (
        EOS if position - len(prompt) in indices else scripted(prompt, choice, position)
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_before_min_tokens_ids_neither_an_end_token_nor_a_stop_id_ends_a_choice(depth):
    executor = FakeExecutor(ends_at(2, 5, 9), eos_ids=())  # a rank that bans nothing
    d = drive(executor=executor, depth=depth)
    request = make_request("a", 20, 30, min_tokens=6)
    d.add(request)
    d.run()
    assert len(d.emitted["a", 0]) == 10
    assert d.endings["a", 0].finish_reason == FINISH_STOP


def test_the_first_id_after_min_tokens_may_end_it():
    d = drive(executor=FakeExecutor(ends_at(6)))
    d.add(make_request("a", 20, 30, min_tokens=6))
    d.run()
    assert d.emitted["a", 0][-1] == EOS
    assert len(d.emitted["a", 0]) == 7


def test_min_tokens_counts_what_was_emitted_before_a_resumption():
    request = make_request("a", 20, 30, min_tokens=6)
    told = tuple(expected_ids(request)[:5])
    d = drive(executor=FakeExecutor(ends_at(5, 6)))
    d.emitted["a", 0] = list(told)
    d.add(make_request("a", 20, 30, min_tokens=6, resume=(told,)))
    d.run()
    assert len(d.emitted["a", 0]) == 7


def test_a_minimum_that_can_never_be_reached_is_refused():
    with pytest.raises(InvalidRequest, match=r"min_tokens is 31.*30 tokens") as refusal:
        drive().add(make_request("a", 20, 30, min_tokens=31))
    assert refusal.value.param == "min_tokens"
    with pytest.raises(InvalidRequest, match=r"min_tokens is 45.*44 tokens"):
        drive(4).add(make_request("a", 20, None, min_tokens=45))
    drive().add(make_request("a", 20, 30, min_tokens=30))


# -- grammars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_comes_to_its_end_ends_the_choice_whatever_else_was_asked(depth, options):
    d = drive(depth=depth)
    d.add(make_request("a", 20, 30, grammar="4", **options))
    d.run()
    assert d.emitted["a", 0] == [*expected_ids(make_request("a", 20, 4)), EOS]
    assert d.endings["a", 0].finish_reason == FINISH_STOP


def test_a_stop_id_that_a_grammar_forces_before_min_tokens_does_not_end_it():
    forced = expected_ids(make_request("a", 20, 30))[2]
    for min_tokens, num_ids in ((20, 9), (3, 9), (2, 3)):
        d = drive(executor=FakeExecutor(ends_at(8)))
        d.add(make_request("a", 20, 30, grammar="99", min_tokens=min_tokens, stop_ids=(forced,)))
        d.run()
        assert len(d.emitted["a", 0]) == num_ids
