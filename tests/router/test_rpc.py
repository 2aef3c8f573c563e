"""Calls over gRPC: what HTTP has no word for, errors in detail, and every way in which a call ends."""

import asyncio
import time

import grpc.aio
import pytest

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.proto.errors import BY_CODE, Overloaded
from paceline.router import rpc
from paceline.router.rpc_errors import status_of
from tests.e2e.server import free_port
from tests.fakes import FakeReplica, encode, prompt_logprobs_of, tiny_card
from tests.router.conftest import until
from tests.router.fronts import channel_to, details_of
from tests.router.rpc_client import ENDLESS, drain, grpc_router, read_all, streamed, whole


async def test_a_stream_opens_with_the_prompt_and_closes_with_usage(router):
    async with FakeReplica(text="Hello world.") as fake, grpc_router(router, fake.address) as (stub, _, _):
        messages = [message async for message in stub.StreamGenerate(streamed("hello there"))]
        assert [message.HasField("prompt") for message in messages] == [True] + [False] * (len(messages) - 1)
        assert messages[0].prompt == pb.PromptInfo(model="tiny", num_tokens=len(encode("hello there")))
        assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
        assert not messages[-1].choices
        assert "".join(choice.text for message in messages for choice in message.choices) == "Hello world."
        assert not any(choice.token_ids or choice.logprobs for message in messages for choice in message.choices)


async def test_text_can_be_left_out(router):
    async with FakeReplica(text="Hello") as fake, grpc_router(router, fake.address) as (stub, _, _):
        answer = await stub.Generate(whole(output=pb.Output(text=False, token_ids=True)))
        assert answer.choices[0].text == ""
        assert list(answer.choices[0].token_ids) == [*encode("Hello"), 2]


async def test_the_prompts_logprobs_come_in_the_first_message(router):
    prompt = "hello there, the end"
    ask = {"output": pb.Output(prompt_logprobs=2), "sampling": pb.Sampling(max_tokens=3, n=2)}
    async with FakeReplica(text="Hello world.") as fake, grpc_router(router, fake.address) as (stub, _, _):
        answer = await stub.Generate(whole(prompt, **ask))
        first, *others = [message async for message in stub.StreamGenerate(streamed(prompt, **ask))]
        told = prompt_logprobs_of(fake.submissions[0])
        assert [entry.token.logprob for entry in answer.prompt.logprobs] == [entry.logprob for entry in told]
        assert [entry.token.id for entry in answer.prompt.logprobs] == encode(prompt)[1:]
        assert [[top.id for top in entry.top] for entry in answer.prompt.logprobs] == [entry.top_ids for entry in told]
        assert first.prompt == answer.prompt
        assert first.choices
        assert not any(message.HasField("prompt") for message in others)


async def test_an_echo_begins_each_choice_with_the_prompt_and_may_be_all_of_it(router):
    async with FakeReplica(text="Yes.") as fake, grpc_router(router, fake.address) as (stub, _, _):
        echo = pb.Output(echo=True, logprobs=0)
        answer = await stub.Generate(whole("hello", output=echo, sampling=pb.Sampling(n=2)))
        assert [choice.text for choice in answer.choices] == ["helloYes."] * 2
        answer = await stub.Generate(whole("hello", output=echo, sampling=pb.Sampling(max_tokens=0)))
        (choice,) = answer.choices
        assert (choice.text, choice.finish.reason) == ("hello", pb.FINISH_REASON_LENGTH)
        assert answer.usage.completion_tokens == 0
        assert len(answer.prompt.logprobs) == len(encode("hello")) - 1


async def test_what_of_the_end_is_shown_is_asked_for_as_over_http(router):
    async with FakeReplica(text="one two") as fake, grpc_router(router, fake.address) as (stub, _, _):
        for output, text in (
            (pb.Output(), "one"),
            (pb.Output(include_stop_str_in_output=True), "one t"),
        ):
            answer = await stub.Generate(whole(output=output, sampling=pb.Sampling(stop=[" t"])))
            assert answer.choices[0].text == text
        shown = pb.Output(include_stop_str_in_output=True, skip_special_tokens=False)
        answer = await stub.Generate(whole(output=shown, sampling=pb.Sampling(stop=[" t"], min_tokens=4)))
        assert answer.choices[0].text == "one two<|im_end|>"


async def test_the_request_id_comes_back(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (stub, _, _):
        call = stub.Generate(whole(), metadata=[("x-request-id", "mine")])
        await call
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(model="other"), metadata=[("x-request-id", "mine")])
        assert dict(raised.value.trailing_metadata())["x-request-id"] == "mine"


async def test_models_and_tokens(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (stub, _, channel):
        models = inference_pb2_grpc.ModelServiceStub(channel)
        (model,) = (await models.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.max_model_len) == ("tiny", 256)
        assert (await models.GetModel(pb.GetModelRequest(name="tiny"))).model == model
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await models.GetModel(pb.GetModelRequest(name="other"))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        answer = await stub.Tokenize(pb.TokenizeRequest(text="hello there"))
        assert (list(answer.token_ids), answer.count, answer.max_model_len) == (encode("hello there"), 4, 256)
        back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, *answer.token_ids]))
        assert back.text == "<|im_start|>hello there"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_has_a_status_with_details(code):
    status = status_of(BY_CODE[code]("no" * 1000, "p" * 1000, 1.5))
    assert status.code.name == BY_CODE[code].grpc_code
    assert sum(len(value) for _, value in status.trailing_metadata) < 2048


