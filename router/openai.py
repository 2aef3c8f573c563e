"""An OpenAI-shaped JSON object becomes a `Call`: checked once, here, field by field. No I/O, no tokenizer.

What fields there are is `fields.py`; what goes back is `shapes.py`. Messages name the field, never its value.
"""

import math
import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.proto.errors import InvalidRequest, ModelNotFound, UnsupportedField
from paceline.proto.model import ModelCard
from paceline.proto.request import SamplingParams
from paceline.router.config import RouterConfig
from paceline.router.fields import BY_ROUTE, CHAT, Field
from paceline.router.messages import Message, parse_messages

_DIGITS = re.compile(r"[0-9]{1,10}")
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a model's card may set these


class Structure(msgspec.Struct, frozen=True):
    """What the text must obey, as the client wrote it. ``kind``: json_object, json_schema, regex, choice or grammar;
    ``source``: the schema as JSON, the expression, the texts as a JSON list, the grammar."""

    kind: str
    source: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is well formed. ``prompts`` are text or ids; a chat has ``messages`` instead, as one prompt.

    ``params`` holds what the engine needs, but for the grammar, which is compiled from ``structure`` later. Text stays
    in the router: ``stop``, and how text is shown.
    """

    route: str
    model: str
    params: SamplingParams
    # The prompt.
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[Message, ...] = ()
    add_special_tokens: bool = True  # a text gets the token that begins texts
    add_generation_prompt: bool = True  # the template opens the assistant's turn
    continue_final: bool = False  # the answer goes on from the last message
    template_kwargs: dict[str, Any] = {}
    truncate: int | None = None  # keep so many of the last tokens; -1: what leaves room for the answer
    # How ids become text.
    structure: Structure | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # what ended the choice stays in its text
    skip_special: bool = True  # control tokens are not shown
    # What is answered.
    echo: bool = False  # each choice begins with its prompt
    stream: bool = False
    include_usage: bool = False
    return_ids: bool = False  # the client wants token ids, too
    ignored: tuple[str, ...] = ()  # names of unknown fields
    # Who asks.
    tenant: str = ""
    priority: int = 0
    salts: tuple[str, ...] = ()  # prompts share cached blocks only where all of them are equal

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.params.n


def parse(route: str, body: dict[str, Any], card: ModelCard, config: RouterConfig) -> Call:
    """Raises InvalidRequest, UnsupportedField or ModelNotFound, each naming the field."""
    fields = BY_ROUTE[route]
    given: dict[str, Any] = {}
    ignored = []
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            ignored.append(name)
        elif value is not None:
            given[name] = _check(field, value, card, config)
    check_model(given.get("model"), card)
    messages: tuple[Message, ...] = ()
    if route == CHAT:
        messages, more = parse_messages(_required(given, "messages"))
        ignored += more
    call = Call(
        route=route,
        model=card.name,
        params=_sampling(route, given, card),
        prompts=() if route == CHAT else _required(given, "prompt"),
        messages=messages,
        stop=given.get("stop", ()),
        stream=given.get("stream", False),
        include_usage=_include_usage(given),
        priority=given.get("priority", 0),
        return_ids=given.get("return_token_ids", False),
        ignored=tuple(ignored),
    )
    if len(call.prompts) > config.max_prompts:
        raise InvalidRequest(f"prompt may list at most {config.max_prompts} prompts", "prompt")
    if call.num_choices > config.max_choices:
        raise InvalidRequest(f"prompts times n may be at most {config.max_choices}", "n")
    return call


def check_model(name: Any, card: ModelCard) -> None:
    """Nothing named is the one that is served. Raises ModelNotFound."""
    if name is not None and name != card.name:
        raise ModelNotFound(f"this model is not served; served: {card.name}", "model")


def _sampling(route: str, given: dict[str, Any], card: ModelCard) -> SamplingParams:
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise UnsupportedField("best_of other than n is not supported", "best_of")
    defaults = {name: card.generation_defaults[name] for name in _DEFAULTED if name in card.generation_defaults}
    chosen = {name: given[name] for name in (*_DEFAULTED, "presence_penalty", "frequency_penalty") if name in given}
    values = defaults | chosen
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    seed = given.get("seed")
    return SamplingParams(
        seed=secrets.randbits(64) if seed is None else seed & (2**64 - 1),
        n=n,
        max_tokens=_max_tokens(given),
        logit_bias=given.get("logit_bias", {}),
        stop_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=_logprobs(route, given),
        **values,
    )


def _max_tokens(given: dict[str, Any]) -> int | None:
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(limits) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", "max_completion_tokens")
    return limits.pop() if limits else None


def _logprobs(route: str, given: dict[str, Any]) -> int | None:
    if route != CHAT:
        return given.get("logprobs")
    if given.get("logprobs"):
        return given.get("top_logprobs", 0)
    if "top_logprobs" in given:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _include_usage(given: dict[str, Any]) -> bool:
    if "stream_options" in given and not given.get("stream"):
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return given.get("stream_options", False)


def _required(given: dict[str, Any], name: str) -> Any:
    if name not in given:
        raise InvalidRequest(f"{name} is required", name)
    return given[name]


# -- one field ---------------------------------------------------------------------------------------------------------


def _check(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> Any:
    """The value in the form that the rest uses. ``value`` is not null."""
    if not field.supported:
        if not any(value == neutral and type(value) is type(neutral) for neutral in field.neutral):
            raise UnsupportedField(f"{field.name} is not supported yet", field.name)
        return value
    return _CHECKS[field.kind](field, value, card, config)


def _number(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidRequest(f"{field.name} must be a number", field.name)
    _in_range(field, value, config)
    return float(value)


def _integer(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> int:
    if type(value) is not int:
        raise InvalidRequest(f"{field.name} must be an integer", field.name)
    _in_range(field, value, config)
    return value


def _in_range(field: Field, value: float, config: RouterConfig) -> None:
    high = getattr(config, field.limit) if field.limit else field.high
    if field.low is not None and (value <= field.low if field.above else value < field.low):
        raise InvalidRequest(f"{field.name} must be {'above' if field.above else 'at least'} {field.low}", field.name)
    if high is not None and value > high:
        raise InvalidRequest(f"{field.name} must be at most {high}", field.name)


def _boolean(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(f"{field.name} must be true or false", field.name)
    return value


def _string(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> str:
    if type(value) is not str:
        raise InvalidRequest(f"{field.name} must be a string", field.name)
    return value


def _stop(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> tuple[str, ...]:
    stops = [value] if type(value) is str else value
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    if len(stops) > config.max_stop:
        raise InvalidRequest(f"stop may list at most {config.max_stop} strings", "stop")
    if any(not 0 < len(stop) <= config.max_stop_len for stop in stops):
        raise InvalidRequest(f"a stop string must hold 1 to {config.max_stop_len} characters", "stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> tuple[int, ...]:
    if type(value) is not list or len(value) > config.max_stop_ids:
        raise InvalidRequest(f"{field.name} must be a list of at most {config.max_stop_ids} token ids", field.name)
    check_ids(value, field.name, card)
    return tuple(dict.fromkeys(value))


def check_ids(ids: list[Any], name: str, card: ModelCard) -> None:
    """Raises InvalidRequest unless all are ids of the model's vocabulary."""
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise InvalidRequest(f"{name} must hold integers", name)
    if min(ids) < 0 or max(ids) >= card.vocab_size:
        raise InvalidRequest(f"{name} holds an id outside the vocabulary of {card.vocab_size}", name)


