"""The HTTP interface as an OpenAPI 3.1 document, made from the table of fields and the config. Pure.

The routes are listed here once more, with what they take and give; a test holds the list against the app's own.
"""

from typing import Any

import msgspec

from paceline.router.config import RouterConfig
from paceline.router.fields import BY_ROUTE, CHAT, COMPLETIONS, IGNORED, UNSUPPORTED, Field
from paceline.router.messages import ROLES

Schema = dict[str, Any]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """``takes`` and ``gives`` name schemas; without ``gives`` the answer is text. ``streams``: or server-sent events.
    ``statuses``: errors beside 401, which any route but liveness may give."""

    method: str
    path: str
    summary: str
    takes: str | None = None
    gives: str | None = None
    streams: bool = False
    open: bool = False  # needs no key
    statuses: tuple[int, ...] = ()


_BODY, _GENERATION = (400, 404, 413, 415, 503), (400, 403, 404, 413, 415, 429, 500, 503, 504)

# fmt: off
ROUTES: tuple[Route, ...] = (
    Route(method="post", path="/v1/completions", summary="Goes on from a text or from token ids.",
          takes="CompletionRequest", gives="Completion", streams=True, statuses=_GENERATION),
    Route(method="post", path="/v1/chat/completions", summary="Answers a conversation.",
          takes="ChatRequest", gives="ChatCompletion", streams=True, statuses=_GENERATION),
    Route(method="post", path="/render", summary="Shows the prompt that a request of either kind would be, as text and "
          "as token ids, and computes nothing.", takes="PromptRequest", gives="Rendered", statuses=(*_BODY, 403)),
    Route(method="post", path="/tokenize", summary="Counts the tokens of a prompt or of messages.",
          takes="PromptRequest", gives="Tokens", statuses=(*_BODY, 403)),
    Route(method="post", path="/detokenize", summary="Writes token ids as text, control tokens included.",
          takes="DetokenizeRequest", gives="Text", statuses=_BODY),
    Route(method="get", path="/v1/models", summary="Lists what is served.", gives="Models", statuses=(503,)),
    Route(method="get", path="/v1/models/{name}", summary="Describes one model.", gives="Model", statuses=(404, 503)),
    Route(method="get", path="/version", summary="Says which version runs.", gives="Version"),
    Route(method="get", path="/health/live", summary="Answers as long as the process does.", gives="Health", open=True),
    Route(method="get", path="/health/ready", summary="Says whether a replica takes requests: 200, or 503 with a "
          "reason.", gives="Health", statuses=(503,)),
    Route(method="get", path="/metrics", summary="Metrics as Prometheus reads them."),
    Route(method="get", path="/openapi.json", summary="This document.", gives="Document"),
)
# fmt: on

REASONS = {
    400: "A field is malformed, out of range or not supported; `param` names it.",
    401: "No API key, or one that is not known.",
    403: "The API key may not ask for this.",
    404: "No such model, or no such route.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    429: "A queue is full; `Retry-After` says when to try again.",
    500: "The server is at fault.",
    503: "Nothing takes requests now; `Retry-After` says when to try again.",
    504: "A time that the client or the server had set has passed.",
}