async def test_a_bad_field_is_named_in_the_details(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(sampling=pb.Sampling(temperature=float("nan"))))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(raised.value)
        assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("invalid_value", "paceline")
        (violation,) = details["BadRequest"].field_violations
        assert (violation.field, violation.description) == ("temperature", "temperature must be a number")


async def test_a_full_house_says_when_to_come_again(router):
    full = Overloaded("the queue is full", retry_after=2.5)
    async with FakeReplica(reject=full) as fake, grpc_router(router, fake.address) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole())
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(raised.value)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5


async def test_no_replica_is_unavailable(router):
    port = free_port()
    async with router(wait=False, grpc_port=port), channel_to(port) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole())
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert details_of(raised.value)["ErrorInfo"].reason == "no_replica"
        assert details_of(raised.value)["RetryInfo"].retry_delay.seconds == 1


async def test_a_replica_that_dies_in_mid_stream_aborts_it_and_tells_how_far_it_came(router):
    async with FakeReplica(die_at=6, delay=0.01) as fake, grpc_router(router, fake.address) as (stub, _, _):
        told: list[pb.StreamGenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_all(stub.StreamGenerate(streamed(sampling=ENDLESS)), told)
        assert told
        assert raised.value.code() == grpc.StatusCode.ABORTED
        info = details_of(raised.value)["ErrorInfo"]
        assert (info.reason, info.metadata["tokens_emitted"]) == ("replica_lost", "6")


async def test_a_replica_that_dies_before_a_whole_answer_is_unavailable(router):
    async with FakeReplica(die_at=6) as fake, grpc_router(router, fake.address) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(sampling=ENDLESS))
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


# -- the end of a call -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancel_frees_what_runs(router, stream):
    async with FakeReplica(delay=0.02) as fake, grpc_router(router, fake.address) as (stub, _, _):
        if stream:
            call = stub.StreamGenerate(streamed(sampling=ENDLESS))
            await call.read()
        else:
            call = stub.Generate(whole(sampling=ENDLESS))
            await until(lambda: fake.running)
        call.cancel()
        await until(lambda: fake.cancels and not fake.running)


async def test_a_cancel_frees_what_waits(router):
    async with FakeReplica(hold=True) as fake, grpc_router(router, fake.address) as (stub, _, _):
        call = stub.Generate(whole())
        await until(lambda: fake.submissions)
        call.cancel()
        await until(lambda: fake.cancels)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_ends_the_call_and_frees_what_runs(router, stream):
    async with FakeReplica(delay=0.05) as fake, grpc_router(router, fake.address) as (stub, _, _):
        if stream:
            call = read_all(stub.StreamGenerate(streamed(sampling=ENDLESS), timeout=0.5), [])
        else:
            call = stub.Generate(whole(sampling=ENDLESS), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: fake.cancels and not fake.running)


async def test_a_connection_that_goes_away_frees_everything_on_it(router, caplog):
    async with FakeReplica(delay=0.02) as fake:
        port = free_port()
        async with router(fake.address, grpc_port=port):
            async with channel_to(port) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                calls = [stub.StreamGenerate(streamed(sampling=ENDLESS)) for _ in range(5)]
                await asyncio.gather(*(call.read() for call in calls))
            await until(lambda: len(fake.cancels) == 5 and not fake.running)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("key", "code"),
    [("x-queue-timeout-ms", "queue_timeout"), ("x-first-token-timeout-ms", "first_token_timeout")],
)
async def test_times_of_its_own_go_in_metadata(router, key, code):
    async with FakeReplica(hold=True) as fake, grpc_router(router, fake.address) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(), metadata=[(key, "200")])
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert details_of(raised.value)["ErrorInfo"].reason == code
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(), metadata=[(key, "soon")])
        assert details_of(raised.value)["BadRequest"].field_violations[0].field == key


async def test_the_clients_deadline_goes_to_the_replica(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (stub, _, _):
        await stub.Generate(whole(), timeout=700)
        assert 600 < fake.submissions[0].deadline - time.time() < 710  # gRPC rounds long times up


@pytest.mark.parametrize("sleep", [0.0, 0.6])
async def test_a_client_that_does_not_read_is_cancelled_and_frees_what_runs(router, monkeypatch, caplog, sleep):
    monkeypatch.setattr(rpc, "FAIL_WAIT", 0.3)
    card = tiny_card(max_model_len=200_000)
    settings = {"slow_reader_seconds": 0.5, "max_unread_tokens": 200}
    async with (
        FakeReplica(card=card, per_frame=50) as fake,
        grpc_router(router, fake.address, **settings) as (stub, _, _),
    ):
        endless = pb.Sampling(ignore_eos=True, max_tokens=150_000)
        call = stub.StreamGenerate(streamed(sampling=endless, output=pb.Output(logprobs=20)))
        await call.read()
        await until(lambda: fake.cancels and not fake.running, timeout=10)
        await asyncio.sleep(sleep)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(call)
        assert raised.value.code() == grpc.StatusCode.CANCELLED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
