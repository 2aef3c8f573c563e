"""KV groups with windows: what they hold, what they give back, and that nobody can tell by the ids.

The fake executor reads every position inside the window of every query, so each run also proves tables and releases.
"""

import pytest

from paceline.proto.errors import KVPoolExceeded, StartupError
from paceline.proto.paging import Paging
from tests.cluster.engine.fakes import BLOCK, Drive, expected_ids, make_request, make_scheduler

WINDOW = 64


def drive(num_blocks: int = 256, *, windows: tuple[int, ...] = (WINDOW,), **config) -> Drive:
    return Drive(make_scheduler(num_blocks, windows=windows, **config))


def held(d: Drive) -> list[int]:
    """By group, the blocks that the only running sequence holds."""
    [seq] = d.scheduler.running
    return [sum(block != 0 for block in block_ids) for block_ids in seq.block_ids]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 40, 100])
def test_blocks_in_use_stay_flat_beyond_the_window(num_prompt, depth):
    d = drive(depth=depth, max_num_batched_tokens=32)
    request = make_request("a", num_prompt, 6 * WINDOW)
    d.add(request)
    used = {}
    while d.scheduler.has_work and d.step():
        if d.scheduler.running:
            used[d.scheduler.running[0].num_planned] = d.scheduler.pool.num_referenced
    steady = [count for planned, count in used.items() if planned > max(num_prompt, WINDOW) + BLOCK]
    assert len(steady) > 4 * WINDOW
    assert max(steady) <= WINDOW // BLOCK + 2
    assert max(steady) - min(steady) <= 1
    assert max(used.values()) <= Paging(BLOCK, (WINDOW,), 32).num_blocks(10_000)
    assert d.emitted["a", 0] == expected_ids(request)


def test_in_a_hybrid_local_groups_hold_the_window_and_global_ones_all():
    d = drive(windows=(0, WINDOW, WINDOW))
    d.add(make_request("a", 50, 300))
    for _ in range(290):
        d.step()
    wide, *local = held(d)
    assert wide == -(-d.scheduler.running[0].num_planned // BLOCK)
    assert all(WINDOW // BLOCK <= count <= WINDOW // BLOCK + 2 for count in local)
    assert d.scheduler.pool.num_referenced == wide + sum(local)
    d.run()


def test_a_long_prompt_gives_its_blocks_back_chunk_by_chunk():
    d = drive(max_num_batched_tokens=64)
    d.add(make_request("a", 1000, 4))
    for _ in range(10):
        d.step()
        assert held(d)[0] <= WINDOW // BLOCK + 1
    d.run()
    assert d.emitted["a", 0] == expected_ids(make_request("a", 1000, 4))


@pytest.mark.parametrize("windows", [(WINDOW,), (0, WINDOW), (0, 20, WINDOW), (1,)])
@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_chunks_and_windows_do_not_change_the_ids(windows, budget):
    d = drive(windows=windows, max_num_batched_tokens=budget, depth=2)
    requests = [make_request(f"r{i}", 30 + 40 * i, 60) for i in range(5)]
    d.add(*requests)
    d.run()
    for request in requests:
        assert d.emitted[request.request_id, 0] == expected_ids(request)
    assert d.scheduler.pool.num_referenced == 0


# -- the prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(WINDOW,), (0, WINDOW), (0, 20, WINDOW)])
@pytest.mark.parametrize("num_prompt", [40, 64, 100, 300])
def test_the_prefix_cache_is_warm_past_the_window_and_gives_the_same_ids(windows, num_prompt):
    d = drive(windows=windows)
    cold, warm = (make_request(name, list(range(num_prompt)), 40) for name in ("cold", "warm"))
    for request in (cold, warm):
        d.add(request)
        d.run()
    assert d.emitted["warm", 0] == d.emitted["cold", 0] == expected_ids(cold)
    assert d.endings["warm", 0].usage.num_cached == (num_prompt - 1) // BLOCK * BLOCK


def test_a_hit_takes_only_the_blocks_that_its_first_query_sees():
    d = drive(windows=(0, WINDOW))
    for name in ("cold", "warm"):
        d.add(make_request(name, list(range(321)), 2))
        d.step()
        [seq] = d.scheduler.running
        if name == "warm":
            assert seq.num_cached == 320
            assert seq.block_ids[1][:16] == [0] * 16
            assert all(seq.block_ids[1][16:])
            assert all(seq.block_ids[0])
            groups = list(d.executor.plans[-1].table_groups)
            assert (groups.count(0), groups.count(1)) == (21, 5)
        d.run()


def test_a_conversation_goes_on_from_its_generated_blocks():
    d = drive(windows=(0, WINDOW))
    first = make_request("a", 100, 200)
    d.add(first)
    d.run()
    again = make_request("b", first.prompt_ids + expected_ids(first), 20)
    d.add(again)
    d.run()
    assert d.endings["b", 0].usage.num_cached == 299 // BLOCK * BLOCK  # the last id was never computed
    assert d.emitted["b", 0] == expected_ids(again)


def test_a_prefix_whose_local_blocks_are_overwritten_is_no_hit_though_its_global_ones_are_there():
    d = drive(60, windows=(0, 32), max_model_len=512)
    prefix = list(range(160))
    d.add(make_request("a", [*prefix, *range(1000, 1161)], 2))  # ends far behind the prefix
    d.run()
    pool = d.scheduler.pool
    assert len(pool.match(make_request("x", prefix).block_hashes, 10)) == 10
    for name in make_request("x", prefix).block_hashes:
        pool.unname(pool.find(name, 1))
    d.add(make_request("b", [*prefix, 7], 10))
    d.run()
    assert d.endings["b", 0].usage.num_cached == 0
    assert d.emitted["b", 0] == expected_ids(make_request("b", [*prefix, 7], 10))


def test_prompts_of_one_plan_share_a_prefix_longer_than_the_window():
    d = drive(windows=(0, WINDOW), max_num_batched_tokens=2000)
    prefix = list(range(100, 260))
    requests = [make_request(f"r{i}", [*prefix, i, i + 1], 50) for i in range(4)]
    d.add(*requests)
    d.step()
    assert d.scheduler.counters.computed == 162 + 3 * 2
    d.run()
    for request in requests:
        assert d.emitted[request.request_id, 0] == expected_ids(request)


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(WINDOW,), (0, WINDOW), (0, 17, WINDOW), (1,)])
@pytest.mark.parametrize("num_prompt", [5, 40, 48, 200])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_choices_share_the_window_and_copy_their_partial_block_in_every_group(windows, num_prompt, depth):
    d = drive(windows=windows, depth=depth)
    request = make_request("a", num_prompt, 100, n=4)
    d.add(request)
    d.run()
    for choice in range(4):
        assert d.emitted["a", choice] == expected_ids(request, choice)
    assert d.executor.num_copies == (3 * len(windows) if num_prompt % BLOCK else 0)
    assert list(d.executor.plans[0].copy_groups) == []
    assert d.scheduler.counters.prompt == num_prompt
    assert d.scheduler.pool.num_referenced == 0


