"""An OpenAI-shaped JSON object becomes a `Call`: checked once, here. No I/O, no tokenizer.

What fields there are is `fields.py`, one value against its row `checks.py`; what goes back is `shapes.py`. Here is what
fields mean together, and what the API key adds. Messages name the field, never its value.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.proto.errors import InvalidRequest, ModelNotFound, NotPermitted, UnsupportedField
from paceline.proto.model import ModelCard
from paceline.proto.request import SamplingParams
from paceline.router import formats
from paceline.router.checks import Scope, check
from paceline.router.config import RouterConfig
from paceline.router.fields import BY_ROUTE, CHAT, IGNORED, Field
from paceline.router.formats import Structure
from paceline.router.keys import NOBODY, Key
from paceline.router.messages import Message, texts_of

MAX_NAMED = 10  # unknown fields that a refusal names
MAX_NAME_LEN = 64  # characters that are shown of one

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a model's card may set these
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # in a header that lists names: no spaces, no commas


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
    list_prompt_logprobs: bool = False  # in a list of their own, beside those of an echo
    stream: bool = False
    include_usage: bool = False
    return_ids: bool = False  # the client wants token ids, too
    ignored: tuple[str, ...] = ()  # names of fields that nothing reads
    # Who asks.
    tenant: str = ""
    priority: int = 0
    salts: tuple[str, ...] = ()  # prompts share cached blocks only where all of them are equal

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.params.n

    @property
    def prompt_size(self) -> int:
        """Characters and ids to work through."""
        return sum(map(len, self.prompts)) + sum(map(len, texts_of(self.messages, self.template_kwargs)))


def parse(route: str, body: dict[str, Any], card: ModelCard, config: RouterConfig, key: Key = NOBODY) -> Call:
    """What ``body`` asks for, on behalf of ``key``.

    Raises InvalidRequest, UnsupportedField, ModelNotFound or NotPermitted, each naming the field.
    """
    given, ignored = _read(BY_ROUTE[route], body, card, config)
    check_model(given.get("model"), card)
    opens, continues = _turns(given)
    call = Call(
        route=route,
        model=card.name,
        params=_sampling(route, given, card),
        prompts=() if route == CHAT else _required(given, "prompt"),
        messages=_required(given, "messages") if route == CHAT else (),
        add_special_tokens=given.get("add_special_tokens", True),
        add_generation_prompt=opens,
        continue_final=continues,
        template_kwargs=given.get("chat_template_kwargs", {}),
        truncate=given.get("truncate_prompt_tokens"),
        structure=formats.only([value for value in given.values() if isinstance(value, Structure)]),
        stop=given.get("stop", ()),
        include_stop=_one_of(given, "include_stop_str_in_output", "no_stop_trim") or False,
        skip_special=given.get("skip_special_tokens", True),
        echo=given.get("echo", False),
        list_prompt_logprobs="prompt_logprobs" in given,
        stream=given.get("stream", False),
        include_usage=_include_usage(given),
        return_ids=given.get("return_token_ids", False),
        ignored=ignored,
        tenant=key.tenant,
        priority=_priority(given, key),
        salts=_salts(given, key),
    )
    if call.num_choices > config.max_choices:
        raise InvalidRequest(f"prompts times n may be at most {config.max_choices}", "n")
    return call


def shown(names: Sequence[str], most: int) -> str:
    """Names that a client made up, in a form that can do no harm in a header or a message."""
    return ", ".join(_UNSAFE.sub("?", name[:MAX_NAME_LEN]) for name in names[:most])


def check_model(name: Any, card: ModelCard) -> None:
    """Nothing named is the one that is served. Raises ModelNotFound."""
    if name is not None and name != card.name:
        raise ModelNotFound(f"this model is not served; served: {card.name}", "model")


def _read(
    fields: dict[str, Field], body: dict[str, Any], card: ModelCard, config: RouterConfig
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Checked values by name, and the names of what nothing reads. Null is the same as not given."""
    given: dict[str, Any] = {}
    scope = Scope(card, config, [])
    for name, value in body.items():
        field = fields.get(name)
        if field is None or (field.status == IGNORED and value is not None):
            scope.ignored.append(name)
        elif value is not None:
            given[name] = check(field, value, scope)
    if scope.ignored and config.strict:
        more = len(scope.ignored) - MAX_NAMED
        rest = f" and {more} more" if more > 0 else ""
        raise UnsupportedField(f"nothing here reads {shown(scope.ignored, MAX_NAMED)}{rest}", shown(scope.ignored, 1))
    return given, tuple(scope.ignored)


