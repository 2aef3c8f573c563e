"""Cases 35 to 38 inside the engine, with the numbers of the cases: what HTTP cannot count.

Ids and blocks on the fake executor, which reads every row back from its blocks; what a model computes on a tiny one.
"""

import pytest

from paceline.proto.errors import InvalidRequest, KVPoolExceeded
from paceline.proto.request import FINISH_ABORT, FINISH_LENGTH
from tests.cluster.engine.fakes import Drive, expected_ids, expected_prompt_logprobs, make_request, make_scheduler
from tests.e2e.engine import Bench

BLOCK = 16
LENGTHS = (15, 16, 17, 31, 32, 33)


def drive(num_blocks: int, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **config))


@pytest.fixture(scope="module")
def bench(folder):
    bench = Bench(folder, max_model_len=256, num_kv_blocks=128)
    yield bench
    bench.close()


# -- 35: an abort in every state ---------------------------------------------------------------------------------------


def at_rest(d: Drive) -> None:
    """The aftercheck: nothing is held, and the next request runs."""
    scheduler = d.scheduler
    assert not scheduler.has_work
    assert scheduler.pool.num_referenced == 0
    assert (len(scheduler.running), len(scheduler.waiting)) == (0, 0)
    after = make_request("after", 20, 4)
    d.add(after)
    d.run(20)
    assert d.emitted["after", 0] == expected_ids(after)
    scheduler.check()


def steps_until(d: Drive, happened) -> None:
    while not happened():
        assert d.step()
        d.scheduler.check()  # free + cached + referenced = POOL


def last_one_is(state: str, d: Drive) -> bool:
    [seq] = [seq for choices in d.scheduler._requests.values() for seq in choices if seq.request_id == "victim"][:1]
    return {
        "waiting": not seq.started,
        "in a chunk": 0 < seq.num_computed < seq.num_prompt,
        "running": seq.num_generated == 3,
        "preempted": seq.started and seq.slot < 0,
    }[state]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", ["waiting", "in a chunk", "running", "preempted"])
def test_case_35_an_abort_in_any_state_ends_each_choice_once(state, n, prompt_logprobs, depth):
    d = drive(14, depth=depth, max_num_batched_tokens=24, max_model_len=192, max_num_seqs=8)
    others = [make_request(f"o{i}", 30, 40) for i in range(2 if state != "waiting" else 8)]
    d.add(*others, make_request("victim", 60, 60, n=n, prompt_logprobs=prompt_logprobs))
    steps_until(d, lambda: last_one_is(state, d))
    d.take(d.scheduler.abort("victim"))
    d.scheduler.check()
    assert d.scheduler.abort("victim") == []
    assert d.scheduler.abort("nobody") == []
    d.run(1000)
    assert [d.endings["victim", choice].finish_reason for choice in range(n)] == [FINISH_ABORT] * n
    for other in others:
        assert d.emitted[other.request_id, 0] == expected_ids(other)
    at_rest(d)


@pytest.mark.parametrize(("max_tokens", "n"), [(0, 1), (0, 3), (1, 1), (1, 3), (5, 1)])
def test_case_35_an_abort_in_the_step_that_would_have_ended_it(max_tokens, n):
    d = drive(14, depth=2)
    d.add(make_request("victim", 30, max_tokens, n=n, prompt_logprobs=1))
    [seq] = d.scheduler.waiting.all()
    while seq.num_planned < seq.compute_len:
        if not d.submit():
            d.step()
    assert d.scheduler.num_in_flight  # its last step; the result was not taken in
    d.take(d.scheduler.abort("victim"))
    d.run(10)
    assert [d.endings["victim", choice].finish_reason for choice in range(n)] == [FINISH_ABORT] * n
    assert d.scheduler.finish("victim", 0, 1) == []
    assert d.scheduler.abort("victim") == []
    at_rest(d)


# -- 36: larger than the pool; a tiny pool -----------------------------------------------------------------------------


