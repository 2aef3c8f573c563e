"""One request over both front ends, streamed or whole, as one plain record that can be compared."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc

HTTP_WAYS = ("http stream", "http whole")
GRPC_WAYS = ("grpc stream", "grpc whole")
WAYS = HTTP_WAYS + GRPC_WAYS
_CHAT = ("messages", "add_generation_prompt", "continue_final_message")
_OUTPUT = ("prompt_logprobs", "echo", "include_stop_str_in_output", "skip_special_tokens")
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@asynccontextmanager
async def channel_to(port: int, *more: tuple[str, object], credentials: grpc.ChannelCredentials | None = None):
    arguments = [("grpc.use_local_subchannel_pool", 1), *more]
    address = f"localhost:{port}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, arguments)
    else:
        channel = grpc.aio.secure_channel(address, credentials, arguments)
    async with channel:
        yield channel


@dataclass
class Told:
    """One choice. A logprob: of the token that was drawn, and of it and the best ones together, sorted."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[float]]] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Outcome:
    """What a client got: choices and (prompt, completion, cached) tokens, or an error's code and field."""

    choices: list[Told] = field(default_factory=list)
    usage: tuple[int, int, int] | None = None
    error: tuple[str, str] | None = None
    prompt_logprobs: list[list[float]] = field(default_factory=list)  # of each id but the first: its own and the best


def spec_of(body: dict[str, Any]) -> pb.GenerationSpec:
    """The message for the body of an HTTP request; ids are always asked for."""
    body = dict(body)
    spec = pb.GenerationSpec(model=body.pop("model", ""), output=pb.Output(token_ids=True))
    if "messages" in body:
        chat = {name: body.pop(name) for name in _CHAT if name in body}
        if "chat_template_kwargs" in body:
            chat["template_kwargs"] = json.dumps(body.pop("chat_template_kwargs"))
        json_format.ParseDict({"messages": chat}, spec)
    elif "prompt" in body:
        prompt = body.pop("prompt")
        if isinstance(prompt, str):
            spec.text = prompt
        else:
            spec.token_ids.ids.extend(prompt)
            spec.token_ids.SetInParent()
    for name in ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens"):
        if name in body:
            setattr(spec, name, body.pop(name))
    for name in _OUTPUT:
        if name in body:
            setattr(spec.output, name, body.pop(name))
    for kind, value in body.pop("structured_outputs", {}).items():
        form = {"json_schema": json.dumps(value)} if kind == "json" else {kind: value}
        json_format.ParseDict({"format": form if kind != "choice" else {"choice": {"texts": value}}}, spec)
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    wanted, top = body.pop("logprobs", None), body.pop("top_logprobs", 0)
    if wanted is not None:
        spec.output.logprobs = top if wanted is True else wanted
    return json_format.ParseDict({"sampling": body}, spec)


async def ask(way: str, http: httpx.AsyncClient, channel: grpc.aio.Channel, body: dict[str, Any]) -> Outcome:
    if way in HTTP_WAYS:
        return await _over_http(http, body, stream=way == "http stream")
    return await _over_grpc(channel, spec_of(body), stream=way == "grpc stream")


# -- HTTP --------------------------------------------------------------------------------------------------------------


async def _over_http(http: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> Outcome:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await http.post(path, json=body | {"return_token_ids": True} | more)
    if response.status_code != 200:
        return _http_error(response.json())
    if not stream:
        return _gathered([response.json()])
    events = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    if events[-1] != "[DONE]":
        return _http_error(json.loads(events[-1]))
    return _gathered([json.loads(event) for event in events[:-1]])


def _http_error(body: dict[str, Any]) -> Outcome:
    return Outcome(error=(body["error"]["code"], body["error"]["param"] or ""))


def _gathered(objects: list[dict[str, Any]]) -> Outcome:
    told: dict[int, Told] = {}
    usage = None
    for piece in objects:
        usage = piece.get("usage") or usage
        for choice in piece["choices"]:
            one = told.setdefault(choice["index"], Told())
            message = choice.get("message") or choice.get("delta") or {}
            one.text += choice.get("text") or message.get("content") or ""
            one.ids += choice.get("token_ids") or []
            one.logprobs += _http_logprobs(choice.get("logprobs"))
            one.reason = choice["finish_reason"] or one.reason
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], cached)
    ranked = objects[0].get("prompt_logprobs") or objects[0]["choices"][0].get("prompt_logprobs") or [None]
    of_prompt = [sorted(token["logprob"] for token in entry.values()) for entry in ranked[1:]]
    for one in told.values():
        if one.logprobs and one.logprobs[0][0] is None:  # an echo: over gRPC they stand with the prompt
            of_prompt = [tops for _, tops in one.logprobs[1 : counts[0]]]
            del one.logprobs[: counts[0]]
    return Outcome([told[index] for index in sorted(told)], counts, prompt_logprobs=of_prompt)


def _http_logprobs(raw: dict[str, Any] | None) -> list[tuple[float, list[float]]]:
    """The first token of an echo has none."""
    if raw is None:
        return []
    if "content" in raw:
        tops = [{bytes(t["bytes"]): t["logprob"] for t in (*e["top_logprobs"], e)} for e in raw["content"]]
        return [(e["logprob"], sorted(top.values())) for e, top in zip(raw["content"], tops, strict=True)]
    pairs = zip(raw["token_logprobs"], raw["top_logprobs"], strict=True)
    return [(value, sorted((top or {}).values())) for value, top in pairs]


# -- gRPC --------------------------------------------------------------------------------------------------------------


async def _over_grpc(channel: grpc.aio.Channel, spec: pb.GenerationSpec, stream: bool) -> Outcome:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    try:
        if not stream:
            return _merged([await stub.Generate(pb.GenerateRequest(spec=spec))])
        return _merged([m async for m in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec))])
    except grpc.aio.AioRpcError as error:
        return Outcome(error=error_of(error))


def _merged(messages: list[Any]) -> Outcome:
    told: dict[int, Told] = {}
    assert messages[0].HasField("prompt")
    for choice in (choice for message in messages for choice in message.choices):
        one = told.setdefault(choice.index, Told())
        one.text += choice.text
        one.ids += choice.token_ids
        for entry in choice.logprobs:
            tops = {token.piece: token.logprob for token in (*entry.top, entry.token)}
            one.logprobs.append((entry.token.logprob, sorted(tops.values())))
        if choice.HasField("finish"):
            one.reason = _REASONS[choice.finish.reason]
    usage = messages[-1].usage
    assert usage.prompt_tokens == messages[0].prompt.num_tokens
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)
    of_prompt = [
        sorted({token.id: token.logprob for token in (*entry.top, entry.token)}.values())
        for entry in messages[0].prompt.logprobs
    ]
    return Outcome([told[index] for index in sorted(told)], counts, prompt_logprobs=of_prompt)


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The status's details by the names of their messages."""
    status = rpc_status.from_call(_Finished(error))
    found = {}
    for packed in status.details:
        detail = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


def error_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Code and field, wherever the kind of error puts its field."""
    details = details_of(error)
    field = ""
    if "BadRequest" in details:
        field = details["BadRequest"].field_violations[0].field
    elif "ResourceInfo" in details:
        field = details["ResourceInfo"].resource_type
    return details["ErrorInfo"].reason, field


class _Finished:
    """What grpcio-status asks of a call, out of the error that the asyncio client raises."""

    def __init__(self, error: grpc.aio.AioRpcError):
        self.code, self.details, self.trailing_metadata = error.code, error.details, error.trailing_metadata
