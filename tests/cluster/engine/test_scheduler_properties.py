"""Hypothesis drives scheduler and pool through arrivals, aborts, deadlines, forks, stops, faults and shortage, with
results outstanding; ``check()`` runs after every commit and the fake executor verifies every position that a row reads.
"""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.proto.request import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from tests.cluster.engine.fakes import (
    Drive,
    FakeExecutor,
    drawn,
    expected_prompt_logprobs,
    make_request,
    make_scheduler,
    scripted,
)

ROOT = Path(__file__).resolve().parents[3]
EOS = 50_500

PLAIN = {  # what a test's requests are where it says nothing else
    "prompt": 20,
    "shared": 0,
    "max_tokens": 8,
    "min_tokens": 0,
    "n": 1,
    "priority": 0,
    "tenant": "",
    "stops": False,
    "ignore_eos": True,
    "grammar": "",
    "prompt_logprobs": None,
    "deadlines": (None, None, None),
}

requests = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 70),
        "shared": st.integers(0, 3),  # whole blocks of a common prefix
        "max_tokens": st.integers(0, 40),
        "min_tokens": st.sampled_from([0, 0, 1, 5, 30]),
        "n": st.integers(1, 4),
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from(["", "a", "b"]),
        "stops": st.booleans(),
        "ignore_eos": st.booleans(),
        "grammar": st.sampled_from(["", "", "0", "4"]),
        "prompt_logprobs": st.sampled_from([None, 0, 3]),
        "deadlines": st.tuples(*[st.none() | st.integers(1, 6)] * 3),  # queue, first token, end
    }
)
events = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("submit"), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("expire"), st.integers(0, 7)),
    st.tuples(st.just("finish"), st.tuples(st.integers(0, 30), st.integers(0, 3))),
)
WINDOWS = ((0,), (1,), (16,), (23,), (40,), (0, 1), (0, 24), (0, 40), (17, 40), (0, 17, 40), (0, 24, 24), (0, 0, 20))
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 40),
        "windows": st.sampled_from(WINDOWS),
        "depth": st.integers(1, 3),
        "num_stages": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 7, 16, 64, 1000]),
        "target_itl": st.sampled_from([0.0, 0.1]),
        "max_partial_prefills": st.integers(1, 2),
        "max_bypasses": st.integers(0, 3),
        "enable_prefix_caching": st.booleans(),
    }
)


def with_ends(prompt: tuple[int, ...], choice: int, position: int) -> int:
    """Scripted ids, and now and then an end token."""
    return EOS if (position + 3 * choice) % 17 == 0 else scripted(prompt, choice, position)


def some_seconds(plan) -> float:
    """Of a machine that is sometimes too slow."""
    return 0.01 * sum(plan.chunk_lens) * (1 + plan.step_id % 3)


def build(index: int, asked: dict):
    asked = PLAIN | asked
    prefix = [7 + i for i in range(16 * asked["shared"])]
    own = [1000 + 97 * index + i for i in range(asked["prompt"])]
    prompt = (prefix + own)[:100]
    stop_ids = (scripted(tuple(prompt), 0, len(prompt) + 3),) if asked["stops"] else ()
    queue, first_token, end = asked["deadlines"]
    return make_request(
        f"r{index}",
        prompt,
        asked["max_tokens"],
        n=asked["n"],
        min_tokens=min(asked["min_tokens"], asked["max_tokens"]),
        ignore_eos=asked["ignore_eos"],
        grammar=asked["grammar"],
        prompt_logprobs=asked["prompt_logprobs"],
        priority=asked["priority"],
        tenant=asked["tenant"],
        stop_ids=stop_ids,
        queue_deadline=queue,
        first_token_deadline=first_token,
        deadline=end,
    )


