"""Anything at all, over HTTP and gRPC, against a running router: no error of ours, one shape of errors, nothing left.

`PACELINE_EXAMPLES` is the number of requests of all tests here together; the prover asks for more than the default.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.router import openapi
from paceline.router.config import RouterConfig
from paceline.router.fields import BY_ROUTE, CHAT, COMPLETIONS, Field
from tests.router.fuzz_server import LIMITS

NUM_REQUESTS = int(os.environ.get("PACELINE_EXAMPLES", "2000"))
MAX_ERROR_BYTES = 16 * 1024
MAX_LIVE_SECONDS = 0.1  # asked of the prover's machine only
load_all_checks()


def share(part: float):
    """Settings for a test that sends this part of all requests."""
    return settings(
        max_examples=max(1, round(NUM_REQUESTS * part)), deadline=None, suppress_health_check=list(HealthCheck)
    )


@dataclass
class Running:
    url: str
    http: httpx.Client
    channel: grpc.Channel


@pytest.fixture(scope="module")
def running():
    """The router, and behind all tests the aftercheck."""
    command, root = [sys.executable, "-m", "tests.router.fuzz_server"], Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        told = json.loads(server.stdout.readline())
        with (
            httpx.Client(base_url=told["url"], timeout=30) as http,
            grpc.insecure_channel(f"localhost:{told['grpc_port']}") as channel,
        ):
            while http.get("/health/ready").status_code != 200:
                pass
            yield Running(told["url"], http, channel)
            assert http.post("/v1/completions", json={"prompt": "Hi"}).json()["choices"][0]["text"] == "Hello."
        noticed = json.loads(server.communicate()[0])
    print(f"slowest answer of /health/live: {noticed['slowest'] * 1000:.0f} ms")
    assert noticed["troubles"] == []
    assert noticed["left"] == 0
    assert server.returncode == 0
    if "PACELINE_EXAMPLES" in os.environ:
        assert noticed["slowest"] < MAX_LIVE_SECONDS


def check_answer(response: httpx.Response | requests.Response) -> None:
    """A success, or an error of the caller's in the one shape."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert len(response.content) <= MAX_ERROR_BYTES
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
    elif "event-stream" in response.headers["content-type"]:
        assert response.text.endswith("data: [DONE]\n\n")
    assert "Traceback" not in response.text


# -- what the document says --------------------------------------------------------------------------------------------

DOCUMENT = openapi.document(RouterConfig(**LIMITS), "1")
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [SCHEMA[route.path][route.method.upper()] for route in openapi.ROUTES]
CASES = st.one_of(
    *(
        operation.as_strategy(generation_mode=mode)
        for operation in OPERATIONS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode == GenerationMode.POSITIVE or operation.definition.raw.get("requestBody")
    )
)
CONFORMS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def session():
    with requests.Session() as one:
        yield one


@share(0.1)
@given(case=CASES)
def test_what_the_document_describes_is_answered_as_it_describes(running, session, case):
    response = case.call(base_url=running.url, session=session)
    case.validate_response(response, checks=CONFORMS)


