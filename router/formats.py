"""What the text of an answer must obey, in the many forms in which clients say it, as one: a `Structure`.

Shapes only: whether a schema, an expression or a grammar makes sense is for whoever compiles it.
"""

from typing import Any

import msgspec
import orjson

from paceline.proto.errors import InvalidRequest, UnsupportedField

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, GRAMMAR = "json_object", "json_schema", "regex", "choice", "grammar"


class Structure(msgspec.Struct, frozen=True):
    """What the text must obey, as the client wrote it. ``kind``: json_object, json_schema, regex, choice or grammar;
    ``source``: the schema as JSON, the expression, the texts as a JSON list, the grammar; ``param``: the field that
    asked for it."""

    kind: str
    source: str = ""
    param: str | None = None


def schema(value: Any, param: str) -> Structure:
    """A JSON schema, as an object or as the text of one."""
    if type(value) is str:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{param} is not valid JSON", param) from error
    if type(value) is not dict:
        raise InvalidRequest(f"{param} must be a JSON schema: an object", param)
    try:
        return Structure(JSON_SCHEMA, orjson.dumps(value).decode(), param)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"{param} is nested too deeply", param) from error


def regex(value: Any, param: str) -> Structure:
    return Structure(REGEX, _text(value, param), param)


def grammar(value: Any, param: str) -> Structure:
    return Structure(GRAMMAR, _text(value, param), param)


def choice(value: Any, param: str) -> Structure:
    if type(value) is not list or not value or any(type(text) is not str for text in value):
        raise InvalidRequest(f"{param} must be a list of texts that is not empty", param)
    return Structure(CHOICE, orjson.dumps(value).decode(), param)


def response_format(value: Any, param: str, ignored: list[str]) -> Structure | None:
    """OpenAI's: an object with a type. Names of members that nothing reads go to ``ignored``."""
    kind = value.get("type") if type(value) is dict else None
    if kind == "structural_tag":
        raise UnsupportedField(f"{param}.type structural_tag is not supported", f"{param}.type")
    if kind not in ("text", JSON_OBJECT, JSON_SCHEMA):
        raise InvalidRequest(f"{param} must be an object of type text, json_object or json_schema", f"{param}.type")
    if value.get("schema") is not None:
        inner = f"{param}.json_schema.schema"
        raise UnsupportedField(f"{param}.schema is not supported: a schema goes into {inner}", f"{param}.schema")
    _ignore(value, ("type", "schema", "json_schema"), param, ignored)
    if kind == JSON_OBJECT:
        return Structure(JSON_OBJECT, param=param)
    return _wrapped(value.get("json_schema"), f"{param}.json_schema", ignored) if kind == JSON_SCHEMA else None


def _wrapped(value: Any, param: str, ignored: list[str]) -> Structure:
    if type(value) is not dict:
        raise InvalidRequest(f"{param} must be an object that holds name and schema", param)
    if type(value.get("schema")) is not dict:
        raise InvalidRequest(f"{param}.schema must be a JSON schema: an object", f"{param}.schema")
    for name, expected, words in (("name", str, "a string"), ("strict", bool, "true or false")):
        if value.get(name) is not None and type(value[name]) is not expected:
            raise InvalidRequest(f"{param}.{name} must be {words}", f"{param}.{name}")
    _ignore(value, ("name", "description", "schema", "strict"), param, ignored)
    return schema(value["schema"], f"{param}.schema")


_STRUCTURED = {"json": schema, REGEX: regex, CHOICE: choice, GRAMMAR: grammar}


def structured_outputs(value: Any, param: str, ignored: list[str]) -> Structure | None:
    """vLLM's: an object with one of the kinds. Names of members that nothing reads go to ``ignored``."""
    if type(value) is not dict:
        raise InvalidRequest(f"{param} must be an object with json, json_object, regex, choice or grammar", param)
    for name in ("structural_tag", "whitespace_pattern"):
        if value.get(name) is not None:
            raise UnsupportedField(f"{param}.{name} is not supported", f"{param}.{name}")
    _ignore(value, (*_STRUCTURED, JSON_OBJECT, "structural_tag", "whitespace_pattern"), param, ignored)
    found = [make(value[name], f"{param}.{name}") for name, make in _STRUCTURED.items() if value.get(name) is not None]
    wants_object = value.get(JSON_OBJECT)
    if wants_object is not None and type(wants_object) is not bool:
        raise InvalidRequest(f"{param}.json_object must be true or false", f"{param}.json_object")
    if wants_object:
        found.append(Structure(JSON_OBJECT, param=f"{param}.json_object"))
    return only(found)


def only(structures: list[Structure]) -> Structure | None:
    """The one that was asked for, if any. Raises InvalidRequest for a second."""
    if len(structures) > 1:
        first, second = structures[0].param, structures[1].param
        raise InvalidRequest(f"{first} and {second} both say what the text must obey; send one", second)
    return structures[0] if structures else None


def _text(value: Any, param: str) -> str:
    if type(value) is not str:
        raise InvalidRequest(f"{param} must be a string", param)
    return value


def _ignore(value: dict[str, Any], known: tuple[str, ...], param: str, ignored: list[str]) -> None:
    ignored += [f"{param}.{name}" for name, member in value.items() if name not in known and member is not None]