def test_case_36_what_the_pool_cannot_hold_is_refused_and_the_next_request_runs():
    d = drive(49)
    for max_tokens in (0, 1):
        with pytest.raises(KVPoolExceeded, match=r"63 KV blocks.*49"):
            d.add(make_request("large", 1002, max_tokens))
    with pytest.raises(KVPoolExceeded, match=r"63 KV blocks.*49"):
        d.add(make_request("large", 1002, None, prompt_logprobs=1))
    at_rest(d)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, {"n": 2}, {"prompt_logprobs": 2, "n": 2}, {"min_tokens": 60}])
def test_case_36_in_a_pool_that_forces_preemption_nobody_loses_or_repeats_a_token(options, depth):
    d = drive(20, depth=depth)
    requests = [make_request(f"r{i}", 32, 64, **options) for i in range(8)]
    d.add(*requests)
    d.run(3000)
    assert d.scheduler.counters.preemptions
    for request in requests:
        for choice in range(request.params.n):
            assert d.emitted[request.request_id, choice] == expected_ids(request, choice)
            assert d.endings[request.request_id, choice].finish_reason == FINISH_LENGTH
        if request.params.prompt_logprobs is not None:
            assert d.told[request.request_id] == expected_prompt_logprobs(request)
    at_rest(d)


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(7 + 31 * i + 5 * at) % 300 for at in range(length)] for i in range(count)]


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2, "logprobs": 2},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9, "n": 2},
    ],
    ids=["logprobs", "penalties", "seed"],
)
def test_case_36_a_model_draws_in_a_tiny_pool_what_it_draws_for_each_alone(bench, params):
    ids = prompts(8, 32)
    alone = {}
    for i, prompt in enumerate(ids):
        bench.new(enable_prefix_caching=False)
        alone |= bench.run(bench.request(f"r{i}", prompt, 64, **params))
    for caching in (False, True):
        bench.new(num_blocks=20, enable_prefix_caching=caching)
        together = bench.run(*(bench.request(f"r{i}", prompt, 64, **params) for i, prompt in enumerate(ids)))
        assert bench.scheduler.counters.preemptions
        assert together.keys() == alone.keys()
        for key, answer in together.items():
            assert answer.ids == alone[key].ids
            assert [told.top_ids for told in answer.logprobs] == [told.top_ids for told in alone[key].logprobs]


