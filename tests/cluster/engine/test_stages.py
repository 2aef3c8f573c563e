"""Plans for a pipeline: as many at once as there are stages, each with its share, and no id used before it is known."""

from collections import Counter

import pytest

from paceline.cluster.engine.sequence import NO_SLOT
from paceline.proto.step import TAKE_SAMPLE, TOKEN_IN_TABLE
from tests.cluster.engine.fakes import Drive, expected_ids, make_request, make_scheduler


def drive(num_blocks: int = 256, *, stages: int = 2, **config) -> Drive:
    return Drive(make_scheduler(num_blocks, **({"num_stages": stages, "depth": stages} | config)))


def num_draws(plan) -> int:
    return sum(take == TAKE_SAMPLE for take in plan.chunk_takes)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_batch_that_arrives_at_once_is_shared_out_evenly_over_as_many_plans_as_stages(stages):
    d = drive(stages=stages, max_num_batched_tokens=1024)
    d.add(*(make_request(f"r{i}", 20, 30) for i in range(12)))
    while d.submit():
        pass
    assert [num_draws(plan) for plan in d.executor.plans] == [12 // stages] * stages
    d.run()
    steady = d.executor.plans[stages : 20 * stages]
    assert {len(plan.chunk_slots) for plan in steady} == {12 // stages}


def test_while_ids_are_outstanding_their_sequences_are_left_alone_and_the_others_go_on():
    d = drive(max_num_batched_tokens=1024)
    d.add(*(make_request(f"r{i}", 20, 30) for i in range(5)))
    for _ in range(20):
        d.step()
        flying = [seq for draft in d.scheduler._in_flight for seq in draft.rows]
        assert max(Counter(map(id, flying)).values()) == 1
        assert len(flying) >= 2


def test_the_chunks_of_one_long_prompt_follow_each_other_through_the_stages():
    d = drive(max_num_batched_tokens=64)
    d.add(make_request("long", 200, 4))
    assert d.submit()
    assert d.submit()
    assert [list(plan.chunk_starts) for plan in d.executor.plans] == [[0], [32]]
    d.run()
    assert d.emitted["long", 0] == expected_ids(make_request("long", 200, 4))


def test_a_long_prompt_rides_with_the_decodes_of_every_plan():
    d = drive(max_num_batched_tokens=64)
    d.add(*(make_request(f"r{i}", 8, 60) for i in range(4)))
    for _ in range(4):
        d.step()
    d.add(make_request("long", 300, 2))
    first = len(d.executor.plans)
    while ("long", 0) not in d.emitted:
        d.step()
    during = d.executor.plans[first:-2]
    assert sum(max(plan.chunk_lens) > 1 for plan in during) >= 0.8 * len(during)
    assert sum(1 in plan.chunk_lens for plan in during) >= 0.8 * len(during)


def test_who_waits_for_blocks_is_not_counted_when_the_running_are_shared_out():
    d = drive(num_blocks=33, max_num_batched_tokens=1024, max_model_len=256)
    d.add(*(make_request(f"r{i}", 60, 60) for i in range(12)))
    for _ in range(10):
        d.step()
    assert "blocks" in {record.head_waits_for for record in d.scheduler.records}
    running = len(d.scheduler.running)
    assert running < 8
    assert {len(plan.chunk_slots) for plan in d.executor.plans[-2:]} <= {running // 2, -(-running // 2)}


def test_with_one_plan_in_flight_it_takes_everyone():
    d = drive(depth=1, max_num_batched_tokens=1024)
    d.add(*(make_request(f"r{i}", 20, 10) for i in range(8)))
    d.submit()
    assert num_draws(d.executor.plans[0]) == 8


def test_the_budget_of_a_step_is_shared_by_the_stages():
    d = drive(stages=4, max_num_batched_tokens=102)
    d.add(*(make_request(f"r{i}", 50, 10) for i in range(8)))
    d.run()
    assert max(plan.num_tokens for plan in d.executor.plans) == 26


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("budget", [7, 64, 1024])
@pytest.mark.parametrize("caching", [False, True])
def test_forks_preemption_and_chunks_give_the_ids_that_one_stage_gives(stages, budget, caching):
    d = drive(21, stages=stages, max_num_batched_tokens=budget, max_model_len=256, enable_prefix_caching=caching)
    requests = [make_request(f"r{i}", 30 + 5 * i, 40, n=1 + i % 3) for i in range(6)]
    d.add(*requests)
    d.run()
    assert d.scheduler.counters.preemptions
    for request in requests:
        for choice in range(request.params.n):
            assert d.emitted[request.request_id, choice] == expected_ids(request, choice)


def test_every_id_that_a_later_stage_drew_is_told_in_the_plan_that_goes_on_with_it():
    d = drive(max_num_batched_tokens=1024)
    d.add(make_request("r", 20, 10))
    d.run()
    tokens = [plan.chunk_tokens[0] for plan in d.executor.plans]
    assert tokens == [TOKEN_IN_TABLE, *expected_ids(make_request("r", 20, 10))[:-1]]


def test_an_abort_with_plans_in_flight_frees_the_slot_and_its_successor_gets_its_own_ids():
    d = drive(max_num_seqs=2, max_num_batched_tokens=1024)
    d.add(*(make_request(f"r{i}", 20, 30) for i in range(3)))
    d.step()
    while d.submit():
        pass
    d.take(d.scheduler.abort("r0"))
    d.run()
    assert d.emitted["r2", 0] == expected_ids(make_request("r2", 20, 30))
    assert all(seq.slot == NO_SLOT for seq in d.scheduler.running)