def test_choices_that_wait_for_a_seat_find_the_prompts_window_though_their_parent_has_gone_on():
    d = drive(windows=(0, 32), max_num_seqs=1)
    request = make_request("a", 200, 150, n=3)
    d.add(request)
    d.run()
    for choice in range(3):
        assert d.emitted["a", choice] == expected_ids(request, choice)
    assert d.scheduler.counters.computed == 200 + 149 + 2 * 150
    assert d.scheduler.counters.preemptions == 0


# -- shortage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(WINDOW,), (0, 32), (0, 32, 40)])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_too_small_for_all_preempts_the_last_and_loses_no_id(windows, caching, depth):
    d = drive(14 * len(windows), windows=windows, depth=depth, max_model_len=256, enable_prefix_caching=caching)
    requests = [make_request(f"r{i}", 30 + i, 64, n=1 + i % 2) for i in range(8)]
    d.add(*requests)
    d.run(4000)
    assert d.scheduler.counters.preemptions > 0
    for request in requests:
        for choice in range(request.params.n):
            assert d.emitted[request.request_id, choice] == expected_ids(request, choice)
    assert d.scheduler.pool.num_referenced == 0


def test_many_long_sequences_run_at_once_where_only_windows_are_held():
    """Fifty blocks would hold one sequence of 600 tokens that sees all."""
    d = drive(50, max_model_len=600, max_num_batched_tokens=32)
    requests = [make_request(f"r{i}", 10, 580) for i in range(8)]
    d.add(*requests)
    d.run()
    assert d.scheduler.counters.preemptions == 0
    assert max(record.num_running for record in d.scheduler.records) == 8
    for request in requests:
        assert d.emitted[request.request_id, 0] == expected_ids(request)


def test_a_prompt_waits_for_what_its_window_and_chunk_take_and_not_for_all_of_itself():
    d = drive(12, max_model_len=2048, max_num_batched_tokens=32)
    d.add(make_request("long", 1500, 3), make_request("short", 10, 3))
    d.run()
    assert d.scheduler.counters.preemptions == 0
    assert d.emitted["long", 0] == expected_ids(make_request("long", 1500, 3))


def test_what_can_never_fit_is_refused_with_both_numbers_and_what_fits_just_runs():
    for windows in ((0, WINDOW), (WINDOW,), (0, WINDOW, 20)):
        paging = Paging(BLOCK, windows, 32)
        needed = paging.num_blocks(320)
        config = {"windows": windows, "max_num_batched_tokens": 32, "max_model_len": 512}
        with pytest.raises(KVPoolExceeded, match=rf"need {needed} KV blocks .* the pool has {needed - 1}"):
            drive(needed - 1, **config).add(make_request("a", 280, 40))
        d = drive(needed, **config)
        d.add(make_request("a", 280, 40))
        d.run()
        assert d.emitted["a", 0] == expected_ids(make_request("a", 280, 40))


def test_without_max_tokens_a_window_fills_the_context_and_a_hybrid_what_the_pool_leaves():
    for windows, length in (((32,), 512), ((0, 32), 16 * 16)):
        d = drive(20, windows=windows, max_model_len=512, max_num_batched_tokens=16)
        d.add(make_request("a", 20, None))
        d.run()
        assert d.endings["a", 0].usage.num_generated == length - 20


def test_blocks_that_left_the_window_serve_others_in_the_next_plan():
    d = drive(9, windows=(32,), max_model_len=512, max_num_batched_tokens=64)
    a, b = make_request("a", 128, 100, named=False), make_request("b", 20, 100, named=False)
    d.add(a)
    d.step()
    first = set(d.executor.plans[0].table_blocks)
    d.add(b)
    d.run()
    later = {block for plan in d.executor.plans[1:] for block in plan.table_blocks}
    assert first & later
    for request in (a, b):
        assert d.emitted[request.request_id, 0] == expected_ids(request)


def test_windows_that_cannot_be_are_refused():
    for windows in ((), (-1,), (0, -5)):
        with pytest.raises(StartupError, match="windows"):
            make_scheduler(windows=windows)
