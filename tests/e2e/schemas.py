"""Two hundred JSON schemas of the kinds that people write: the same ones in every run."""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "city", "note", "kind", "total", "id", "level", "größe", "색", "цвет", "the key", 'a"b')
WORDS = ("red", "green", "deep blue", "서울", "Zürich", "naïve", "🙂", "a\\b", 'say "hi"', "two\nlines", "", "Ω")
PATTERNS = (
    r"^[a-z]{2,8}$",
    r"^[A-Z]{3}-[0-9]{4}$",
    r"^\d{1,3}(\.\d{1,2})?$",
    r"^(yes|no|maybe)$",
    r"^#[0-9a-f]{6}$",
    r"^[가-힣]{1,4}$",
    r"^[a-z]+@[a-z]+\.(com|org)$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def text(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 12)}


def pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def formatted(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def whole_number(rng: random.Random) -> Schema:
    low = rng.choice((-1000, -7, 0, 1, 18))
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 9, 250, 20_000_000_000))}


def number(rng: random.Random) -> Schema:
    low = rng.choice((-90.0, 0, 0.5))
    return {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + rng.choice((1, 180))}


def choice(rng: random.Random) -> Schema:
    values: list[Any] = rng.sample(WORDS, 3) + rng.sample([1, 2.5, True, None, [1, 2], {"a": 1}], rng.randint(0, 2))
    return {"const": values[0]} if rng.random() < 0.2 else {"enum": values}


def flag(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


LEAVES: tuple[Callable[[random.Random], Schema], ...] = (
    text,
    pattern,
    formatted,
    whole_number,
    number,
    choice,
    flag,
)


def leaf(rng: random.Random) -> Schema:
    return rng.choice(LEAVES)(rng)


def flat(rng: random.Random) -> Schema:
    return an_object(rng, leaf)


def an_object(rng: random.Random, part: Callable[[random.Random], Schema]) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = names if rng.random() < 0.6 else names[: len(names) // 2]
    properties = {name: part(rng) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def nested(rng: random.Random) -> Schema:
    return an_object(rng, lambda rng: an_object(rng, leaf) if rng.random() < 0.5 else leaf(rng))


def listed(rng: random.Random) -> Schema:
    items = rng.choice((leaf, flat))(rng)
    array: Schema = {"type": "array", "items": items, "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
    if rng.random() < 0.3:
        array = {"type": "array", "prefixItems": [leaf(rng), leaf(rng)], "items": False, "minItems": 2}
    return {"type": "object", "properties": {"list": array}, "required": ["list"], "additionalProperties": False}


def referring(rng: random.Random) -> Schema:
    """To definitions, and to itself."""
    node: Schema = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"leaf": leaf(rng), "node": node}}


def either(rng: random.Random) -> Schema:
    options = [flat(rng), whole_number(rng), choice(rng), {"type": ["string", "null"], "maxLength": 8}]
    return {"anyOf": rng.sample(options, 2)}


KINDS: tuple[Callable[[random.Random], Schema], ...] = (flat, nested, listed, referring, either, leaf, pattern, number)


def schemas(count: int = 200) -> list[Schema]:
    """All different."""
    rng, found = random.Random(2024), {}
    for kind in itertools.cycle(KINDS):
        schema = kind(rng)
        found.setdefault(json.dumps(schema), schema)
        if len(found) == count:
            return list(found.values())
    raise AssertionError("the cycle has no end")
