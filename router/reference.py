"""docs/api.md: prose, and between it what the code's own tables say. `make docs` writes it, a test compares it.

Run as a module it prints the page.
"""

import json
from collections.abc import Iterable
from typing import Any

from paceline.proto import errors, grammar
from paceline.proto import inference_pb2 as pb
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS, GROUPS, IGNORED, SUPPORTED, UNSUPPORTED, Field
from paceline.router.grammar_process import CPU_SECONDS
from paceline.router.grammars import MAX_REPEATS
from paceline.router.openapi import ROUTES

CONFIG = RouterConfig()

# Where a field of HTTP is in `GenerationSpec`, if not under its own name in it, in `sampling` or in `output`.
_GRPC = {
    "prompt": "`text`, `token_ids`",
    "messages": "`messages`",
    "max_completion_tokens": "`sampling.max_tokens`",
    "logprobs": "`output.logprobs`",
    "top_logprobs": "`output.logprobs`",
    "return_token_ids": "`output.token_ids`",
    "no_stop_trim": "`output.include_stop_str_in_output`",
    "add_generation_prompt": "`messages.add_generation_prompt`",
    "continue_final_message": "`messages.continue_final_message`",
    "chat_template_kwargs": "`messages.template_kwargs`",
    "response_format": "`format`",
    "structured_outputs": "`format`",
    "guided_json": "`format.json_schema`",
    "guided_regex": "`format.regex`",
    "guided_choice": "`format.choice`",
    "guided_grammar": "`format.grammar`",
    "json_schema": "`format.json_schema`",
    "regex": "`format.regex`",
    "ebnf": "`format.grammar`",
    "stream": "`StreamGenerate`",
}
_KINDS = {
    "stop": "string or list of strings",
    "stop_ids": "list of token ids",
    "logit_bias": "object",
    "stream_options": "object",
    "template_kwargs": "object",
    "prompt": "string or list",
    "messages": "list",
    "response_format": "object",
    "structured_outputs": "object",
    "schema": "object or string",
    "regex": "string",
    "choice": "list of strings",
    "grammar": "string",
    "truncate": "integer",
    "boolean": "true or false",
}
_COUNTED = {"string": "characters", "stop": "strings", "stop_ids": "ids", "logit_bias": "entries"}
_INT32, _INT64 = 2**31, 2**63
_WRITTEN = {-_INT32: "-2³¹", _INT32 - 1: "2³¹ - 1", -_INT64: "-2⁶³", 2 * _INT64 - 1: "2⁶⁴ - 1"}
_MEANS = {
    "invalid_value": "A field is malformed or out of range; `param` names it.",
    "unsupported_field": "A known field that is not supported, or, on a strict server, one that nothing reads.",
    "context_length_exceeded": "Prompt and `max_tokens` do not fit the model's context; the message has both numbers.",
    "kv_pool_exceeded": "The request could never fit the replica's KV blocks; the message has both numbers.",
    "invalid_api_key": "No API key, or one that is not known.",
    "not_permitted": "The API key may not ask for this.",
    "model_not_found": "`model` names none that is served.",
    "payload_too_large": "The body has too many bytes, or too many values.",
    "overloaded": "A queue is full. `Retry-After` says when to try again.",
    "queue_timeout": "The request waited too long for its first step; nothing was computed.",
    "first_token_timeout": "The first token took too long.",
    "request_timeout": "The whole request took too long.",
    "cancelled": "The client went away, or reads nothing of its stream.",
    "no_replica": "No replica takes requests.",
    "draining": "The server is shutting down; what runs goes on.",
    "replica_lost": "The replica died and no other could go on.",
    "sequence_fault": "This request failed in the engine; others go on.",
    "internal_error": "A bug of ours; the message has the request's id for the log.",
}