def _required(given: dict[str, Any], name: str) -> Any:
    if name not in given:
        raise InvalidRequest(f"{name} is required", name)
    return given[name]


def _one_of(given: dict[str, Any], name: str, other: str) -> Any:
    """The value of a field that has two names, or None."""
    if name in given and other in given and given[name] != given[other]:
        raise InvalidRequest(f"{name} and {other} differ; send one", other)
    return given.get(name, given.get(other))


# -- what fields mean together -----------------------------------------------------------------------------------------


def _turns(given: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the template opens the assistant's turn, and whether the last message goes on."""
    continues = given.get("continue_final_message", False)
    opens = given.get("add_generation_prompt", not continues)
    if continues and opens:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
        )
    if continues and "messages" in given and given["messages"][-1].role != "assistant":
        raise InvalidRequest("continue_final_message needs a last message of the assistant's", "continue_final_message")
    return opens, continues


def _sampling(route: str, given: dict[str, Any], card: ModelCard) -> SamplingParams:
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise UnsupportedField("best_of other than n is not supported", "best_of")
    defaults = {name: card.generation_defaults[name] for name in _DEFAULTED if name in card.generation_defaults}
    chosen = {name: given[name] for name in (*_DEFAULTED, "presence_penalty", "frequency_penalty") if name in given}
    values = defaults | chosen
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    seed = given.get("seed")
    logprobs = _logprobs(route, given)
    prompt_logprobs = _prompt_logprobs(given, logprobs)
    max_tokens, min_tokens = _num_tokens(given, prompt_logprobs)
    return SamplingParams(
        seed=secrets.randbits(64) if seed is None else seed & (2**64 - 1),
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logit_bias=given.get("logit_bias", {}),
        stop_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **values,
    )


def _num_tokens(given: dict[str, Any], prompt_logprobs: int | None) -> tuple[int | None, int]:
    """Most and least."""
    most, least = _one_of(given, "max_tokens", "max_completion_tokens"), given.get("min_tokens", 0)
    if most == 0 and prompt_logprobs is None and not given.get("echo"):
        raise InvalidRequest("max_tokens 0 needs echo or prompt_logprobs; without them, at least 1", "max_tokens")
    if most is not None and least > most:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {most}", "min_tokens")
    return most, least


def _logprobs(route: str, given: dict[str, Any]) -> int | None:
    if route != CHAT:
        return given.get("logprobs")
    if given.get("logprobs"):
        return given.get("top_logprobs", 0)
    if "top_logprobs" in given:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _prompt_logprobs(given: dict[str, Any], logprobs: int | None) -> int | None:
    """Asked for by name, or by an echo with log probabilities: then as many as of the answer's tokens."""
    asked = given.get("prompt_logprobs")
    if asked is not None and given.get("stream"):
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed; on completions, echo with logprobs can", "prompt_logprobs"
        )
    if not given.get("echo") or logprobs is None:
        return asked
    if asked not in (None, logprobs):
        raise InvalidRequest("with echo, prompt_logprobs must equal logprobs", "prompt_logprobs")
    return logprobs


def _include_usage(given: dict[str, Any]) -> bool:
    if "stream_options" in given and not given.get("stream"):
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return given.get("stream_options", False)


# -- what the key adds -------------------------------------------------------------------------------------------------


def _priority(given: dict[str, Any], key: Key) -> int:
    best, asked = key.best_priority, given.get("priority")
    if asked is None:
        return max(0, best or 0)
    if best is not None and asked < best:
        raise NotPermitted(f"this API key may ask for priority {best} or a higher number", "priority")
    return asked


def _salts(given: dict[str, Any], key: Key) -> tuple[str, ...]:
    salts = (key.salt, given.get("cache_salt", ""))
    return salts if any(salts) else ()
