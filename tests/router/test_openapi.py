"""The OpenAPI document: it tells of every route and every field, and what it says of answers is so."""

import itertools

import jsonschema
import orjson
import pytest
from fastapi.routing import APIRoute

from paceline.router import openapi
from paceline.router.config import RouterConfig
from paceline.router.fields import BY_ROUTE, CHAT, COMPLETIONS, IGNORED, UNSUPPORTED
from paceline.router.openai import parse
from paceline.router.rest import make_app
from tests.fakes import FakeReplica, tiny_card

CONFIG = RouterConfig(max_n=7)
DOCUMENT = openapi.document(CONFIG, "1")
SCHEMAS = DOCUMENT["components"]["schemas"]


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


class Anything:
    """Enough of a service to hang routes on."""

    gate = None


def test_the_documents_paths_are_the_apps_routes():
    app = make_app(Anything(), None, None, None, CONFIG)
    routes = {
        (route.path.replace(":path}", "}"), method)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes


def test_schemas_are_good_ones_and_every_reference_leads_somewhere():
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = orjson.dumps(DOCUMENT).decode().split('"$ref":"#/components/schemas/')[1:]
    assert {reference.split('"')[0] for reference in references} <= set(SCHEMAS)


@pytest.mark.parametrize(("route", "schema"), [(COMPLETIONS, "CompletionRequest"), (CHAT, "ChatRequest")])
def test_every_field_of_the_table_is_described(route, schema):
    properties = SCHEMAS[schema]["properties"]
    assert set(properties) == set(BY_ROUTE[route])
    for name, field in BY_ROUTE[route].items():
        assert field.doc in properties[name]["description"]
        if field.status == UNSUPPORTED:
            assert properties[name]["enum"] == [None, *field.neutral]
        if field.status == IGNORED:
            assert set(properties[name]) == {"description"}


def test_limits_are_those_of_the_config():
    assert SCHEMAS["ChatRequest"]["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 7}


GIVEN = {
    "temperature": (0, 2, 2.5, -0.1, "1"),
    "top_p": (0, 1, 1.1),
    "top_k": (-1, -2, 2**31),
    "n": (1, 0, 8, True, 1.5),
    "seed": (-(2**63), 2**64),
    "stop": ("a", [], ["a"] * 17, "", [1]),
    "logit_bias": ({"5": 1}, {"x": 1}, {"5": 101}, {"05": 1}),
    "truncate_prompt_tokens": (-1, 0, -2, 9),
    "response_format": ({"type": "text"}, {"type": "json_schema", "json_schema": {}}, {"type": "other"}, {}),
    "structured_outputs": ({"regex": "a"}, {"choice": []}, {"regex": "a", "choice": ["a"]}),
    "suffix": ("", "a", None),
    "cache_salt": ("a" * 1024, "a" * 1025, None),
    "prompt": ("a", [1, 2], ["a", "b"], [[1], [2]], [], {}, ["a", 1], [-1]),
    "metadata": (1, {}, "x"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GIVEN.items() for value in values])
def test_the_document_and_the_parser_agree_on_a_field(name, value):
    body = {"prompt": "a"} | {name: value}
    try:
        parse(COMPLETIONS, body, tiny_card(), CONFIG)
        accepted = True
    except Exception:
        accepted = False
    assert validator("CompletionRequest").is_valid(body) == accepted


async def test_answers_are_as_described(router):
    asked = [
        ("/v1/completions", "Completion", {"prompt": "Hi", "logprobs": 1, "return_token_ids": True, "n": 2}),
        ("/v1/chat/completions", "ChatCompletion", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
        ("/render", "Rendered", {"prompt": "Hi"}),
        ("/tokenize", "Tokens", {"prompt": "Hi"}),
        ("/detokenize", "Text", {"tokens": [5]}),
        ("/v1/completions", "Error", {"prompt": 5}),
    ]
    got = [("/v1/models", "Models"), ("/v1/models/tiny", "Model"), ("/version", "Version"), ("/health/live", "Health")]
    async with FakeReplica() as fake, router(fake.address) as client:
        for path, name, body in asked:
            validator(name).validate((await client.post(path, json=body)).json())
        for path, name in [*got, ("/health/ready", "Health"), ("/v1/models/none", "Error")]:
            validator(name).validate((await client.get(path)).json())
        served = (await client.get("/openapi.json")).json()
        assert served["paths"] == DOCUMENT["paths"]
        assert set(itertools.chain(*served["paths"].values())) == {"get", "post"}
