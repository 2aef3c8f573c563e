"""What is told of the prompt's ids: each once, in order, before the first id, however the prompt came to be computed.

The fake executor says of position p what only position p can have; Drive collects it in the order of the deltas.
"""

import pytest

from paceline.proto.step import TAKE_NONE, TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE
from tests.cluster.engine.fakes import Drive, expected_ids, expected_prompt_logprobs, make_request, make_scheduler


def drive(num_blocks: int = 64, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **config))


@pytest.mark.parametrize("config", [{}, {"depth": 2}, {"num_stages": 2, "depth": 2}, {"windows": (0, 24)}])
@pytest.mark.parametrize("budget", [1, 7, 64, 100_000])
@pytest.mark.parametrize("num_prompt", [1, 2, 16, 17, 40])
def test_every_id_from_the_second_on_is_told_once_in_any_chunks_on_any_pipeline(num_prompt, budget, config):
    d = drive(max_num_batched_tokens=budget, **config)
    request = make_request("a", num_prompt, 6, prompt_logprobs=2)
    d.add(request)
    d.run()
    assert d.told.get("a", []) == expected_prompt_logprobs(request)
    assert d.emitted["a", 0] == expected_ids(request)


def test_rows_take_them_only_where_a_prompt_id_follows():
    d = drive(max_num_batched_tokens=16)
    d.add(make_request("a", 40, 3, prompt_logprobs=0))
    d.run()
    takes = [plan.chunk_takes[0] for plan in d.executor.plans]
    both = TAKE_PROMPT_LOGPROBS | TAKE_SAMPLE
    assert takes == [TAKE_PROMPT_LOGPROBS, TAKE_PROMPT_LOGPROBS, both, TAKE_SAMPLE, TAKE_SAMPLE]
    d = drive(max_num_batched_tokens=39)  # the prompt's last token has no prompt id behind it
    d.add(make_request("a", 40, 2, prompt_logprobs=0))
    d.run()
    assert [plan.chunk_takes[0] for plan in d.executor.plans] == [TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE, TAKE_SAMPLE]


def test_nobody_who_did_not_ask_is_told_anything():
    d = drive(max_num_batched_tokens=16)
    d.add(make_request("a", 40, 3), make_request("b", 40, 3, prompt_logprobs=1))
    d.run()
    assert list(d.told) == ["b"]


def test_they_read_nothing_from_the_prefix_cache_and_leave_their_blocks_there():
    d = drive()
    for name, asked, cached in (("cold", None, 0), ("asks", 1, 0), ("again", 1, 0), ("warm", None, 32)):
        request = make_request(name, list(range(40)), 3, prompt_logprobs=asked)
        d.add(request)
        d.run()
        assert d.endings[name, 0].usage.num_cached == cached
        assert d.told.get(name, []) == (expected_prompt_logprobs(request) if asked else [])
    d = drive()
    for name, asked, cached in (("asks", 1, 0), ("warm", None, 32)):
        d.add(make_request(name, list(range(40)), 3, prompt_logprobs=asked))
        d.run()
        assert d.endings[name, 0].usage.num_cached == cached


@pytest.mark.parametrize("depth", [1, 2])
def test_of_several_choices_the_first_tells_and_the_prompt_is_computed_once(depth):
    d = drive(max_num_batched_tokens=16, depth=depth)
    request = make_request("a", 40, 4, n=3, prompt_logprobs=1)
    d.add(request)
    d.run()
    assert d.told["a"] == expected_prompt_logprobs(request)
    assert [d.emitted["a", choice] for choice in range(3)] == [expected_ids(request, choice) for choice in range(3)]
    assert d.scheduler.counters.computed == 40 + 3 + 2 * 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_one_that_is_preempted_in_its_prompt_goes_on_telling_where_it_was(caching, depth):
    d = drive(12, max_model_len=192, max_num_batched_tokens=8, depth=depth, enable_prefix_caching=caching)
    d.add(*(make_request(f"early{i}", 8, 40) for i in range(3)))
    while len(d.emitted) < 3:
        d.step()
    request = make_request("late", 100, 4, prompt_logprobs=1)
    d.add(request)
    while not d.scheduler.counters.preemptions:
        d.step()
    told, num_plans = len(d.told["late"]), len(d.executor.plans)
    assert 16 < told < 99
    d.run()
    assert d.told["late"] == expected_prompt_logprobs(request)
    assert d.emitted["late", 0] == expected_ids(request)
    again = next(init for plan in d.executor.plans[num_plans:] for init in plan.admissions if init.num_prompt == 100)
    rows = [row for plan in d.executor.plans[num_plans:] for row in rows_of(plan, again.slot, again.epoch)]
    # What has been told may come out of the cache, as far as it is still there, and is not taken again.
    assert (0 < rows[0][0] <= told) if caching else rows[0][0] == 0
    assert all(bool(take & TAKE_PROMPT_LOGPROBS) == (told < end and start < 99) for start, end, take in rows)


def rows_of(plan, slot: int, epoch: int) -> list[tuple[int, int, int]]:
    """(start, end, take)"""
    columns = zip(
        plan.chunk_slots, plan.chunk_epochs, plan.chunk_starts, plan.chunk_lens, plan.chunk_takes, strict=True
    )
    return [(start, start + length, take) for s, e, start, length, take in columns if (s, e) == (slot, epoch)]


def test_one_that_is_preempted_later_tells_nothing_again_and_may_read_the_cache():
    d = drive(20, max_model_len=256)
    requests = [make_request(f"r{i}", 32, 64, prompt_logprobs=1) for i in range(8)]
    d.add(*requests)
    d.run(2000)
    assert d.scheduler.counters.preemptions
    for request in requests:
        assert d.told[request.request_id] == expected_prompt_logprobs(request)
        assert d.emitted[request.request_id, 0] == expected_ids(request)
    readmitted = [plan for plan in d.executor.plans if any(len(init.token_ids) > 32 for init in plan.admissions)]
    assert readmitted
    assert all(take in (TAKE_NONE, TAKE_SAMPLE) for plan in readmitted for take in plan.chunk_takes)


def test_a_request_that_resumes_with_ids_has_been_told_and_one_without_any_has_not():
    for resume, wanted in (((5, 6),), 0), (((),), 39):
        d = drive()
        d.emitted["a", 0] = list(resume[0])
        d.add(make_request("a", 40, 6, resume=resume, prompt_logprobs=1))
        d.run()
        assert len(d.told.get("a", [])) == wanted


def test_an_abort_in_the_prompt_ends_what_is_told():
    d = drive(max_num_batched_tokens=16, depth=2)
    d.add(make_request("a", 100, 4, n=2, prompt_logprobs=1))
    d.step()
    d.step()
    told = list(d.told["a"])
    d.take(d.scheduler.abort("a"))
    d.run()
    d.scheduler.check()
    assert d.told["a"] == told
    assert len(d.endings) == 2


def test_a_rank_that_tells_too_little_is_found_out():
    d = drive()
    d.add(make_request("a", 40, 4, prompt_logprobs=1))
    d.submit()
    result = d.executor.collect()
    del result.prompt_logprobs[0][-1]
    with pytest.raises(AssertionError, match="38 prompt logprobs"):
        d.scheduler.commit(result, 0.0)