def _logit_bias(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> dict[int, float]:
    if type(value) is not dict:
        raise InvalidRequest("logit_bias must be an object of token ids and numbers", "logit_bias")
    bias = {}
    for key, amount in value.items():
        if not _DIGITS.fullmatch(key) or int(key) >= card.vocab_size:
            raise InvalidRequest(f"logit_bias keys must be token ids below {card.vocab_size}", "logit_bias")
        if type(amount) not in (int, float) or not -100 <= amount <= 100:
            raise InvalidRequest("logit_bias values must be numbers from -100 to 100", "logit_bias")
        bias[int(key)] = float(amount)
    return bias


def _stream_options(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> bool:
    """Whether usage is wanted. Other options ask for nothing that we do."""
    include = value.get("include_usage") if type(value) is dict else 0
    if include is not None and type(include) is not bool:
        raise InvalidRequest("stream_options must be an object; include_usage is true or false", "stream_options")
    return bool(include)


def _prompt(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> tuple[str | list[int], ...]:
    if type(value) is str:
        return (value,)
    if type(value) is list and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            check_ids(value, "prompt", card)
            return (value,)
        if kinds == {str}:
            return tuple(value)
        if kinds == {list} and all(value):
            for ids in value:
                check_ids(ids, "prompt", card)
            return tuple(value)
    raise InvalidRequest("prompt must be text, token ids, or a list of either, and not empty", "prompt")


def _messages(field: Field, value: Any, card: ModelCard, config: RouterConfig) -> list[Any]:
    if type(value) is not list or not value:
        raise InvalidRequest("messages must be a list that is not empty", "messages")
    return value  # read by messages.py


_CHECKS: dict[str, Callable[[Field, Any, ModelCard, RouterConfig], Any]] = {
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "string": _string,
    "stop": _stop,
    "stop_ids": _stop_ids,
    "logit_bias": _logit_bias,
    "stream_options": _stream_options,
    "prompt": _prompt,
    "messages": _messages,
}