# -- nastier -----------------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=12) | st.sampled_from(["", "\x00", "<|im_end|>", "\ufffd", "日本", "a" * 3000, "{{ 7 * 7 }}"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([-(2**63), 2**63, 2**64, 10**30, 5.0, 1e400, -0.0, 1e-320])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
DEEP = st.integers(1, 1000).map(lambda depth: '{"a":' * depth + "1" + "}" * depth)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "", "root"])
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": TEXT | JUNK}), max_size=3
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": ROLES, "content": TEXT | PARTS | JUNK, "name": TEXT, "tool_calls": JUNK}
    ),
    max_size=4,
)
SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "number", "null", "boolean", "object", "nope"]).map(lambda t: {"type": t})
    | st.fixed_dictionaries({"pattern": st.sampled_from(["a+", "(a", "x**", "(a{99}){999}", "\\d{2}"])})
    | st.fixed_dictionaries({"enum": st.lists(JUNK, max_size=3)})
    | st.sampled_from([{}, {"$ref": "#"}, {"$ref": "#/a"}, {"minimum": 5, "maximum": 1}, {"uniqueItems": True}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(TEXT, inner, max_size=3)}),
        st.fixed_dictionaries({"items": inner, "minItems": st.integers(-1, 3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=3)}),
    ),
    max_leaves=5,
)
REGEXES = st.text(st.sampled_from("ab()[]{}*+?|\\^$.,12-"), max_size=10)
GRAMMARS = st.text(st.sampled_from('start: "ab"|/()[]*+?=%\n'), max_size=20).map(lambda rest: f"start: {rest}")
GOOD = {  # by kind: values that may work
    "number": st.floats(-3, 3),
    "integer": st.integers(-2, 12),
    "truncate": st.integers(-2, 9),
    "boolean": st.booleans(),
    "string": TEXT,
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_ids": st.lists(st.integers(-1, 330), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 330).map(str) | TEXT, st.floats(-101, 101), max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "include_obfuscation", "x"]), st.booleans()),
    "template_kwargs": st.dictionaries(st.sampled_from(["thinking", "messages", "bos_token", "a b"]), JUNK, max_size=2),
    "prompt": TEXT | st.lists(TEXT, max_size=4) | st.lists(st.integers(-1, 330), max_size=20),
    "messages": MESSAGES,
    "response_format": st.sampled_from([{"type": t} for t in ("text", "json_object", "json_schema", "x")])
    | SCHEMAS.map(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}),
    "structured_outputs": st.fixed_dictionaries({"json": SCHEMAS})
    | st.fixed_dictionaries({}, optional={"regex": REGEXES, "choice": st.lists(TEXT, max_size=2), "json_object": JUNK}),
    "schema": SCHEMAS | SCHEMAS.map(json.dumps),
    "regex": REGEXES,
    "choice": st.lists(TEXT, max_size=3),
    "grammar": GRAMMARS | TEXT,
    "": JUNK,  # of fields that are not supported
}
PLAIN = {COMPLETIONS: {"prompt": "Hi", "max_tokens": 4}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
PATHS = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/render": CHAT, "/tokenize": COMPLETIONS}


def member(field: Field):
    return st.tuples(st.just(field.name), st.one_of(GOOD[field.kind], GOOD[field.kind], JUNK))


@st.composite
def bodies(draw, route: str):
    """A good body, and some members that may be anything."""
    rows = list(BY_ROUTE[route].values())
    more = draw(st.lists(st.sampled_from(rows).flatmap(member) | st.tuples(TEXT, JUNK), max_size=4))
    return PLAIN[route] | dict(more)


ASKED = st.sampled_from(list(PATHS)).flatmap(lambda path: st.tuples(st.just(path), bodies(PATHS[path])))


def encoded(body) -> bytes:
    return json.dumps(body).encode()  # NaN, Infinity and lone surrogates too, as a careless client sends them


@share(0.4)
@given(ASKED)
def test_fields_with_anything_in_them_give_an_answer_or_a_refusal(running, asked):
    path, body = asked
    check_answer(running.http.post(path, content=encoded(body), headers={"content-type": "application/json"}))


@share(0.1)
@given(
    st.sampled_from([*PATHS, "/detokenize", "/v1/models/x", "/nothing", "/openapi.json", "/metrics"]),
    st.sampled_from(["POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD"]),
    st.binary(max_size=40) | DEEP.map(str.encode) | JUNK.map(encoded),
    st.dictionaries(
        st.sampled_from(["x-request-id", "x-queue-timeout-ms", "authorization", "content-type", "accept", "x-other"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip),
        max_size=3,
    ),
)
def test_any_bytes_method_and_headers_give_an_answer_or_a_refusal(running, path, method, content, headers):
    response = running.http.request(method, path, content=content, headers=headers)
    if method == "HEAD":
        assert response.status_code < 500
    else:
        check_answer(response)


# -- gRPC --------------------------------------------------------------------------------------------------------------

UINT32, INT32, INT64 = st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
FEW = st.integers(-2, 12)
WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
IDS = st.lists(st.integers(0, 330) | UINT32, max_size=8)


def messages_of(kind, **fields):
    """Messages of which each field is set or not."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


CONVERSATION = messages_of(
    pb.ChatMessages,
    messages=st.lists(messages_of(pb.ChatMessage, role=ROLES, content=WORDS, name=WORDS), max_size=3),
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
    template_kwargs=JUNK.map(json.dumps) | WORDS,
)
FORMAT = st.one_of(
    messages_of(pb.Format, json_object=st.booleans()),
    messages_of(pb.Format, json_schema=SCHEMAS.map(json.dumps) | WORDS),
    messages_of(pb.Format, regex=REGEXES),
    messages_of(pb.Format, choice=messages_of(pb.Texts, texts=st.lists(WORDS, max_size=3))),
    messages_of(pb.Format, grammar=GRAMMARS | WORDS),
)
REAL = st.floats(-3, 3) | st.floats()
SAMPLING = messages_of(
    pb.Sampling,
    max_tokens=FEW | INT32,
    temperature=REAL,
    top_p=REAL,
    top_k=INT32,
    min_p=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    repetition_penalty=REAL,
    logit_bias=st.dictionaries(st.integers(0, 330) | UINT32, REAL, max_size=3),
    seed=INT64,
    n=FEW,
    stop=st.lists(WORDS, max_size=3),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    min_tokens=FEW,
)
OUTPUT = messages_of(
    pb.Output,
    text=st.booleans(),
    token_ids=st.booleans(),
    logprobs=FEW,
    prompt_logprobs=FEW,
    echo=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
)


def specs():
    rest = {
        "model": st.sampled_from(["", "", "tiny", "other"]),
        "sampling": SAMPLING,
        "output": OUTPUT,
        "format": FORMAT,
        "priority": INT32,
        "cache_salt": WORDS,
        "truncate_prompt_tokens": FEW,
        "add_special_tokens": st.booleans(),
    }
    prompts = {"text": WORDS, "token_ids": messages_of(pb.TokenIds, ids=IDS), "messages": CONVERSATION}
    return st.one_of(*(messages_of(pb.GenerationSpec, **{name: prompt}, **rest) for name, prompt in prompts.items()))


def set_fully(spec: pb.GenerationSpec) -> pb.GenerationSpec:
    """Short, where nothing says how long."""
    if not spec.sampling.HasField("max_tokens"):
        spec.sampling.max_tokens = 4
    return spec


GRPC_CALLS = st.one_of(
    specs().map(set_fully).map(lambda spec: ("Generate", pb.GenerateRequest(spec=spec))),
    specs().map(set_fully).map(lambda spec: ("StreamGenerate", pb.StreamGenerateRequest(spec=spec))),
    messages_of(pb.TokenizeRequest, text=WORDS, add_special_tokens=st.booleans()).map(lambda m: ("Tokenize", m)),
    messages_of(pb.TokenizeRequest, messages=CONVERSATION, model=WORDS).map(lambda m: ("Tokenize", m)),
    messages_of(pb.DetokenizeRequest, token_ids=IDS, model=WORDS).map(lambda m: ("Detokenize", m)),
)
FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@share(0.4)
@given(GRPC_CALLS)
def test_any_message_gives_an_answer_or_a_refusal(running, asked):
    name, message = asked
    call = getattr(inference_pb2_grpc.InferenceServiceStub(running.channel), name)
    try:
        answer = call(message, timeout=30)
        if name == "StreamGenerate":
            list(answer)
    except grpc.RpcError as error:
        refusal = error
    else:
        return
    assert refusal.code() in FINE, refusal.details()
    assert len(refusal.details()) < MAX_ERROR_BYTES
    assert "Traceback" not in refusal.details()
