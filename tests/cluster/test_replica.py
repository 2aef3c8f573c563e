"""A replica over real gRPC: raw frames for what the wire promises, and the router's own link for the whole."""

import asyncio
import logging
import threading
import time
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from paceline.cluster import outbox as outbox_module
from paceline.cluster import replica as replica_module
from paceline.cluster import service as service_module
from paceline.cluster.engine.executor import Loaded
from paceline.proto import codec
from paceline.proto import replica_pb2 as pb
from paceline.proto.errors import ContextLengthExceeded, StartupError
from paceline.proto.grammar import MAX_GRAMMAR_BYTES
from paceline.proto.load import RankMemory
from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from paceline.router.link import Link, Mailbox, attach, open_channel
from tests.cluster.drive import (
    CARD,
    TIMEOUT,
    GatedExecutor,
    LightExecutor,
    RawRouter,
    attached,
    hello,
    running_replica,
    stepping,
    until,
)
from tests.cluster.engine.fakes import expected_ids, expected_prompt_logprobs, make_request
from tests.fakes import tiny_card

STATUS = grpc.StatusCode
# Of a client that does not read: gRPC takes in little on its behalf before the other side has to wait.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


async def refusal_of(router: RawRouter, **first) -> tuple[grpc.StatusCode, str]:
    """With what the stream ends, once the ``first`` frame is sent if one is given."""

    async def converse() -> None:
        if first:
            await router.send(**first)
        await router.read_to_end()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await converse()
    return caught.value.code(), caught.value.details()


@asynccontextmanager
async def linked(address: str, router_id: str):
    """The router's own end of the stream, reading."""
    async with open_channel(address) as channel:
        link = await attach(channel, address, CARD, router_id, "1", TIMEOUT)
        reading = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


# -- the handshake -----------------------------------------------------------------------------------------------------


async def test_a_hello_is_answered_with_a_welcome_that_names_replica_and_model():
    async with running_replica() as replica:
        router = await attached(replica)
        welcome = router.frames[0].welcome
        assert (welcome.replica_id, welcome.protocol, welcome.fingerprint) == ("replica-t", 1, CARD.fingerprint)
        assert welcome.incarnation == replica.server.incarnation
        limits = replica.server._host.limits
        assert (welcome.max_num_seqs, limits.max_num_seqs) == (16, 16)
        assert welcome.max_waiting_requests == limits.max_waiting_requests
        assert welcome.max_waiting_tokens == limits.max_waiting_tokens


@pytest.mark.parametrize(
    ("first", "status", "words"),
    [
        ({"hello": hello(protocol=2)}, STATUS.FAILED_PRECONDITION, "protocol 2 is not 1"),
        ({"hello": hello(fingerprint="other")}, STATUS.FAILED_PRECONDITION, "serves fake-1, not other"),
        ({"hello": hello(router_id="")}, STATUS.INVALID_ARGUMENT, "names a router"),
        ({"cancel": pb.Cancel(handle=1)}, STATUS.INVALID_ARGUMENT, "hello"),
    ],
)
async def test_a_router_that_does_not_fit_is_refused_with_the_reason(first, status, words):
    async with running_replica() as replica:
        code, details = await refusal_of(RawRouter(replica.stub.Attach()), **first)
        assert code is status
        assert words in details


async def test_a_hello_without_a_fingerprint_takes_any_model():
    async with running_replica() as replica:
        router = RawRouter(replica.stub.Attach())
        await router.send(hello=hello(fingerprint=""))
        await router.read_until(lambda: bool(router.of("welcome")))