def document(config: RouterConfig, version: str) -> Schema:
    """Limits are those of this server."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "paceline", "version": version},
        "security": [{"key": []}],
        "paths": {route.path: {route.method: _operation(route)} for route in ROUTES},
        "components": {
            "schemas": _requests(config) | _ANSWERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> Schema:
    if route.gives:
        content = _json(route.gives)
        if route.streams:
            content["text/event-stream"] = {}  # this version of OpenAPI has no words for the events in it
    else:
        content = {"text/plain": {"schema": {"type": "string"}}}
    error = "Health" if route.path == "/health/ready" else "Error"
    statuses = {*route.statuses} if route.open else {*route.statuses, 401}
    operation: Schema = {
        "operationId": f"{route.method}{route.path.translate(_PLAIN)}",
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(s): {"description": REASONS[s], "content": _json(error)} for s in sorted(statuses)},
        },
    }
    if route.open:
        operation["security"] = []
    if route.takes:
        operation["requestBody"] = {"required": True, "content": _json(route.takes)}
    if "{name}" in route.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [name]
    return operation


_PLAIN = str.maketrans("/.{}", "____")


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


# -- requests ----------------------------------------------------------------------------------------------------------


def _requests(config: RouterConfig) -> dict[str, Schema]:
    one = _object({name: schema_of(field, config) for name, field in BY_ROUTE[COMPLETIONS].items()}, "prompt")
    talk = _object({name: schema_of(field, config) for name, field in BY_ROUTE[CHAT].items()}, "messages")
    ids = _object({"model": {"type": ["string", "null"]}, "tokens": _IDS}, "tokens")
    either = {"oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("CompletionRequest", "ChatRequest")]}
    return {"CompletionRequest": one, "ChatRequest": talk, "PromptRequest": either, "DetokenizeRequest": ids}


def schema_of(field: Field, config: RouterConfig) -> Schema:
    """What the field takes. null is the same as leaving it out, unless it is required."""
    if field.status == IGNORED:
        return {"description": f"Ignored. {field.doc}"}
    if field.status == UNSUPPORTED:
        return {"description": f"Not supported. {field.doc}", "enum": [None, *field.neutral]}
    schema = _KINDS[field.kind] | _range(field, config)
    if field.name not in ("prompt", "messages"):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema | {"description": field.doc}


def _range(field: Field, config: RouterConfig) -> Schema:
    high = getattr(config, field.limit) if field.limit else field.high
    found: Schema = {}
    if field.low is not None:
        found["exclusiveMinimum" if field.above else "minimum"] = field.low
    if high is not None:
        found[_MOST.get(field.kind, "maximum")] = high
    return found


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required]}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_TEXT, _INTEGER, _BOOLEAN, _NUMBER = ({"type": kind} for kind in ("string", "integer", "boolean", "number"))
_ID: Schema = {"type": "integer", "minimum": 0}
_IDS = _list(_ID)
_ANY_OBJECT: Schema = {"type": "object"}
_SCHEMA: Schema = {"anyOf": [_ANY_OBJECT, _TEXT]}
_TEXTS = _list(_TEXT | {"minLength": 1}, minItems=1)
# What the limit of a kind counts, where that is not the value itself.
_MOST = {"string": "maxLength", "stop": "maxItems", "stop_ids": "maxItems", "logit_bias": "maxProperties"}
_MESSAGE = _object(
    {
        "role": {"enum": [*ROLES]},
        "content": {"anyOf": [_TEXT, _list(_object({"type": {"const": "text"}, "text": _TEXT}, "type", "text"))]},
        "name": {"type": ["string", "null"]},
    },
    "role",
    "content",
)
_FORMAT: Schema = {
    "oneOf": [
        _object({"type": {"enum": ["text", "json_object"]}}, "type"),
        _object(
            {
                "type": {"const": "json_schema"},
                "json_schema": _object({"name": _TEXT, "strict": _BOOLEAN, "schema": _ANY_OBJECT}, "schema"),
            },
            "type",
            "json_schema",
        ),
    ]
}
_STRUCTURED = _object(
    {"json": _SCHEMA, "json_object": _BOOLEAN, "regex": _TEXT, "choice": _TEXTS, "grammar": _TEXT}
) | {"maxProperties": 1}
_KINDS: dict[str, Schema] = {
    "number": _NUMBER,
    "integer": _INTEGER,
    "truncate": _INTEGER | {"not": {"const": 0}},
    "boolean": _BOOLEAN,
    "string": _TEXT,
    "stop": {"anyOf": [_TEXT | {"minLength": 1}, _list(_TEXT | {"minLength": 1})]},
    "stop_ids": _IDS,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "template_kwargs": _ANY_OBJECT,
    "prompt": {"anyOf": [_TEXT, _IDS | {"minItems": 1}, _list(_TEXT, minItems=1), _list(_IDS, minItems=1)]},
    "messages": _list(_MESSAGE, minItems=1),
    "response_format": _FORMAT,
    "structured_outputs": _STRUCTURED,
    "schema": _SCHEMA,
    "regex": _TEXT,
    "choice": _TEXTS,
    "grammar": _TEXT,
}

# -- answers -----------------------------------------------------------------------------------------------------------

_NULL: Schema = {"type": "null"}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _whole(properties: dict[str, Schema]) -> Schema:
    return _object(properties, *properties)


_USAGE = _whole(
    {
        "prompt_tokens": _ID,
        "completion_tokens": _ID,
        "total_tokens": _ID,
        "prompt_tokens_details": _whole({"cached_tokens": _ID}),
    }
)
_TOP = _whole({"token": _TEXT, "logprob": _NUMBER, "bytes": _IDS})
_CHAT_LOGPROBS = _whole({"content": _list(_TOP | {"properties": _TOP["properties"] | {"top_logprobs": _list(_TOP)}})})
_LOGPROBS = _whole(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_optional(_NUMBER)),
        "top_logprobs": _list(_optional({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _IDS,
    }
)
_RANKED = _whole({"logprob": _NUMBER, "rank": _optional(_ID), "decoded_token": _TEXT})
_PROMPT_LOGPROBS = _list(_optional({"type": "object", "additionalProperties": _RANKED}))
_REASON: Schema = {"enum": ["stop", "length"]}


def _answer(kind: str, choice: dict[str, Schema], more: dict[str, Schema]) -> Schema:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _ID, "model": _TEXT}
    whole = _whole({"index": _ID, **choice, "finish_reason": _REASON})
    whole["properties"] |= {"token_ids": _IDS, **more}
    return _whole({**head, "choices": _list(whole), "usage": _USAGE})


_MODEL = _whole(
    {"id": _TEXT, "object": {"const": "model"}, "created": _ID, "owned_by": _TEXT, "max_model_len": _ID},
)
_TOKENS = {"tokens": _IDS, "count": _ID, "max_model_len": _ID}
_CHAT = _answer(
    "chat.completion",
    {
        "message": _whole({"role": {"const": "assistant"}, "content": _TEXT, "refusal": _NULL}),
        "logprobs": _optional(_CHAT_LOGPROBS),
    },
    {},
)
_CHAT["properties"] |= {"prompt_logprobs": _PROMPT_LOGPROBS}
_ANSWERS: dict[str, Schema] = {
    "Completion": _answer(
        "text_completion", {"text": _TEXT, "logprobs": _optional(_LOGPROBS)}, {"prompt_logprobs": _PROMPT_LOGPROBS}
    ),
    "ChatCompletion": _CHAT,
    "Tokens": _whole(_TOKENS),
    "Rendered": _whole({"prompt": _TEXT, **_TOKENS}),
    "Text": _whole({"prompt": _TEXT}),
    "Model": _MODEL,
    "Models": _whole({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Version": _whole({"version": _TEXT}),
    "Health": _object({"status": {"enum": ["live", "ready", "not_ready", "draining"]}}, "status"),
    "Document": _ANY_OBJECT,
    "Error": _whole(
        {"error": _whole({"message": _TEXT, "type": _TEXT, "param": _optional(_TEXT), "code": _TEXT})},
    ),
}
