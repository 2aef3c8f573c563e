"""One table of requests through HTTP and gRPC, streamed and whole: the same answers, and the same errors."""

import asyncio

import grpc.aio
import pytest

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.proto.errors import KVPoolExceeded, Overloaded
from tests.e2e.server import free_port
from tests.fakes import FakeReplica, encode, tiny_card
from tests.router.fronts import WAYS, Outcome, ask, channel_to, spec_of

TEXT = "The capital of France is Paris. Один два три."
HI = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "system", "content": "be brief"}, *HI, {"role": "assistant", "content": "Paris", "name": "p"}, *HI]

VALID = {
    "text": {"prompt": "hello there"},
    "ids": {"prompt": encode("hello there")},
    "messages": {"messages": HI},
    "a longer talk": {"messages": LONG, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "the model's name": {"prompt": "x", "model": "tiny"},
    "length": {"prompt": "x", "max_tokens": 3},
    "greedy": {"prompt": "x", "temperature": 0},
    "choices": {"prompt": "x", "n": 3, "seed": 7, "max_tokens": 5},
    "a negative seed": {"messages": HI, "seed": -5},
    "stop over token borders": {"prompt": "x", "stop": ["tal of", "Paris"]},
    "stop in a chat": {"messages": HI, "stop": ["France"], "n": 2},
    "stop ids": {"prompt": "x", "stop_token_ids": encode("Paris")},
    "past the end": {"prompt": "x", "ignore_eos": True, "max_tokens": 50},
    "logprobs": {"prompt": "x", "logprobs": 3},
    "logprobs of the drawn ones": {"prompt": "x", "logprobs": 0, "max_tokens": 4},
    "logprobs in a chat": {"messages": HI, "logprobs": True, "top_logprobs": 2},
    "logprobs up to a stop string": {"messages": HI, "logprobs": True, "top_logprobs": 1, "stop": "capital"},
    "penalties": {"prompt": "x", "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.1},
    "bias": {"prompt": "x", "logit_bias": {"5": 10, "6": -100}},
    "priority": {"prompt": "x", "priority": -3},
    "top_k of vLLM": {"prompt": "x", "top_k": -1},
    "at least some tokens": {"prompt": "x", "min_tokens": 4, "max_tokens": 9},
    "an echo": {"prompt": "hello <|im_end|>", "echo": True, "n": 2, "max_tokens": 3},
    "an echo of ids": {"prompt": encode("hello there"), "echo": True},
    "an echo alone": {"prompt": "hello there", "echo": True, "max_tokens": 0},
    "what ended it stays": {"prompt": "x", "stop": ["tal of"], "include_stop_str_in_output": True},
    "control tokens are shown": {"prompt": "x", "skip_special_tokens": False, "include_stop_str_in_output": True},
    "a salt": {"prompt": "hello there", "cache_salt": "mine"},
    "the last tokens": {"prompt": encode("hello there, hello world"), "truncate_prompt_tokens": 3},
    "what leaves room": {"messages": HI * 40, "truncate_prompt_tokens": -1, "max_tokens": 100},
    "no token that begins texts": {"prompt": "x", "add_special_tokens": False},
    "no opening": {"messages": HI, "add_generation_prompt": False},
    "a message goes on": {
        "messages": [*HI, {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
    },
    "variables": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "a choice": {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}},
    "a schema": {"messages": HI, "structured_outputs": {"json": {"type": "object", "properties": {"a": {}}}}},
    "an object": {"messages": HI, "structured_outputs": {"json_object": True}},
}
INVALID = {
    "no prompt": ({}, "invalid_value", "prompt"),
    "no ids": ({"prompt": []}, "invalid_value", "prompt"),
    "an empty text": ({"prompt": ""}, "invalid_value", "prompt"),
    "no messages": ({"messages": []}, "invalid_value", "messages"),
    "an unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    "a tool's role": ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "unsupported_field", "messages[1].role"),
    "no content": ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
    "an id too large": ({"prompt": [1, 100_000]}, "invalid_value", "prompt"),
    "another model": ({"prompt": "x", "model": "gpt"}, "model_not_found", "model"),
    "zero tokens": ({"prompt": "x", "max_tokens": 0}, "invalid_value", "max_tokens"),
    "zero tokens of a chat": ({"messages": HI, "max_tokens": 0}, "invalid_value", "max_tokens"),
    "least above most": ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "invalid_value", "min_tokens"),
    "no room for the least": ({"prompt": "x", "min_tokens": 256}, "context_length_exceeded", "min_tokens"),
    "an echo of a chat": ({"messages": HI, "echo": True}, "unsupported_field", "echo"),
    "prompt logprobs": ({"prompt": "x", "prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    "a cut to nothing": ({"prompt": "x", "truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    "a long salt": ({"prompt": "x", "cache_salt": "s" * 1025}, "invalid_value", "cache_salt"),
    "a template's own": ({"messages": HI, "add_special_tokens": True}, "unsupported_field", "add_special_tokens"),
    "nothing to go on from": (
        {"messages": HI, "continue_final_message": True},
        "invalid_value",
        "continue_final_message",
    ),
    "a taken variable": (
        {"messages": HI, "chat_template_kwargs": {"messages": []}},
        "invalid_value",
        "chat_template_kwargs",
    ),
    "variables that are none": ({"messages": HI, "chat_template_kwargs": [1]}, "invalid_value", "chat_template_kwargs"),
    "a schema that is none": (
        {"prompt": "x", "structured_outputs": {"json": [1]}},
        "invalid_value",
        "structured_outputs.json",
    ),
    "a broken expression": (
        {"prompt": "x", "structured_outputs": {"regex": "(a"}},
        "invalid_value",
        "structured_outputs.regex",
    ),
    "no choice": ({"prompt": "x", "structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    "fewer": ({"prompt": "x", "max_tokens": -1}, "invalid_value", "max_tokens"),
    "too hot": ({"prompt": "x", "temperature": 2.5}, "invalid_value", "temperature"),
    "top_p 0": ({"messages": HI, "top_p": 0}, "invalid_value", "top_p"),
    "top_k": ({"prompt": "x", "top_k": -2}, "invalid_value", "top_k"),
    "min_p": ({"prompt": "x", "min_p": 1.1}, "invalid_value", "min_p"),
    "presence": ({"prompt": "x", "presence_penalty": 3}, "invalid_value", "presence_penalty"),
    "frequency": ({"prompt": "x", "frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    "repetition": ({"prompt": "x", "repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    "n": ({"prompt": "x", "n": 0}, "invalid_value", "n"),
    "n too many": ({"prompt": "x", "n": 1000}, "invalid_value", "n"),
    "too many stops": ({"prompt": "x", "stop": ["a"] * 17}, "invalid_value", "stop"),
    "an empty stop": ({"prompt": "x", "stop": [""]}, "invalid_value", "stop"),
    "a stop id": ({"prompt": "x", "stop_token_ids": [100_000]}, "invalid_value", "stop_token_ids"),
    "a biased stranger": ({"prompt": "x", "logit_bias": {"100000": 1}}, "invalid_value", "logit_bias"),
    "too much bias": ({"prompt": "x", "logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    "logprobs": ({"prompt": "x", "logprobs": 21}, "invalid_value", "logprobs"),
    "logprobs of a chat": ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    "too long": ({"prompt": "hello " * 500}, "context_length_exceeded", "prompt"),
    "too long a talk": ({"messages": HI * 40}, "context_length_exceeded", "messages"),
    "no room to answer": ({"prompt": "x", "max_tokens": 256}, "context_length_exceeded", "max_tokens"),
}


async def test_both_fronts_give_the_same_answers_and_ask_the_replica_for_the_same(router):
    port = free_port()
    async with (
        FakeReplica(text=TEXT, num_cached=1) as fake,
        router(fake.address, grpc_port=port) as http,
        channel_to(port) as channel,
    ):
        for name, body in VALID.items():
            outcomes = [await ask(way, http, channel, body) for way in WAYS]
            first = outcomes[0]
            assert first.error is None, name
            assert all(choice.reason for choice in first.choices), name
            assert len(first.choices) == body.get("n", 1), name
            assert first.choices[0].ids or body.get("max_tokens") == 0, name
            for way, outcome in zip(WAYS, outcomes, strict=True):
                assert outcome == first, f"{name}: {way}"
            asked = [fake.submissions.pop() for _ in WAYS]
            assert len({_comparable(request, "seed" in body) for request in asked}) == 1, name


def _comparable(request, with_seed: bool):
    params = request.params
    seed = params.seed if with_seed else None
    return repr(
        (
            request.prompt_ids,
            request.priority,
            seed,
            [getattr(params, name) for name in params.__struct_fields__ if name != "seed"],
        )
    )


async def test_both_fronts_refuse_with_the_same_code_and_field_and_nothing_reaches_a_replica(router):
    port = free_port()
    async with FakeReplica() as fake, router(fake.address, grpc_port=port) as http, channel_to(port) as channel:
        for name, (body, code, field) in INVALID.items():
            for way in WAYS:
                assert await ask(way, http, channel, body) == Outcome(error=(code, field)), f"{name}: {way}"
        assert not fake.submissions


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after=3), KVPoolExceeded("9 blocks of 8", "prompt")], ids=lambda e: e.code
)
async def test_both_fronts_pass_on_what_a_replica_refuses(router, error):
    port = free_port()
    async with (
        FakeReplica(reject=error) as fake,
        router(fake.address, grpc_port=port) as http,
        channel_to(port) as channel,
    ):
        for way in WAYS:
            outcome = await ask(way, http, channel, {"prompt": "x"})
            assert outcome.error is not None
            assert outcome.error[0] == error.code


@pytest.mark.parametrize("options", [{"fail_at": 4}, {"skip_at": 4}], ids=["fault", "gap"])
async def test_both_fronts_name_what_broke_an_answer(router, options):
    port = free_port()
    async with (
        FakeReplica(text=TEXT, **options) as fake,
        router(fake.address, grpc_port=port) as http,
        channel_to(port) as channel,
    ):
        outcomes = [await ask(way, http, channel, {"prompt": "x"}) for way in WAYS]
        assert len({outcome.error for outcome in outcomes}) == 1
        assert outcomes[0].error is not None


@pytest.mark.parametrize(
    "body", [{"prompt": "hello there", "n": 2}, {"messages": HI}, {"prompt": "x", "max_tokens": 0}]
)
async def test_both_fronts_tell_the_prompts_log_probabilities(router, body):
    port = free_port()
    async with FakeReplica() as fake, router(fake.address, grpc_port=port) as http, channel_to(port) as channel:
        ways = [way for way in WAYS if way != "http stream"]
        outcomes = [await ask(way, http, channel, body | {"prompt_logprobs": 2}) for way in ways]
        assert [outcome == outcomes[0] for outcome in outcomes] == [True] * len(ways)
        entries = outcomes[0].prompt_logprobs
        assert len(entries) == len(fake.submissions[0].prompt_ids) - 1
        assert all(len(values) in (2, 3) for values in entries)
        refused = await ask("http stream", http, channel, body | {"prompt_logprobs": 2})
        assert refused.error == ("invalid_value", "prompt_logprobs")


async def test_both_fronts_tokenize_and_show_the_prompt_alike(router):
    port = free_port()
    bodies = [
        {"prompt": "hello <|im_end|>"},
        {"prompt": "x", "add_special_tokens": False},
        {"messages": HI, "add_generation_prompt": False},
        {"messages": [*HI, {"role": "assistant", "content": "The"}], "continue_final_message": True},
    ]
    async with (
        FakeReplica(card=tiny_card(add_bos=True)) as fake,
        router(fake.address, grpc_port=port) as http,
        channel_to(port) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for body in bodies:
            shown = (await http.post("/render", json=body)).json()
            spec = spec_of(body)
            request = pb.TokenizeRequest(text=spec.text) if spec.text else pb.TokenizeRequest(messages=spec.messages)
            if "add_special_tokens" in body:
                request.add_special_tokens = body["add_special_tokens"]
            answer = await stub.Tokenize(request)
            assert (list(answer.token_ids), answer.prompt) == (shown["tokens"], shown["prompt"])
            assert (answer.count, answer.max_model_len) == (shown["count"], shown["max_model_len"])


async def test_both_fronts_refuse_ids_without_end(router):
    port = free_port()
    async with (
        FakeReplica() as fake,
        router(fake.address, grpc_port=port, max_body_values=1000) as http,
        channel_to(port) as channel,
    ):
        for way in WAYS:
            outcome = await ask(way, http, channel, {"prompt": [5] * 1200})
            assert outcome.error is not None
            assert outcome.error[0] == "payload_too_large"
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 1200))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_many_at_once_do_not_mix(router):
    port = free_port()
    # Each choice says its own seed, over and over.
    script = lambda request, choice: encode(f"{request.params.seed} {choice} ") * 4  # noqa: E731
    async with (
        FakeReplica(script=script) as fake,
        router(fake.address, grpc_port=port) as http,
        channel_to(port) as channel,
    ):
        bodies = [{"prompt": "x", "seed": seed, "n": 2, "max_tokens": 12} for seed in range(100, 110)]
        jobs = [ask(way, http, channel, body) for body in bodies for way in WAYS]
        outcomes = await asyncio.gather(*jobs)
        for at, outcome in enumerate(outcomes):
            assert outcome == outcomes[at - at % len(WAYS)]
            assert outcome.choices[0].text.startswith(f"{100 + at // len(WAYS)} 0 ")


def test_a_message_sets_only_what_was_set():
    spec = spec_of({"prompt": "x", "temperature": 0, "n": 0})
    assert {field.name for field, _ in spec.sampling.ListFields()} == {"temperature", "n"}
