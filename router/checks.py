"""One value of a request against its row of the table: what comes back is in the form that the rest uses.

Messages name the field and what would work, never the value. Which fields there are is `fields.py`; what they mean
together is `openai.py`.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.proto.errors import InvalidRequest, UnsupportedField
from paceline.proto.model import ModelCard
from paceline.router import formats
from paceline.router.chat import TAKEN
from paceline.router.config import RouterConfig
from paceline.router.fields import UNSUPPORTED, Field
from paceline.router.formats import Structure
from paceline.router.messages import Message, parse_messages

MAX_DEPTH = 32  # of what a template gets

_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_STREAM_OPTIONS = ("continuous_usage_stats", "include_obfuscation")  # known, and not served


class Scope(msgspec.Struct, frozen=True):
    """What checks may ask, and where they name members that nothing reads."""

    card: ModelCard
    config: RouterConfig
    ignored: list[str]


def check(field: Field, value: Any, scope: Scope) -> Any:
    """``value`` is not null. Raises InvalidRequest or UnsupportedField that names the field, or a part of it."""
    if field.status == UNSUPPORTED:
        if not any(value == neutral and type(value) is type(neutral) for neutral in field.neutral):
            raise UnsupportedField(f"{field.name} is not supported. {field.doc}", field.name)
        return value
    return _CHECKS[field.kind](field, value, scope)


def check_ids(ids: list[Any], name: str, card: ModelCard) -> None:
    """Raises InvalidRequest unless all are ids of the model's vocabulary."""
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise InvalidRequest(f"{name} must hold integers", name)
    if min(ids) < 0 or max(ids) >= card.vocab_size:
        raise InvalidRequest(f"{name} holds an id outside the vocabulary of {card.vocab_size}", name)


# -- plain values ------------------------------------------------------------------------------------------------------


def _number(field: Field, value: Any, scope: Scope) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidRequest(f"{field.name} must be a number", field.name)
    _in_range(field, value, scope)
    return float(value)


def _integer(field: Field, value: Any, scope: Scope) -> int:
    if type(value) is not int:
        raise InvalidRequest(f"{field.name} must be an integer", field.name)
    _in_range(field, value, scope)
    return value


def _truncate(field: Field, value: Any, scope: Scope) -> int:
    if type(value) is not int or value < -1 or value == 0:
        raise InvalidRequest(f"{field.name} must be -1 or an integer from 1 on", field.name)
    return value


def _in_range(field: Field, value: float, scope: Scope) -> None:
    high = getattr(scope.config, field.limit) if field.limit else field.high
    if field.low is not None and (value <= field.low if field.above else value < field.low):
        raise InvalidRequest(f"{field.name} must be {'above' if field.above else 'at least'} {field.low}", field.name)
    if high is not None and value > high:
        raise InvalidRequest(f"{field.name} must be at most {high}", field.name)


def _boolean(field: Field, value: Any, scope: Scope) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(f"{field.name} must be true or false", field.name)
    return value


def _string(field: Field, value: Any, scope: Scope) -> str:
    if type(value) is not str:
        raise InvalidRequest(f"{field.name} must be a string", field.name)
    if field.limit and len(value) > getattr(scope.config, field.limit):
        raise InvalidRequest(f"{field.name} may hold {getattr(scope.config, field.limit)} characters", field.name)
    return value


# -- lists and objects -------------------------------------------------------------------------------------------------