def page() -> str:
    tables = {
        "ROUTES": _routes(),
        "PROMPT": _fields("prompt"),
        "SAMPLING": _fields("sampling"),
        "STRUCTURE": _fields("structure"),
        "OUTPUT": _fields("output"),
        "UNSUPPORTED": _refused(),
        "IGNORED": _ignored(),
        "ERRORS": _errors(),
        "GRAMMAR_KIB": str(grammar.MAX_GRAMMAR_BYTES // 1024),
        "MAX_REPEATS": f"{MAX_REPEATS:,}",
        "CPU_SECONDS": str(CPU_SECONDS),
        "BODY_MIB": str(CONFIG.max_body_bytes // 1024**2),
        "BODY_VALUES": f"{CONFIG.max_body_values:,}",
        "MAX_PROMPTS": f"{CONFIG.max_prompts:,}",
        "MAX_CHOICES": f"{CONFIG.max_choices:,}",
        "STOP_LEN": f"{CONFIG.max_stop_len:,}",
        "PING": f"{CONFIG.ping_seconds:g}",
    }
    text = _PAGE
    for name, value in tables.items():
        text = text.replace(f"@{name}@", value)
    return text


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    names = head.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _routes() -> str:
    rows = (
        (f"`{route.method.upper()} {route.path}`", route.summary + " Needs no key." * route.open) for route in ROUTES
    )
    return _table("Route|What it does", rows)


def _fields(group: str) -> str:
    rows = ((f"`{f.name}`{_where(f)}", _value(f), _grpc(f), f.doc) for f in GROUPS[group] if f.status == SUPPORTED)
    return _table("Field|Value|gRPC|What it does", rows)


def _where(field: Field) -> str:
    marks: dict[tuple[str, ...], str] = {(COMPLETIONS,): " ¹", (CHAT,): " ²"}
    return marks.get(field.routes, "")


def _value(field: Field) -> str:
    kind = _KINDS.get(field.kind, field.kind)
    high = getattr(CONFIG, field.limit) if field.limit else field.high
    if field.kind in _COUNTED and high is not None:
        return f"{kind}, at most {high:,} {_COUNTED[field.kind]}"
    if field.kind == "truncate":
        return f"{kind}, -1 or from 1 on"
    low = "" if field.low is None else f"above {_number(field.low)}" if field.above else f"{_number(field.low)}"
    if not low:
        return kind
    return f"{kind}, {low} to {_number(high)}" if high is not None else f"{kind}, from {low} on"


def _number(value: float) -> str:
    return _WRITTEN.get(int(value)) or f"{value:,g}"


def _grpc(field: Field) -> str:
    if field.name in _GRPC:
        return _GRPC[field.name]
    for prefix, message in (("", pb.GenerationSpec), ("sampling.", pb.Sampling), ("output.", pb.Output)):
        if field.name in message.DESCRIPTOR.fields_by_name:
            return f"`{prefix}{field.name}`"
    return "-"


def _refused() -> str:
    return _table("Field|Accepted beside null|Why", (
        (f"`{f.name}`{_where(f)}", _shown(f.neutral), f.doc) for f in _all(UNSUPPORTED)
    ))  # fmt: skip


def _ignored() -> str:
    return _table("Field|Why", ((f"`{field.name}`{_where(field)}", field.doc) for field in _all(IGNORED)))


def _all(status: str) -> Iterable[Field]:
    return (field for group in GROUPS.values() for field in group if field.status == status)


def _shown(values: tuple[Any, ...]) -> str:
    return ", ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in values)) or "-"


def _errors() -> str:
    leaves = (leaf for leaf in errors.BY_CODE.values() if leaf is not errors.StartupError)
    return _table("Code|HTTP|gRPC|Try again|What it means", (
        (f"`{e.code}`", str(e.http_status), f"`{e.grpc_code}`", "yes" if e.retryable else "no", _MEANS[e.code])
        for e in leaves
    ))  # fmt: skip


_PAGE = """\
<!-- Made by `make docs` out of router/reference.py and the tables that it reads. Do not edit. -->
# The HTTP interface

paceline speaks OpenAI's protocol, with the fields that clients of vLLM and SGLang know: point a client at
`http://HOST:8000/v1` and it works. What it sends is either done or refused by name. The same requests go over
[gRPC](grpc.md); the tables name each field's place there. A running server describes itself, with its own limits, at
`/openapi.json`.

```
curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Name a color."}], "max_tokens": 20}'
```

## Routes

@ROUTES@

Bodies are JSON objects of at most @BODY_MIB@ MiB and @BODY_VALUES@ values (a member of an object counts four times).
The content type is `application/json`, or none. `/render` and `/tokenize` take the body of either generation route.

**Keys.** Where the server has [keys](operations.md#keys), every route but `/health/live` needs one: `Authorization:
Bearer KEY`. The key says whose the request is, the lowest `priority` it may ask for, and with whom it shares cached
prompts.

## Three classes of fields

1. **Supported**: checked against the ranges below, then done. A value out of range is a 400 that names the field.
2. **Not supported**: known, and refused by name with a 400 (`unsupported_field`), unless the value asks for nothing.
3. **Ignored**: everything else. The request is served, and `X-Paceline-Ignored-Fields` names what nothing reads, the
   first twenty at most. A server with `--strict` answers 400 instead, naming ten.

null is the same as leaving a field out. Numbers are numbers: `"5"`, `true` and, for integers, `5.0` are refused.
Messages never repeat a value. ¹ completions only, ² chat only. Limits can differ per server; these are the defaults.

### The prompt

@PROMPT@

- A request has at most @MAX_PROMPTS@ prompts, and prompts times `n` is at most @MAX_CHOICES@. Choice `p * n + i` is the
  `i`th of prompt `p`. Each prompt counts once in the usage, whatever `n` is; every token of every choice counts.
- Ids are used as they are. In a text, control tokens may be written out. In messages they may not: what a user writes
  is text, and only the template opens and closes turns. A template's own refusal is a 400.
- Parts of a message's content are joined in order, with nothing between them. `developer` is `system` where the
  template does not know it.
- **Context.** A prompt is never cut unless `truncate_prompt_tokens` asks for it. A prompt with `max_tokens` beyond the
  context is `context_length_exceeded`, with both numbers; without `max_tokens` an answer may fill what is left.
- `continue_final_message`: the prompt ends with that message's own text, without an end of turn. It does not go
  together with `add_generation_prompt: true`.

### Sampling and length

@SAMPLING@

- Order: penalties and `logit_bias`, then the ban of `min_tokens`, then the grammar; then temperature, `top_k`, `top_p`,
  `min_p`. Log probabilities are those of the model, before all of it.
- **Stop.** A choice ends at the first stop string, end token or stop id. What ended it is not part of its text unless
  `include_stop_str_in_output` is true. Nothing of a stop string is ever shown in a stream, even where it comes in
  several tokens. `token_ids` and log probabilities hold every token, up to and with the one that completed the stop. A
  stop string has 1 to @STOP_LEN@ characters.
- **min_tokens.** Before so many tokens neither an end token nor a stop id can be drawn, and a stop string counts only
  if it begins in the text of later tokens. `ignore_eos` is for good: only stops and `max_tokens` end the choice.
- **seed.** The noise of a draw depends on the seed, the choice and the position, and on nothing else: neither on what
  runs beside it nor on which replica.

### Structured output

@STRUCTURE@

These are several names for one thing: of all of them a request may have one.

- **JSON** has at most one blank between tokens. `json_object`, and a schema that says nothing, mean an object.
  `response_format: json_schema` needs the inner wrapper, `{"json_schema": {"schema": ...}}`; `strict` changes nothing,
  since a schema always holds.
- **Schemas.** A keyword that could not be kept is refused by name (`uniqueItems`, `not`, `if`, `contains` and others),
  as are a `oneOf` whose branches may overlap, an unknown `format` and a `$ref` to another document. Recursion works.
  Integers are those of 64 bits.
- **regex**: the whole text matches. No look-around, no backreferences. A repeat of a repeat (`a**`) and nested repeats
  that multiply to more than @MAX_REPEATS@ are refused.
- **grammar**: Lark, with a rule `start`, as [llguidance](https://github.com/guidance-ai/llguidance) reads it but
  without `%json`, `%lark`, `%regex` and `%import`; or GBNF, with a rule `root`. What a terminal matches is as long as
  possible.
- **Limits.** A source has at most @GRAMMAR_KIB@ KiB, and may take @CPU_SECONDS@ s of a processor to compile. One that
  is too complex is a 400 before anything is computed. If a mask turns out to be too much work later, that choice's
  request ends with `sequence_fault`, and others go on.
- A grammar that has come to its end ends the choice, `ignore_eos` and `min_tokens` or not. A choice that reaches
  `max_tokens` before says `length`, and its text is what there is: an unfinished one.

### The answer

@OUTPUT@

- **logprobs**: natural logarithms. Completions: lists `tokens`, `token_logprobs`, `top_logprobs`, `text_offset`. Chat:
  a list `content` of `token`, `logprob`, `bytes`, `top_logprobs`. -9999 stands for minus infinity.
- **echo**: a choice's text begins with the prompt as it was sent (ids: decoded, control tokens written). With
  `logprobs` the lists begin with the prompt's tokens, the first one's log probability being null. `max_tokens: 0` then
  computes the prompt and generates nothing.
- **prompt_logprobs**: a list with an entry per token of the prompt, the first null, others `{"ID": {"logprob", "rank",
  "decoded_token"}}`; in each choice on completions, at the top level on chat. `rank` is null for the prompt's own token
  where it is not among the likeliest.
- **finish_reason** is `stop` (an end token, a stop or the grammar's end) or `length` (`max_tokens` or the context).

### Not supported

@UNSUPPORTED@

### Known and ignored

@IGNORED@

## Streams

With `stream: true` the answer is server-sent events: `data:` and a JSON object, with one `id` and one `created`
throughout.

1. Per choice a first chunk: the role (chat), or the prompt (with `echo`).
2. Text as it comes, `finish_reason` null. A chunk ends where a character does.
3. Per choice an empty chunk with its `finish_reason`.
4. With `stream_options: {"include_usage": true}` one chunk with `usage` and no choices. Other chunks then have
   `"usage": null`.
5. `data: [DONE]`

Until the first token a comment, `: ping`, is sent every @PING@ s (`--ping-seconds`, 0: never), lest a proxy cut the
connection. What goes wrong before the headers are sent is a plain error status. After that, one event holds the error,
and no `[DONE]` follows. Closing the connection ends the request; a client that reads nothing for long is cut off.

## Headers

| Header | What it does |
| --- | --- |
| `Authorization` | `Bearer KEY`. |
| `X-Request-Id` | Up to 128 visible characters that the answer and the log repeat. Without it one is made. |
| `X-Queue-Timeout-Ms` | The request is dropped if its first step has not begun by then. |
| `X-First-Token-Timeout-Ms` | The request ends if its first token has not come by then. |
| `X-Request-Timeout-Ms` | The request ends then, whatever there is. |

Times are whole milliseconds from 1 on; they can only be shorter than the server's own.

| Header of the answer | What it says |
| --- | --- |
| `X-Request-Id` | The request's id. |
| `X-Paceline-Ignored-Fields` | Names of fields that nothing reads. |
| `Retry-After` | Seconds after which to try again, with 429 and 503. |
| `WWW-Authenticate` | `Bearer`, with 401. |

## Errors

```json
{"error": {"message": "temperature must be at most 2", "type": "invalid_request_error", "param": "temperature",
           "code": "invalid_value"}}
```

@ERRORS@

Codes of HTTP alone: `not_found` (404), `method_not_allowed` (405), `unsupported_media_type` (415). Codes are stable,
messages are not.
"""

if __name__ == "__main__":
    print(page(), end="")
