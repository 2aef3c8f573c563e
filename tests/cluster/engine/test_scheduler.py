"""What the scheduler promises, one sentence a test. The fake executor reads every row back from its blocks, so each of
these also proves that tables, copies and writes are right."""

import pytest

from paceline.proto.errors import ContextLengthExceeded, InvalidRequest, KVPoolExceeded
from paceline.proto.request import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from tests.cluster.engine.fakes import Drive, FakeExecutor, expected_ids, make_request, make_scheduler


def drive(num_blocks=64, executor=None, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **config), executor)


def lens(plan) -> dict[int, int]:
    return dict(zip(plan.chunk_slots, plan.chunk_lens, strict=True))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 64, 100_000])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33, 100])
def test_every_prompt_length_chunk_budget_and_depth_gives_the_same_ids(num_prompt, budget, depth):
    d = drive(max_num_batched_tokens=budget, depth=depth)
    request = make_request("a", num_prompt, 20)
    d.add(request)
    d.run()
    assert d.emitted["a", 0] == expected_ids(request)
    assert d.endings["a", 0].finish_reason == FINISH_LENGTH
    assert d.scheduler.counters.computed == num_prompt + 20 - 1


def test_running_sequences_decode_in_every_step_while_a_long_prompt_is_prefilled():
    d = drive(256, max_num_batched_tokens=64)
    d.add(*(make_request(f"d{i}", 10, 400) for i in range(8)))
    d.step()
    d.add(make_request("long", 1500, 5))
    while ("long", 0) not in d.emitted:
        before = {key: len(ids) for key, ids in d.emitted.items()}
        d.step()
        assert all(len(d.emitted[key]) == n + 1 for key, n in before.items())
    assert sum(r.num_prefill_tokens > 0 for r in d.scheduler.records) >= 1500 // 64


def test_a_request_that_arrives_while_there_is_room_is_in_the_next_plan():
    d = drive()
    d.add(make_request("a", 100, 50))
    d.step()
    d.add(make_request("b", 20, 5))
    d.step()
    assert ("b", 0) in d.emitted


def test_a_short_prompt_gets_its_first_token_within_two_steps_of_a_long_one_and_the_long_one_is_not_starved():
    d = drive(200, max_num_batched_tokens=64, long_prefill_tokens=32)
    d.add(make_request("long", 1000, 2))
    d.step()
    d.add(make_request("short", 10, 2))
    d.step()
    d.step()
    assert ("short", 0) in d.emitted
    while ("long", 0) not in d.emitted:
        d.step()
    assert d.steps <= 1000 // 32 + 4


def test_at_most_so_many_long_prompts_are_in_prefill_at_once_and_short_ones_pass():
    d = drive(400, max_num_batched_tokens=64, long_prefill_tokens=16, max_partial_prefills=2)
    d.add(*(make_request(f"l{i}", 500, 1) for i in range(4)), make_request("s", 8, 1))
    d.step()
    assert len(d.executor.plans[0].admissions) == 3
    assert ("s", 0) in d.emitted
    assert d.scheduler.records[-1].head_waits_for == "long prefills"
    d.run()


def test_simultaneous_requests_with_one_prefix_share_it_in_the_very_same_plan():
    prefix = list(range(100, 164))
    d = drive()
    d.add(*(make_request(f"r{i}", [*prefix, i, i + 1], 4) for i in range(4)))
    d.step()
    assert d.scheduler.counters.computed == 66 + 3 * 2
    d.run()
    assert [d.endings[f"r{i}", 0].usage.num_cached for i in range(4)] == [0, 64, 64, 64]


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33])
def test_a_hit_never_covers_the_whole_prompt(num_prompt):
    d = drive()
    d.add(make_request("cold", list(range(num_prompt)), 3))
    d.run()
    d.add(make_request("warm", list(range(num_prompt)), 3))
    d.run()
    assert d.emitted["warm", 0][0] == d.emitted["cold", 0][0]
    assert d.endings["warm", 0].usage.num_cached == (num_prompt - 1) // 16 * 16
    assert d.scheduler.pool.num_referenced == 0


def test_generated_blocks_are_found_again_by_a_prompt_that_repeats_them():
    d = drive()
    first = make_request("a", 20, 30)
    d.add(first)
    d.run()
    d.add(make_request("b", first.prompt_ids + expected_ids(first), 2))
    d.run()
    assert d.endings["b", 0].usage.num_cached == 48