def natural_ids(request, choice: int) -> tuple[list[int], str]:
    """What this choice emits if nobody interferes, and why it ends."""
    prompt, params, ids = tuple(request.prompt_ids), request.params, []
    ends = {*params.stop_ids, *([] if params.ignore_eos else [EOS])}
    for i in range(params.max_tokens):
        ids.append(drawn(with_ends, prompt, choice, len(prompt) + i, params, (EOS,)))
        if (ids[-1] in ends and i >= params.min_tokens) or (ids[-1] == EOS and params.grammar):
            return ids, FINISH_STOP
    return ids, FINISH_LENGTH


def build_drive(num_blocks: int, **config) -> Drive:
    scheduler = make_scheduler(num_blocks, max_model_len=144, eos_ids=(EOS,), **config)
    windows, staged = scheduler.config.windows, scheduler.config.num_stages > 1
    executor = FakeExecutor(with_ends, staged=staged, windows=windows, eos_ids=(EOS,), seconds=some_seconds)
    return Drive(scheduler, executor)


def play(config: dict, script: list) -> Drive:
    """Runs a script of events to the end; every promise is checked on the way and at the end."""
    # As many blocks for each group: the longest sequence then fits whatever the windows are.
    config = config | {"num_blocks": config["num_blocks"] * len(config.get("windows", (0,)))}
    d = build_drive(**config)
    added, cut, now = {}, set(), 0
    for kind, detail in script:
        if kind == "add":
            request = build(len(added), detail)
            added[request.request_id] = request
            d.add(request)
        elif kind == "step":
            d.step()
        elif kind == "submit":
            d.submit()
        elif kind == "expire":
            now = max(now, detail)
            cut |= expire(d, now)
        elif kind == "abort":
            cut.add(f"r{detail}")
            d.take(d.scheduler.abort(f"r{detail}"))
        else:
            index, choice = detail
            if (count := len(d.emitted.get((f"r{index}", choice), []))) and (f"r{index}", choice) not in d.endings:
                cut.add(f"r{index}")
                d.take(d.scheduler.finish(f"r{index}", choice, count))
        d.scheduler.check()
    d.run(20_000)
    finish(d, added, cut)
    return d


def expire(d: Drive, now: int) -> set[str]:
    """Ids of the requests that this ended: each with the right leaf, and uncomputed if it never began."""
    begun = {id for id, choices in d.scheduler._requests.items() if any(seq.started for seq in choices)}
    told = {id for (id, _), ids in d.emitted.items() if ids}
    deltas = d.scheduler.expire(now)
    d.take(deltas)
    for delta in deltas:
        assert delta.finish_reason == FINISH_ERROR
        assert delta.error_code in ("queue_timeout", "first_token_timeout", "request_timeout")
        if delta.error_code == "queue_timeout":
            assert delta.request_id not in begun
        if delta.error_code == "first_token_timeout":
            assert delta.request_id not in told
    for choices in d.scheduler._requests.values():
        request = choices[0].request
        assert request.deadline is None or request.deadline > now
        assert request.queue_deadline is None or request.queue_deadline > now or request.request_id in begun
        assert request.first_token_deadline is None or request.first_token_deadline > now or request.request_id in told
    return {delta.request_id for delta in deltas}


def finish(d: Drive, added: dict, cut: set) -> None:
    for request_id, request in added.items():
        for choice in range(request.params.n):
            ending, (ids, reason) = d.endings[request_id, choice], natural_ids(request, choice)
            got = d.emitted[request_id, choice]
            assert got == ids[: len(got)]
            if request_id not in cut:
                assert got == ids
                assert ending.finish_reason == reason
                assert ending.usage.num_generated == len(ids)
        told, wanted = d.told.get(request_id, []), []
        if request.params.prompt_logprobs is not None:
            wanted = expected_prompt_logprobs(request)
            assert d.endings[request_id, 0].usage.num_cached == 0
        assert told == wanted[: len(told)]
        if request_id not in cut or d.emitted[request_id, 0]:
            assert told == wanted
    assert len(d.endings) == sum(r.params.n for r in added.values())
    assert d.scheduler.pool.num_referenced == 0
    assert not d.scheduler.running
    assert not len(d.scheduler.waiting)
    d.scheduler.check()