async def test_before_the_model_is_loaded_every_door_but_the_state_is_unavailable():
    may_load, executor = threading.Event(), GatedExecutor(gate_open=True)

    def load(config, on_phase):
        assert may_load.wait(TIMEOUT)
        return Loaded(executor, CARD, 64, "loaded at last")

    async with running_replica(executor, load=load, wait=False) as replica:
        try:
            state = await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)
            assert (state.state, state.replica_id) == ("loading", "replica-t")
            refusal = await refusal_of(RawRouter(replica.stub.Attach()), hello=hello())
            assert refusal == (STATUS.UNAVAILABLE, "replica replica-t is loading")
            generating = replica.stub.Generate(pb.GenerateRequest(submission=codec.submission_of(make_request())))
            for call in (replica.stub.GetModel(pb.GetModelRequest()), anext(aiter(generating))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asyncio.wait_for(call, TIMEOUT)
                assert caught.value.code() is STATUS.UNAVAILABLE
        finally:
            may_load.set()
        assert await asyncio.wait_for(replica.server.ready(), TIMEOUT) == CARD
        assert replica.server.description == "loaded at last"
        await attached(replica)


async def test_a_model_that_cannot_load_is_what_ready_raises():
    def load(config, on_phase):
        raise StartupError("no such file: model.safetensors")

    async with running_replica(load=load, wait=False) as replica:
        with pytest.raises(StartupError, match="no such file"):
            await asyncio.wait_for(replica.server.ready(), TIMEOUT)
        assert replica.server.state == "dead"
        refusal = await refusal_of(RawRouter(replica.stub.Attach()), hello=hello())
        assert refusal == (STATUS.UNAVAILABLE, "replica replica-t is dead")


async def test_a_port_in_use_is_a_startup_error():
    async with running_replica() as replica:
        port = int(replica.address.rpartition(":")[2])
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with running_replica(port=port):
                pass


# -- requests on a stream ----------------------------------------------------------------------------------------------


async def test_a_request_is_accepted_before_its_deltas_and_ends_once():
    async with running_replica() as replica:
        router, request = await attached(replica), make_request(max_tokens=20)
        await router.submit(7, request)
        await router.read_until(lambda: bool(router.endings(7)))
        kinds = [frame.WhichOneof("frame") for frame in router.frames]
        assert kinds[:3] == ["welcome", "accepted", "deltas"]
        assert router.handles("accepted") == [7]
        assert router.ids(7) == expected_ids(request)
        assert router.endings(7) == [(0, "length")]
        usage = router.usage(7)
        assert (usage.num_prompt, usage.num_cached, usage.num_generated) == (20, 0, 20)


async def test_a_refused_request_carries_code_and_field_and_the_stream_goes_on():
    async with running_replica() as replica:
        router = await attached(replica)
        await router.submit(1, make_request("long", max_tokens=5000))
        await router.submit(2, make_request("short", max_tokens=2))
        await router.read_until(lambda: bool(router.endings(2)))
        (rejected,) = router.of("rejected")
        assert rejected.handle == 1
        error = codec.error_of(rejected.error)
        assert isinstance(error, ContextLengthExceeded)
        assert error.param == "max_tokens"
        assert "2048" in error.message
        assert router.handles("accepted") == [2]


@pytest.mark.parametrize("depth", [1, 2])
async def test_forty_requests_over_two_routers_get_exactly_their_own_ids(depth):
    async with (
        running_replica(depth=depth) as replica,
        linked(replica.address, "router-a") as one,
        linked(replica.address, "router-b") as other,
    ):

        async def ask(link: Link, index: int, prompt_len: int) -> None:
            request = make_request(f"r{index}", prompt=prompt_len, max_tokens=5 + index, n=1 + index % 3)
            mailbox, got, ended = Mailbox(), {}, set()
            ticket = link.submit(request, mailbox)
            await ticket.accepted
            while len(ended) < request.params.n:
                for its_ticket, delta in await mailbox.take():
                    assert its_ticket is ticket
                    assert delta.choice not in ended
                    ids = got.setdefault(delta.choice, [])
                    assert delta.offset == len(ids)
                    ids += delta.ids
                    if delta.finish_reason:
                        assert delta.finish_reason == "length"
                        ended.add(delta.choice)
            assert got == {choice: expected_ids(request, choice) for choice in range(request.params.n)}

        async with asyncio.timeout(20):  # both routers use the same request ids, for different prompts
            await asyncio.gather(*(ask(one, i, 10 + i) for i in range(20)), *(ask(other, i, 50 + i) for i in range(20)))
        assert (one.in_flight, other.in_flight) == (0, 0)
        num_choices = 2 * sum(1 + i % 3 for i in range(20))
        await until(lambda: one.load.finished_total == other.load.finished_total == {"length": num_choices})
        assert (one.load.running, one.load.waiting, one.load.blocks_used) == (0, 0, 0)


async def test_after_a_cancel_nothing_more_is_sent_and_the_others_go_on():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router, kept = await attached(replica), make_request("kept", max_tokens=200)
        await router.submit(1, make_request("gone", prompt=100, max_tokens=1000))
        await router.submit(2, kept)
        async with stepping(executor):
            await router.read_until(lambda: len(router.ids(1)) >= 2 and bool(router.ids(2)))
        await router.send(cancel=pb.Cancel(handle=1))
        await router.send(cancel=pb.Cancel(handle=1))  # twice, and one that never was: no offence
        await router.send(cancel=pb.Cancel(handle=99))
        await router.submit(3, kept)  # refused by the door at once: what was sent before has been heard
        await router.read_until(lambda: router.handles("rejected") == [3])
        num_steps = len(executor.plans)
        executor.open_gate()
        await router.read_until(lambda: bool(router.endings(2)))
        assert len(router.ids(1)) <= num_steps < len(executor.plans) - 100
        assert router.endings(1) == []
        assert router.ids(2) == expected_ids(kept)
        await until(lambda: replica.server.load.finished_total == {"abort": 1, "length": 1})
        assert (replica.server.load.running, replica.server.load.blocks_used) == (0, 0)


async def test_finish_ends_one_choice_as_a_success_with_the_ids_the_router_counted():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router, request = await attached(replica), make_request(max_tokens=40, n=2)
        await router.submit(1, request)
        executor.allow(8)
        await router.read_until(lambda: len(router.ids(1, 0)) >= 6)
        await router.send(finish=pb.Finish(handle=1, choice=0, num_ids=4))
        await router.submit(2, request)
        await router.read_until(lambda: router.handles("rejected") == [2])
        executor.open_gate()
        await router.read_until(lambda: len(router.endings(1)) == 2)
        assert router.endings(1) == [(0, "stop"), (1, "length")]
        assert router.usage(1, 0).num_generated == 4
        assert router.ids(1, 1) == expected_ids(request, 1)


async def test_a_newer_attempt_ends_the_older_one_and_an_older_one_is_refused():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        old_stream, new_stream = await attached(replica), await attached(replica)
        first, second = make_request(max_tokens=1000), make_request(max_tokens=200)
        submission = codec.submission_of(second, 1)
        async with stepping(executor):
            await old_stream.submit(1, first)
            await old_stream.read_until(lambda: old_stream.handles("accepted") == [1])
            for handle, attempt in ((1, 2), (2, 1), (3, 2)):
                submission.handle, submission.attempt = handle, attempt
                await new_stream.send(submit=submission)
            await new_stream.read_until(lambda: new_stream.handles("accepted") == [1])
        executor.open_gate()
        await new_stream.read_until(lambda: bool(new_stream.endings(1)))
        await old_stream.read_until(lambda: bool(old_stream.endings(1)))
        assert old_stream.endings(1) == [(0, "abort")]
        assert new_stream.ids(1) == expected_ids(second)
        assert new_stream.handles("rejected") == [2, 3]
        assert {r.error.param for r in new_stream.of("rejected")} == {"request_id"}


async def test_a_stream_that_breaks_takes_its_own_requests_along_and_no_other():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        broken, sound = await attached(replica, "router-a"), await attached(replica, "router-b")
        request = make_request(max_tokens=200)
        await broken.submit(1, make_request("x", max_tokens=1000))
        await broken.submit(2, make_request("y", max_tokens=1000, n=2))
        await sound.submit(1, request)
        async with stepping(executor):
            await broken.read_until(lambda: len(broken.handles("accepted")) == 2)
            await sound.read_until(lambda: bool(sound.ids(1)))
            broken.call.cancel()
            await until(lambda: replica.server.load.finished_total.get("abort") == 3)
        executor.open_gate()
        await sound.read_until(lambda: bool(sound.endings(1)))
        assert sound.ids(1) == expected_ids(request)
        await until(lambda: replica.server.load.blocks_used == 0)


async def test_a_router_that_closes_its_side_is_let_go():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, make_request(max_tokens=1000))
        await router.call.done_writing()
        await router.read_to_end()
        assert await router.call.code() is STATUS.OK
        executor.open_gate()
        await until(lambda: replica.server.load.finished_total == {"abort": 1})
        assert replica.server.load.blocks_used == 0