def _stop(field: Field, value: Any, scope: Scope) -> tuple[str, ...]:
    most, longest = scope.config.max_stop, scope.config.max_stop_len
    stops = [value] if type(value) is str else value
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    if len(stops) > most:
        raise InvalidRequest(f"stop may list at most {most} strings", "stop")
    if any(not 0 < len(stop) <= longest for stop in stops):
        raise InvalidRequest(f"a stop string must hold 1 to {longest} characters", "stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(field: Field, value: Any, scope: Scope) -> tuple[int, ...]:
    most = scope.config.max_stop_ids
    if type(value) is not list or len(value) > most:
        raise InvalidRequest(f"{field.name} must be a list of at most {most} token ids", field.name)
    check_ids(value, field.name, scope.card)
    return tuple(dict.fromkeys(value))


def _logit_bias(field: Field, value: Any, scope: Scope) -> dict[int, float]:
    size, most = scope.card.vocab_size, scope.config.max_logit_bias
    if type(value) is not dict or len(value) > most:
        raise InvalidRequest(f"logit_bias must be an object of at most {most} token ids and numbers", "logit_bias")
    bias = {}
    for key, amount in value.items():
        if not _ID.fullmatch(key) or int(key) >= size:
            raise InvalidRequest(f"logit_bias keys must be token ids below {size}", "logit_bias")
        if type(amount) not in (int, float) or not -100 <= amount <= 100:
            raise InvalidRequest("logit_bias values must be numbers from -100 to 100", "logit_bias")
        bias[int(key)] = float(amount)
    return bias


def _stream_options(field: Field, value: Any, scope: Scope) -> bool:
    """Whether usage is wanted."""
    if type(value) is not dict:
        raise InvalidRequest(f"{field.name} must be an object", field.name)
    for name, member in value.items():
        where = f"{field.name}.{name}"
        if member is None:
            continue
        if name not in ("include_usage", *_STREAM_OPTIONS):
            scope.ignored.append(where)
        elif type(member) is not bool:
            raise InvalidRequest(f"{where} must be true or false", where)
        elif member and name in _STREAM_OPTIONS:
            raise UnsupportedField(f"{where} is not supported", where)
    return value.get("include_usage") or False


def _template_kwargs(field: Field, value: Any, scope: Scope) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequest(f"{field.name} must be an object", field.name)
    for name in (*TAKEN, *scope.card.template_tokens):
        if name in value:
            raise InvalidRequest(f"{field.name} may not set {name}: the template gets it anyway", field.name)
    if not _shallow(value, MAX_DEPTH):
        raise InvalidRequest(f"{field.name} may be nested {MAX_DEPTH} deep", field.name)
    return value


def _shallow(value: Any, depth: int) -> bool:
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return depth >= 0 and all(_shallow(member, depth - 1) for member in inner)


# -- the prompt and the structure --------------------------------------------------------------------------------------


def _prompt(field: Field, value: Any, scope: Scope) -> tuple[str | list[int], ...]:
    if type(value) is str:
        return (value,)
    if type(value) is list and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            check_ids(value, "prompt", scope.card)
            return (value,)
        if len(value) > scope.config.max_prompts:
            raise InvalidRequest(f"prompt may list at most {scope.config.max_prompts} prompts", "prompt")
        if kinds == {str}:
            return tuple(value)
        if kinds == {list} and all(value):
            for ids in value:
                check_ids(ids, "prompt", scope.card)
            return tuple(value)
    raise InvalidRequest("prompt must be text, token ids, or a list of either, and not empty", "prompt")


def _messages(field: Field, value: Any, scope: Scope) -> tuple[Message, ...]:
    if type(value) is not list or not value:
        raise InvalidRequest("messages must be a list that is not empty", "messages")
    messages, ignored = parse_messages(value)
    scope.ignored.extend(ignored)
    return messages


def _response_format(field: Field, value: Any, scope: Scope) -> Structure | None:
    return formats.response_format(value, field.name, scope.ignored)


def _structured_outputs(field: Field, value: Any, scope: Scope) -> Structure | None:
    return formats.structured_outputs(value, field.name, scope.ignored)


def _structure(make: Callable[[Any, str], Structure]) -> Callable[[Field, Any, Scope], Structure]:
    return lambda field, value, scope: make(value, field.name)


_CHECKS: dict[str, Callable[[Field, Any, Scope], Any]] = {
    "number": _number,
    "integer": _integer,
    "truncate": _truncate,
    "boolean": _boolean,
    "string": _string,
    "stop": _stop,
    "stop_ids": _stop_ids,
    "logit_bias": _logit_bias,
    "stream_options": _stream_options,
    "template_kwargs": _template_kwargs,
    "prompt": _prompt,
    "messages": _messages,
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "schema": _structure(formats.schema),
    "regex": _structure(formats.regex),
    "choice": _structure(formats.choice),
    "grammar": _structure(formats.grammar),
}