@pytest.mark.parametrize("depth", [1, 2])
def test_case_36_a_model_tells_of_prompts_in_a_tiny_pool_what_it_tells_of_each_alone(bench, depth):
    ids = prompts(6, 64)
    alone = {}
    for i, prompt in enumerate(ids):
        alone |= bench.new().run(bench.request(f"r{i}", prompt, 0, prompt_logprobs=2))
    bench.new(num_blocks=18, max_num_batched_tokens=16, depth=depth)
    together = bench.run(*(bench.request(f"r{i}", prompt, 40, n=2, prompt_logprobs=2) for i, prompt in enumerate(ids)))
    assert bench.scheduler.counters.preemptions
    for key, answer in alone.items():
        assert (answer.ids, answer.ending.finish_reason) == ([], FINISH_LENGTH)
        assert len(answer.prompt_logprobs) == 63
        for one, other in zip(answer.prompt_logprobs, together[key].prompt_logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_ids == other.top_ids


# -- 37: the prefix cache is invisible ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_case_37_a_model_draws_the_same_with_the_cache_off_cold_warm_shared_and_evicted(bench, depth):
    ids = {length: [(3 + length + 11 * at) % 300 for at in range(length)] for length in LENGTHS}

    def run(name: str, length: int, count: int = 1) -> list:
        requests = [bench.request(f"{name}-{length}-{i}", ids[length], 20) for i in range(count)]
        answers = bench.run(*requests)
        return [answers[request.request_id, 0] for request in requests]

    bench.new(enable_prefix_caching=False)
    off = {length: run("off", length)[0].ids for length in LENGTHS}
    bench.new(num_blocks=40, depth=depth)
    for length in LENGTHS:
        most = (length - 1) // BLOCK * BLOCK
        [cold], [warm], many = run("cold", length), run("warm", length), run("many", length, 8)
        assert [answer.ids for answer in (cold, warm, *many)] == [off[length]] * 10
        assert (cold.ending.usage.num_cached, warm.ending.usage.num_cached) == (0, most)
        assert {answer.ending.usage.num_cached for answer in many} == {most}
    for i, other in enumerate(prompts(4, 150)):  # 4 x 11 blocks go through a pool of 40
        bench.run(bench.request(f"other{i}", other, 20))
    for length in LENGTHS:
        [again] = run("again", length)
        assert (again.ids, again.ending.usage.num_cached) == (off[length], 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_case_37_a_block_that_three_choices_share_is_copied_once_each_at_the_first_write(bench, length):
    prompt = [(3 + 11 * at) % 300 for at in range(length)]
    params = {"n": 3, "temperature": 1.0, "seed": 9}
    bench.new(enable_prefix_caching=False)
    off = bench.run(bench.request("a", prompt, 20, **params))
    copies = bench.scheduler.counters.copies
    assert copies == (2 if length % BLOCK else 0)  # the last to write keeps the block itself
    bench.new()
    bench.run(bench.request("before", prompt, 1))
    warm = bench.run(bench.request("a", prompt, 20, **params))
    assert {key: answer.ids for key, answer in warm.items()} == {key: answer.ids for key, answer in off.items()}
    assert len({tuple(answer.ids) for answer in warm.values()}) == 3


def test_case_37_another_key_finds_nothing():
    d = drive(64)
    for name, tenant, cached in (("a", "one", 0), ("b", "one", 32), ("c", "two", 0), ("d", "two", 32)):
        d.add(make_request(name, list(range(40)), 4, tenant=tenant))
        d.run()
        assert d.endings[name, 0].usage.num_cached == cached


# -- 38: fairness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_case_38_a_short_prompt_passes_a_long_one_that_asks_for_prompt_logprobs(depth):
    d = drive(256, max_num_batched_tokens=64, long_prefill_tokens=32, depth=depth)
    d.add(make_request("long", 1000, 1, prompt_logprobs=1))
    d.step()
    d.add(make_request("short", 10, 20))
    for _ in range(1 + depth):  # at depth 2 one more was planned before it came
        d.step()
    assert d.emitted["short", 0]
    while ("long", 0) not in d.endings:
        d.step()
    assert d.steps <= -(-1000 // 32) + 4


def test_case_38_a_priority_under_fcfs_is_refused_by_the_policys_name():
    with pytest.raises(InvalidRequest, match="first come, first served") as refusal:
        drive(64, scheduling_policy="fcfs").add(make_request("a", 20, 4, priority=5))
    assert refusal.value.param == "priority"


@pytest.mark.parametrize("depth", [1, 2])
def test_case_38_two_choices_of_the_lowest_priority_give_way_and_still_end(depth):
    d = drive(20, max_model_len=256, depth=depth)
    requests = [make_request(f"r{i}", 32, 64, n=2, priority=5 * (i == 1)) for i in range(4)]
    d.add(*requests)
    d.run(3000)
    victims = [victim for record in d.scheduler.records for victim, _ in record.preempted]
    assert victims[0] == "r1"
    assert "r0" not in victims
    for request in requests:
        assert [d.emitted[request.request_id, c] for c in range(2)] == [expected_ids(request, c) for c in range(2)]
    at_rest(d)


def test_case_38_a_small_one_passes_a_head_that_lacks_blocks_and_the_head_comes_within_its_bypasses():
    d = drive(40, max_bypasses=3, max_model_len=640)
    d.add(make_request("holder", 29 * BLOCK + 1, 15))  # 30 blocks, so that 10 are free
    while not d.emitted:
        d.step()
    head = 30 * BLOCK - 4
    d.add(make_request("head", head, 4), *(make_request(f"s{i}", 20, 2) for i in range(6)))
    d.step()
    assert ("s0", 0) in d.emitted
    d.run(200)
    came = [init.num_prompt for plan in d.executor.plans for init in plan.admissions]
    assert came == [29 * BLOCK + 1, 20, 20, 20, head, 20, 20, 20]