@pytest.mark.parametrize("second", [{"hello": hello()}, {"submit": codec.submission_of(make_request("b"), 1)}])
async def test_what_no_router_of_ours_sends_ends_the_stream(second):
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, make_request("a"))
        code, _ = await refusal_of(router, **second)
        assert code is STATUS.INVALID_ARGUMENT
        executor.open_gate()
        await until(lambda: replica.server.load.finished_total.get("abort") == 1)


async def test_a_router_that_stops_reading_loses_its_stream_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 100_000)
    executor = LightExecutor()
    async with (
        running_replica(executor, num_blocks=2048) as replica,
        grpc.aio.insecure_channel(replica.address, SMALL_WINDOW) as channel,
    ):
        slow, other = await attached(replica, "slow", ReplicaServiceStub(channel)), await attached(replica, "other")
        for handle in range(1, 16):
            await slow.submit(handle, make_request(f"s{handle}", prompt=4, max_tokens=1900))
        request = make_request("quick", prompt=4, max_tokens=100)
        await other.submit(1, request)
        executor.open_gate()
        await other.read_until(lambda: bool(other.endings(1)))
        assert other.ids(1) == expected_ids(request)
        await until(lambda: replica.server.load.finished_total.get("abort") == 15)
        assert replica.server.load.blocks_used == 0
        assert not slow.call.done()
        code, details = await refusal_of(slow)
        assert code is STATUS.RESOURCE_EXHAUSTED
        assert "slow" in details