def test_tenants_and_nameless_requests_share_nothing():
    d = drive()
    for name, options in (("a", {}), ("b", {"tenant": "other"}), ("c", {"named": False})):
        d.add(make_request(name, list(range(64)), 2, **options))
        d.run()
        assert d.endings[name, 0].usage.num_cached == 0


def test_prefix_caching_can_be_off():
    d = drive(enable_prefix_caching=False)
    for name in "ab":
        d.add(make_request(name, list(range(64)), 2))
        d.run()
        assert d.endings[name, 0].usage.num_cached == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_prompt", "copies"), [(40, 5), (48, 0), (1, 5), (16, 0)])
def test_n_choices_compute_the_prompt_once_and_copy_only_its_last_partial_block(num_prompt, copies, depth, caching):
    d = drive(enable_prefix_caching=caching, depth=depth)
    request = make_request("a", num_prompt, 10, n=6)
    d.add(request)
    d.run()
    for choice in range(6):
        assert d.emitted["a", choice] == expected_ids(request, choice)
    assert d.executor.num_copies == copies
    assert d.scheduler.counters.computed == num_prompt + 9 + 5 * 10
    assert d.scheduler.counters.prompt == num_prompt


def test_forks_that_wait_for_a_seat_hold_shared_blocks_until_somebody_needs_them():
    d = drive(7, max_num_seqs=1, max_model_len=112)
    parent = make_request("a", 60, 40, n=4)
    d.add(parent)
    d.run()
    assert [d.emitted["a", c] for c in range(4)] == [expected_ids(parent, c) for c in range(4)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seats", [1, 2])
def test_a_prompt_that_fills_the_pool_alone_writes_on_once_its_waiting_fork_has_let_go(seats, depth):
    """Nothing becomes free by that, as the two share every block, but then none needs to be copied either."""
    d = drive(3, max_num_seqs=seats, max_model_len=48, depth=depth)
    request = make_request("a", 40, 8, n=2)
    d.add(request)
    d.run()
    assert [d.emitted["a", choice] for choice in range(2)] == [expected_ids(request, choice) for choice in range(2)]


def test_choices_that_resume_are_ordinary_sequences_with_offsets_that_go_on():
    request = make_request("a", 20, 10, n=2)
    told = (tuple(expected_ids(request, 0)[:4]), tuple(expected_ids(request, 1)[:7]))
    d = drive()
    d.emitted = {("a", c): list(told[c]) for c in range(2)}
    d.add(make_request("a", 20, 10, n=2, resume=told))
    d.run()
    assert [d.emitted["a", c] for c in range(2)] == [expected_ids(request, c) for c in range(2)]
    assert d.endings["a", 1].usage.num_generated == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_too_small_for_all_preempts_the_last_and_loses_no_id(depth):
    d = drive(20, depth=depth, max_model_len=256)
    requests = [make_request(f"r{i}", 32, 64) for i in range(8)]
    d.add(*requests)
    d.run(2000)
    assert d.scheduler.counters.preemptions > 0
    for request in requests:
        assert d.emitted[request.request_id, 0] == expected_ids(request)
    counters = d.scheduler.counters
    assert counters.computed == 8 * (32 + 64 - 1) + counters.recomputed
    assert not any(victim == "r0" for record in d.scheduler.records for victim, _ in record.preempted)


def test_the_victim_is_of_the_lowest_priority_and_then_the_latest():
    d = drive(8, max_model_len=128)
    d.add(make_request("low", 30, 60, priority=5), make_request("high", 30, 60), make_request("high2", 30, 60))
    d.run()
    victims = [victim for record in d.scheduler.records for victim, _ in record.preempted]
    assert victims[0] == "low"
    assert "high" not in victims


def test_smaller_requests_pass_a_head_that_lacks_blocks_only_so_often():
    d = drive(40, max_bypasses=3, max_num_seqs=8, max_model_len=640)
    d.add(make_request("big", 30 * 16, 100))
    d.step()
    d.add(make_request("head", 20 * 16, 4))
    d.add(*(make_request(f"s{i}", 20, 2) for i in range(8)))
    for _ in range(20):
        d.step()
    assert sum((f"s{i}", 0) in d.emitted for i in range(8)) == 3
    assert d.scheduler.records[-1].head_waits_for == "blocks"
    d.run()


def test_a_tenant_with_less_service_goes_first_and_priority_goes_before_that():
    d = drive(max_num_seqs=1)
    d.add(make_request("a0", 64, 30, tenant="a"))
    d.step()
    d.add(make_request("a1", 8, 2, tenant="a"), make_request("b0", 8, 2, tenant="b"))
    d.add(make_request("a2", 8, 2, tenant="a", priority=-1))
    d.run()
    assert [key[0] for key in d.endings] == ["a0", "a2", "b0", "a1"]


def test_what_can_never_fit_is_refused_with_both_numbers():
    scheduler = make_scheduler(49)
    with pytest.raises(KVPoolExceeded, match=r"need 63 KV blocks.*the pool has 49"):
        scheduler.add(make_request("a", 1002, 1), 0.0)
    with pytest.raises(ContextLengthExceeded, match=r"2048 tokens.*prompt has 8.*2045"):
        scheduler.add(make_request("a", 8, 2045), 0.0)
    with pytest.raises(ContextLengthExceeded, match="2048"):
        make_scheduler(500).add(make_request("a", 2048, 1), 0.0)
    with pytest.raises(InvalidRequest, match="first come"):
        make_scheduler(scheduling_policy="fcfs").add(make_request("a", 8, 1, priority=1), 0.0)
    assert not scheduler.has_work


def test_without_max_tokens_a_sequence_may_fill_context_or_pool_whichever_ends_first():
    for num_blocks, length in ((10, 160), (64, 256)):
        d = drive(num_blocks, max_model_len=256)
        d.add(make_request("a", 20, None))
        d.run()
        assert d.endings["a", 0].usage.num_generated == length - 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_id_ends_a_sequence_and_what_ran_past_it_is_dropped(depth):
    request = make_request("a", 20, 50)
    stop = expected_ids(request)[5]
    d = drive(eos_ids=(stop,), depth=depth)
    d.add(request)
    d.run()
    assert d.emitted["a", 0] == expected_ids(request)[:6]
    assert d.endings["a", 0].finish_reason == FINISH_STOP
    assert d.scheduler.counters.discarded == depth - 1
    d = drive(eos_ids=(stop,), depth=depth)
    d.add(make_request("a", 20, 50, ignore_eos=True))
    d.run()
    assert d.endings["a", 0].finish_reason == FINISH_LENGTH


def test_a_stop_string_seen_by_the_router_ends_one_choice_as_a_success():
    d = drive()
    d.add(make_request("a", 20, 50, n=2))
    for _ in range(6):
        d.step()
    d.take(d.scheduler.finish("a", 1, 2))
    assert d.endings["a", 1].finish_reason == FINISH_STOP
    assert d.endings["a", 1].usage.num_generated == 2
    assert d.scheduler.finish("a", 1, 2) == []
    d.run()
    assert len(d.emitted["a", 0]) == 50


def test_an_abort_ends_every_choice_once_even_those_that_were_still_to_be_forked():
    d = drive(max_num_batched_tokens=7)
    d.add(make_request("a", 40, 10, n=3))
    d.step()
    d.take(d.scheduler.abort("a"))
    assert {choice: e.finish_reason for (_, choice), e in d.endings.items()} == dict.fromkeys(range(3), FINISH_ABORT)
    assert d.scheduler.abort("a") == []
    assert d.scheduler.abort("unknown") == []
    assert d.scheduler.pool.num_referenced == 0


def test_a_fault_ends_its_row_and_not_its_neighbours():
    d = drive(executor=FakeExecutor(faults={3: [0]}))
    a, b = make_request("a", 20, 10), make_request("b", 20, 10)
    d.add(a, b)
    d.run()
    assert d.endings["a", 0].finish_reason == FINISH_ERROR
    assert d.endings["a", 0].error == "injected"
    assert d.emitted["b", 0] == expected_ids(b)


def test_two_requests_may_not_share_an_id():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), 0.0)
    with pytest.raises(InvalidRequest, match="already running"):
        scheduler.add(make_request("a"), 0.0)


def test_load_counts_sequences_tokens_and_referenced_blocks():
    d = drive(max_num_seqs=1)
    d.add(make_request("a", 40, 10), make_request("b", 30, 10))
    d.step()
    load = d.scheduler.load()
    assert (load.running, load.waiting, load.blocks_used, load.queued_tokens) == (1, 1, 3, 30)
    d.run()
    load = d.scheduler.load()
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
    assert load.finished_total == {FINISH_LENGTH: 2}