EXAMPLES = int(os.environ.get("PACELINE_EXAMPLES", "300"))  # the prover asks for more


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs, st.lists(events, max_size=60))
def test_every_choice_ends_once_with_its_own_ids_whatever_happens(config, script):
    play(config, script)


@settings(max_examples=100, deadline=None)
@given(configs, st.lists(requests, min_size=1, max_size=8))
def test_tokens_computed_are_accounted_for(config, asked):
    d = play(config | {"enable_prefix_caching": False}, [("add", a | {"n": 1}) for a in asked])
    counters = d.scheduler.counters
    needed = sum(e.usage.num_prompt + max(0, e.usage.num_generated - 1) for e in d.endings.values())
    assert counters.computed == needed + counters.recomputed + counters.discarded


@settings(max_examples=100, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 3), st.sampled_from(WINDOWS))
def test_with_room_for_all_computed_is_prompt_plus_generated_less_cached(asked, depth, num_stages, windows):
    config = {"num_blocks": 600, "depth": depth, "num_stages": num_stages, "windows": windows}
    d = play(config, [("add", a | {"n": 1}) for a in asked])
    counters = d.scheduler.counters
    needed = sum(
        e.usage.num_prompt + max(0, e.usage.num_generated - 1) - e.usage.num_cached for e in d.endings.values()
    )
    assert counters.preemptions == 0
    assert counters.computed == needed + counters.discarded


@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(configs, st.lists(requests, min_size=1, max_size=5), st.integers(0, 1))
def test_the_smallest_pool_that_accepts_the_longest_request_gets_every_one_done(config, asked, spare):
    config = {name: value for name, value in config.items() if name != "num_blocks"}
    built = [build(i, a | {"deadlines": PLAIN["deadlines"]}) for i, a in enumerate(asked)]
    longest = max(len(request.prompt_ids) + request.params.max_tokens for request in built)
    paging = make_scheduler(max_model_len=144, **config).config.paging
    d = build_drive(paging.num_blocks(longest) + spare, **config)
    d.add(*built)
    d.run(20_000)
    finish(d, {request.request_id: request for request in built}, set())


def test_a_fork_that_is_learnt_late_does_not_overwrite_what_the_cache_calls_its_parents():
    """At depth 2 the parent may fill the shared block, and so name it, before its fork is known."""
    config = {"num_blocks": 9, "depth": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_partial_prefills": 1}
    d = play(config, [("add", {"prompt": 15, "max_tokens": 2, "n": 2})])
    again = make_request("again", [*range(1000, 1015), scripted(tuple(range(1000, 1015)), 0, 15), 7], 2)
    d.add(again)
    d.run()
    assert d.emitted["again", 0] == natural_ids(again, 0)[0]


SCRIPT = """
import sys, hashlib
sys.path.insert(0, {root!r})
from paceline.proto import codec
from tests.cluster.engine.test_scheduler_properties import play
requests = [dict(prompt=9 + 11 * i % 60, shared=i % 4, max_tokens=20 + i, n=1 + i % 3, priority=i % 2,
                 tenant="ab"[i % 2], stops=i % 3 == 0, prompt_logprobs=(None, 2)[i % 2]) for i in range(12)]
script = []
for i, r in enumerate(requests):
    script += [("add", r), ("step", None), ("submit", None)]
    if i % 5 == 4:
        script.append(("abort", i - 2))
d = play(dict(num_blocks=12, depth=2, max_num_seqs=5, max_num_batched_tokens=40), script)
assert d.scheduler.counters.preemptions
print(len(d.executor.plans), hashlib.sha256(b"".join(map(codec.encode_step, d.executor.plans))).hexdigest())
"""


def test_the_same_inputs_give_byte_identical_plans_in_two_processes():
    outputs = []
    for seed in ("1", "2"):  # of str hashing, on which no order may depend
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(root=str(ROOT))],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert int(outputs[0].split()[0]) > 30