# -- heartbeats --------------------------------------------------------------------------------------------------------


async def test_a_load_comes_at_once_and_then_each_second():
    async with running_replica(num_blocks=77) as replica:
        router = await attached(replica)
        await router.read_until(lambda: len(router.loads) == 1)
        began = time.monotonic()
        await asyncio.wait_for(router.read_until(lambda: len(router.loads) == 4), 3.5)
        assert time.monotonic() - began > 0.9
        assert {load.blocks_total for load in router.loads} == {77}


async def test_falling_idle_is_told_at_once_with_all_counters(monkeypatch):
    monkeypatch.setattr(service_module, "HEARTBEAT", 3600.0)
    async with running_replica() as replica:
        router = await attached(replica)
        await router.submit(1, make_request(max_tokens=9))
        await router.read_until(lambda: bool(router.endings(1)))
        await asyncio.wait_for(router.read_until(lambda: router.loads[-1].generation_tokens_total == 9), 1.0)
        load = router.loads[-1]
        assert (load.running, load.waiting, load.blocks_used, load.finished_total) == (0, 0, 0, {"length": 1})


# -- single calls ------------------------------------------------------------------------------------------------------


async def generate(replica, request, **fields) -> tuple[dict[int, list[int]], list[pb.Ending]]:
    submission = codec.submission_of(request)
    for name, value in fields.items():
        setattr(submission, name, value)
    got, endings = {}, []
    async for frame in replica.stub.Generate(pb.GenerateRequest(submission=submission), timeout=TIMEOUT):
        for _, delta in codec.deltas_of(frame.deltas, str):
            got.setdefault(delta.choice, []).extend(delta.ids)
        endings += frame.deltas.endings
    return got, endings


async def test_generate_runs_one_request_without_a_router():
    async with running_replica() as replica:
        request = make_request(max_tokens=12, n=3)
        got, endings = await generate(replica, request)
        assert got == {choice: expected_ids(request, choice) for choice in range(3)}
        assert [ending.finish_reason for ending in endings] == ["length"] * 3


