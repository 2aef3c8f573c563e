"""Structured output that cannot work is refused, and hurts nobody: case 27."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hello"}]


def schema(inner) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": inner}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        {"response_format": schema({"type": "nope"})},
        {"response_format": schema({"type": "string", "pattern": "foo**"})},
        {"response_format": schema("nope")},
        {"response_format": schema({"$ref": "#/$defs/none"})},
        {"response_format": {"type": "xml"}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "foo**"}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "(a{1,999}){1,999}"}},
        {"structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}"}},
        {"structured_outputs": {"regex": 5}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [5]}},
        {"structured_outputs": {"grammar": "nonsense ::= ::="}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"json": '{"type": '}},
        {"guided_regex": "foo**"},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a" * 1_000_000}},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_case_27_what_cannot_be_compiled_is_refused_by_name(tiny, fields):
    error = tiny.refused(CHAT, messages=HI, **fields)
    assert error["param"].split(".")[0] in fields
    assert len(error["message"]) < 500


def test_case_27_a_hostile_expression_does_not_slow_the_streams_of_others(tiny):
    """That none of them loses a token is shown here; the prover looks at the gaps between them."""
    body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(4) as others:
        streams = [
            others.submit(tiny.stream, COMPLETIONS, **body, stream_options={"include_usage": True}) for _ in range(4)
        ]
        for expression in ("(a{1,999}){1,999}", "(.{1,90}a.{1,90}b){1,90}", "((x+x+)+y){50}"):
            response = tiny.client.post(
                COMPLETIONS, json={"prompt": [5], "max_tokens": 20, "structured_outputs": {"regex": expression}}
            )
            assert response.status_code in (200, 400), response.text
        for stream in streams:
            assert stream.result().usage["completion_tokens"] == 200
            assert stream.result().done


def test_case_27_a_large_number_is_a_number(tiny):
    body = {"messages": HI, "response_format": schema({"type": "integer", "minimum": 0, "maximum": 20_000_000_000})}
    choice = tiny.good(CHAT, **body, max_tokens=40)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert 0 <= int(choice["message"]["content"]) <= 20_000_000_000


@pytest.mark.parametrize("inner", [{}, {"type": "object"}])
def test_case_27_a_schema_that_asks_for_nothing_is_an_object(tiny, inner):
    for format in (schema(inner), {"type": "json_object"}):
        choice = tiny.good(CHAT, messages=HI, response_format=format, max_tokens=150, temperature=1, seed=1)["choices"][
            0
        ]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_case_27_a_cut_answer_says_that_it_is_cut(tiny):
    choice = tiny.good(CHAT, messages=HI, response_format={"type": "json_object"}, max_tokens=1)["choices"][0]
    assert choice["finish_reason"] == "length"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"json_schema": json.dumps(PERSON)},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"ignore_eos": True}, {"min_tokens": 90}], ids=repr
)
def test_case_27_what_is_finished_obeys_its_schema(tiny, fields, more):
    done = tiny.good(CHAT, messages=HI, temperature=1, seed=5, max_tokens=100, **fields, **more)
    for choice in done["choices"]:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert any(choice["finish_reason"] == "stop" for choice in done["choices"])
    stream = tiny.stream(CHAT, messages=HI, temperature=1, seed=5, max_tokens=100, **fields, **more)
    for choice in done["choices"]:
        assert stream.text(choice["index"]) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", 'a "quoted" one', "서울\n"]}}, None),
        ({"guided_choice": ["left", "right"]}, None),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, r"[0-9]{3}-[0-9]{2}"),
        ({"guided_regex": "(ab|cd){2}"}, r"(ab|cd){2}"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, r"b*a"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"ebnf": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"regex": "z+!"}, r"z+!"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_case_27_texts_expressions_and_grammars_are_obeyed(tiny, fields, allowed):
    import re

    for seed in range(6):
        choice = tiny.complete("q", temperature=1, seed=seed, max_tokens=60, **fields)["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        if allowed is None:
            given = next(iter(fields.values()))
            assert choice["text"] in (given["choice"] if isinstance(given, dict) else given)
        else:
            assert re.fullmatch(allowed, choice["text"])
