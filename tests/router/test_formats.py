"""The many forms in which clients say what the text must obey."""

import pytest

from paceline.router.formats import Structure
from tests.router.test_openai import chat, complete, refused

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
AS_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False, "json": None}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            ("json_schema", AS_TEXT, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", AS_TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"json": AS_TEXT}}, ("json_schema", AS_TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "", "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, ("choice", '["ä","b"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "g"}}, ("grammar", "g", "structured_outputs.grammar")),
        ({"guided_json": SCHEMA}, ("json_schema", AS_TEXT, "guided_json")),
        ({"guided_json": "{}"}, ("json_schema", "{}", "guided_json")),
        ({"guided_regex": "a"}, ("regex", "a", "guided_regex")),
        ({"guided_choice": ["a"]}, ("choice", '["a"]', "guided_choice")),
        ({"guided_grammar": "g"}, ("grammar", "g", "guided_grammar")),
        ({"json_schema": AS_TEXT}, ("json_schema", AS_TEXT, "json_schema")),
        ({"regex": "a"}, ("regex", "a", "regex")),
        ({"ebnf": "g", "response_format": {"type": "text"}}, ("grammar", "g", "ebnf")),
    ],
)
def test_structure_is_one_thing_however_it_is_said(body, want):
    for call in (complete, chat):
        assert call(**body).structure == (want and Structure(*want))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format.type"), ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict"),
        ({"guided_json": []}, "guided_json"), ({"guided_json": "{"}, "guided_json"),
        ({"json_schema": "5"}, "json_schema"),
        ({"guided_choice": []}, "guided_choice"), ({"guided_choice": [1]}, "guided_choice"), ({"regex": 5}, "regex"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "regex": "a"}, "regex"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_structure_that_has_no_shape_or_two_is_refused_by_name(body, param):
    for call in (complete, chat):
        assert refused(call, **body).param == param


def test_a_schema_nested_without_end_is_refused():
    deep = {}
    for _ in range(900):
        deep = {"items": deep}
    assert refused(complete, guided_json=deep).param == "guided_json"