async def test_generate_tells_of_the_prompt_though_no_token_is_asked_for():
    async with running_replica() as replica:
        request, told = make_request(prompt=700, max_tokens=0, n=2, prompt_logprobs=1), []
        submission = codec.submission_of(request)
        async for frame in replica.stub.Generate(pb.GenerateRequest(submission=submission), timeout=TIMEOUT):
            for _, delta in codec.deltas_of(frame.deltas, str):
                assert delta.ids == []
                told += delta.prompt_logprobs or []
        assert told == expected_prompt_logprobs(request)
        assert replica.server.load.finished_total == {"length": 2}


async def test_generate_without_an_id_or_names_for_blocks_still_uses_the_prefix_cache():
    async with running_replica() as replica:
        request = make_request(prompt=40, max_tokens=3, named=False)
        for cached in (0, 32):
            got, (ending,) = await generate(replica, request, request_id="")
            assert got == {0: expected_ids(request)}
            assert ending.num_cached == cached


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(prompt=[]), "no tokens"),
        (make_request(max_tokens=9999), "2048"),
        (make_request(min_tokens=9), "min_tokens is 9"),
        (make_request(prompt=[60_000]), "prompt_ids must be below 60000"),
        (make_request(logit_bias={60_000: 1.0}), "logit_bias must be below 60000"),
        (make_request(stop_ids=(3, 60_000)), "stop_ids must be below 60000"),
        (make_request(logprobs=129), "logprobs may ask for 128"),
        (make_request(prompt_logprobs=129), "prompt_logprobs may ask for 128"),
        (make_request(grammar="é" * (MAX_GRAMMAR_BYTES // 2 + 1)), f"longer than {MAX_GRAMMAR_BYTES} bytes"),
        (make_request(resume=((1,),)), "resume"),
    ],
)
async def test_generate_refuses_what_would_never_run_or_harm_others(request_, words):
    async with running_replica() as replica:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(replica, request_)
        assert caught.value.code() is STATUS.INVALID_ARGUMENT
        assert words in caught.value.details()
        assert (await generate(replica, make_request(max_tokens=2)))[1][0].finish_reason == "length"


async def test_a_generate_call_that_is_cancelled_ends_its_request():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        submission = codec.submission_of(make_request(max_tokens=1000))
        call = replica.stub.Generate(pb.GenerateRequest(submission=submission))
        async with stepping(executor):
            await asyncio.wait_for(anext(aiter(call)), TIMEOUT)
            call.cancel()
            await until(lambda: replica.server.load.finished_total == {"abort": 1})
        assert replica.server.load.blocks_used == 0


async def test_abort_by_id_is_told_to_whoever_asked_for_the_request():
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, make_request("doomed", max_tokens=1000, n=2))
        executor.allow(2)
        await router.read_until(lambda: bool(router.ids(1)))
        answer = await replica.stub.Abort(pb.AbortRequest(request_ids=["doomed", "unknown"]), timeout=TIMEOUT)
        assert answer.num_known == 1
        executor.open_gate()
        await router.read_until(lambda: len(router.endings(1)) == 2)
        assert sorted(router.endings(1)) == [(0, "abort"), (1, "abort")]


async def test_the_card_and_the_state_can_be_asked_for():
    card = tiny_card(chat_template="{{ messages }}", eos_ids=(2, 5))
    async with running_replica(card=card, num_blocks=31) as replica:
        answer = await replica.stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT)
        assert codec.card_from_json(answer.card_json) == card
        state = await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)
        assert (state.replica_id, state.state) == ("replica-t", "ready")
        assert state.incarnation == replica.server.incarnation
        assert (await replica.load()).blocks_total == 31


async def test_what_its_ranks_hold_is_told_with_the_state_and_to_each_router():
    ranks = tuple(RankMemory(rank=i, weight_bytes=10 + i, kv_bytes=20, kv_bytes_per_token=2) for i in range(2))
    async with running_replica(ranks=ranks) as replica:
        state = await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)
        assert tuple(map(codec.rank_of, state.ranks)) == ranks
        welcome = (await attached(replica)).frames[0].welcome
        assert tuple(map(codec.rank_of, welcome.ranks)) == ranks


