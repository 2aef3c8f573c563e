"""Chat messages as clients send them, made plain: a role, a text and perhaps a name. No template, no tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paceline.proto.errors import InvalidRequest, UnsupportedField

ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "function_call")
_NEUTRAL: tuple[object, ...] = (None, [], {}, "")  # SDKs send such values along when they hand a reply back


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    name: str | None = None


def parse_messages(raw: list[Any]) -> tuple[tuple[Message, ...], list[str]]:
    """The messages, and the names of fields that were ignored. Raises InvalidRequest or UnsupportedField."""
    ignored: dict[str, None] = {}
    messages = tuple(_parse(message, f"messages[{at}]", ignored) for at, message in enumerate(raw))
    return messages, list(ignored)


def texts_of(messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> Iterator[str]:
    """Everything that a client wrote into a conversation."""
    for message in messages:
        yield message.content
        yield message.name or ""
    yield from _texts_within(list(variables.values()))


def _texts_within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _texts_within(list(value.values()))
    elif isinstance(value, list):
        for member in value:
            yield from _texts_within(member)


def _parse(raw: Any, where: str, ignored: dict[str, None]) -> Message:
    if type(raw) is not dict:
        raise InvalidRequest(f"{where} must be an object", where)
    for name, value in raw.items():
        if name in _TOOL_FIELDS and value not in _NEUTRAL:
            raise UnsupportedField(f"{where}.{name} is not supported yet", f"{where}.{name}")
        if name not in ("role", "content", "name", *_TOOL_FIELDS) and value not in _NEUTRAL:
            ignored[f"messages.{name}"] = None
    role = raw.get("role")
    if role in _TOOL_ROLES:
        raise UnsupportedField(f"{where}.role: tools are not supported yet", f"{where}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    name = raw.get("name")
    if name is not None and type(name) is not str:
        raise InvalidRequest(f"{where}.name must be a string", f"{where}.name")
    return Message(role, _content(raw.get("content"), f"{where}.content"), name)


def _content(content: Any, where: str) -> str:
    """Parts are joined in order, with nothing between them; an empty text stays one."""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise InvalidRequest(f"{where} must be a string or a list of text parts", where)
    texts = []
    for at, part in enumerate(content):
        if type(part) is not dict or type(part.get("type")) is not str:
            raise InvalidRequest(f"{where}[{at}] must be an object with a type", f"{where}[{at}]")
        if part["type"] != "text":
            raise UnsupportedField(f"{where}[{at}].type: only text is supported", f"{where}[{at}].type")
        if type(part.get("text")) is not str:
            raise InvalidRequest(f"{where}[{at}].text must be a string", f"{where}[{at}].text")
        texts.append(part["text"])
    return "".join(texts)