async def test_what_each_phase_of_its_start_took_is_told_to_each_router():
    def load(config, on_phase):
        on_phase("imports", 1.5)
        on_phase("weights", 0.25)
        return Loaded(GatedExecutor(gate_open=True), CARD, 512, "a fake")

    async with running_replica(load=load) as replica:
        welcome = (await attached(replica)).frames[0].welcome
        assert dict(welcome.start_seconds) == {"imports": 1.5, "weights": 0.25}


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_an_executor_that_fails_ends_every_request_and_the_replica(caplog):
    executor = GatedExecutor(fail_at=300)
    async with running_replica(executor) as replica:
        routers = [await attached(replica, name) for name in ("router-a", "router-b")]
        for router in routers:
            await router.submit(1, make_request(max_tokens=1000))
            await router.submit(2, make_request("many", max_tokens=1000, n=3))
        async with stepping(executor):
            for router in routers:
                await router.read_until(lambda router=router: router.handles("accepted") == [1, 2])
        executor.open_gate()
        for router in routers:
            await router.read_to_end()
            assert await router.call.code() is STATUS.OK
            assert router.endings(1) == [(0, "error")]
            assert sorted(router.endings(2)) == [(0, "error"), (1, "error"), (2, "error")]
            (message,) = {ending.error for frame in router.of("deltas") for ending in frame.endings}
            assert message == "the engine failed: RuntimeError"
        await asyncio.wait_for(replica.server.failed.wait(), TIMEOUT)
        assert replica.server.state == "dead"
        assert executor.closed.is_set()
        refusal = await refusal_of(RawRouter(replica.stub.Attach()), hello=hello())
        assert refusal == (STATUS.UNAVAILABLE, "replica replica-t is dead")
    assert any("the device is gone" in str(record.exc_info) for record in caplog.records if record.exc_info)


async def test_a_row_that_fails_ends_one_request_and_the_others_never_notice():
    async with running_replica(GatedExecutor(faults={0: [0]})) as replica:
        router, sound = await attached(replica), make_request("sound", max_tokens=10)
        await router.submit(1, make_request("faulty", max_tokens=10))
        await router.submit(2, sound)
        replica.executor.open_gate()
        await router.read_until(lambda: bool(router.endings(1)) and bool(router.endings(2)))
        assert router.endings(1) == [(0, "error")]
        assert router.ids(2) == expected_ids(sound)
        assert replica.server.state == "ready"


async def test_stop_tells_open_requests_closes_streams_and_leaves_no_thread(caplog, monkeypatch):
    monkeypatch.setattr(replica_module, "STOP_GRACE", 10 * TIMEOUT)
    caplog.set_level(logging.WARNING)
    before = set(threading.enumerate())
    executor = GatedExecutor()
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, make_request(max_tokens=1000, n=2))
        executor.allow(2)
        await router.read_until(lambda: bool(router.ids(1)))
        stopping = asyncio.create_task(replica.server.stop())
        executor.open_gate()
        await router.read_to_end()
        await asyncio.wait_for(stopping, TIMEOUT)  # nobody has to be cut off
        assert sorted(router.endings(1)) == [(0, "error"), (1, "error")]
        assert await router.call.code() is STATUS.OK
        assert executor.closed.is_set()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "engine"]
    assert [record for record in caplog.records if record.name.startswith(("grpc", "asyncio"))] == []


async def test_stop_does_not_wait_for_a_router_that_does_not_read():
    executor = LightExecutor(gate_open=True)
    async with (
        running_replica(executor, num_blocks=2048) as replica,
        grpc.aio.insecure_channel(replica.address, SMALL_WINDOW) as channel,
    ):
        stuck = await attached(replica, stub=ReplicaServiceStub(channel))
        for handle in range(1, 16):
            await stuck.submit(handle, make_request(f"s{handle}", prompt=4, max_tokens=1900))
        await until(lambda: replica.server.load.generation_tokens_total > 500)
        await asyncio.wait_for(replica.server.stop(), replica_module.STOP_GRACE + 2)
