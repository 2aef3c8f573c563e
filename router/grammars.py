"""What a client says about the text becomes llguidance's own text. Pure, and slow for large sources.

It checks what llguidance would take and not keep, or take too long over. Whether a vocabulary can follow the result is
`grammar_process.py`'s question.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from paceline.proto.grammar import MAX_GRAMMAR_BYTES

MAX_REPEATS = 10_000  # a{1,100} in a group that is repeated 100 times
_ANY_OBJECT = {"type": "object"}
_ONE_BLANK = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
# Another notation inside, which the checks here would not see.
_NESTED = re.compile(r"%\s*(json|lark|regex|import)\b")
_VALUES = ("const", "enum", "default", "examples")  # hold values, not schemas
# Of regular expressions.
_REPEAT = re.compile(r"[*+?]|\{(\d*),?(\d*)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{\w*\}|.|$)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[\w-]*:?))?")


def grammar_of(kind: str, source: str) -> str:
    """``kind`` and ``source`` as in `formats.Structure`. Raises ValueError: what is wrong, to be read after the name of
    the field, without a word of the source."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"may have at most {MAX_GRAMMAR_BYTES} bytes")
    return _MAKERS[kind](source)


def _json_object(source: str) -> str:
    return _from_schema(_ANY_OBJECT)


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source, parse_int=_int64)
        json.dumps(schema, allow_nan=False)  # 1e400 becomes infinite
    except (ValueError, RecursionError) as error:
        raise ValueError("is not valid JSON, is nested too deeply or holds a number beyond 64 bits") from error
    if type(schema) is not dict:
        raise ValueError("must be a JSON schema: an object")
    if "x-guidance" in schema:
        raise ValueError("may not hold x-guidance")
    for pattern in _patterns(schema):
        try:
            check_regex(pattern)
        except ValueError as error:
            raise ValueError(f"holds a pattern that {error}") from error
    return _from_schema(schema or _ANY_OBJECT)


def _from_schema(schema: dict[str, Any]) -> str:
    text = json.dumps(schema | {"x-guidance": _ONE_BLANK})
    return llguidance.LLMatcher.grammar_from_json_schema(text)


def _int64(digits: str) -> int:
    """llguidance would round what is beyond, and -2**63 and its neighbour end its process."""
    value = int(digits)
    if float(value) <= -(2**63) or value >= 2**64:
        raise ValueError
    return value


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions in a schema. The values that it holds are none."""
    if type(schema) is list:
        for item in schema:
            yield from _patterns(item)
    if type(schema) is not dict:
        return
    for name, value in schema.items():
        if name == "pattern" and type(value) is str:
            yield value
        elif name == "patternProperties" and type(value) is dict:
            yield from value
            yield from _patterns(list(value.values()))
        elif name not in _VALUES:
            yield from _patterns(value)


def _regex(source: str) -> str:
    if not source:
        raise ValueError("is empty")
    check_regex(source)
    return llguidance.LLMatcher.grammar_from_regex(source)


def check_regex(text: str) -> None:
    """Raises ValueError for repeats that are a mistake, or that unfold to too much. The rest of the syntax is left to
    llguidance."""
    most = [1]  # by open group: how many copies of something in it the repeats so far make
    last = 0  # the same for what stands just before; 0: nothing that can be repeated
    at = 0
    while at < len(text):
        if repeat := _REPEAT.match(text, at):
            if not last:
                raise ValueError("repeats nothing, or repeats a repeat; put it into a group")
            most[-1] = max(most[-1], last * _copies(repeat))
            if most[-1] > MAX_REPEATS:
                raise ValueError(f"has repeats that multiply to more than {MAX_REPEATS}")
            at, last = repeat.end(), 0
            if text.startswith("?", at):  # as few as possible: not a repeat of its own
                at += 1
        elif group := _GROUP.match(text, at):
            most.append(1)
            at, last = group.end(), 0
        elif text[at] == ")":
            last = most.pop() if len(most) > 1 else 1
            most[-1] = max(most[-1], last)
            at += 1
        elif text[at] in "|^":
            at, last = at + 1, 0
        else:
            one = _ESCAPE.match(text, at) or _CLASS.match(text, at)
            at, last = one.end() if one else at + 1, 1


def _copies(repeat: re.Match[str]) -> int:
    """How often what is repeated is written out; * and + are loops, not copies."""
    return max([1, *(int(number[:9]) for number in repeat.groups() if number)])


def _choice(source: str) -> str:
    texts = json.loads(source)
    if type(texts) is not list or not texts or not all(type(text) is str and text for text in texts):
        raise ValueError("must list texts that are not empty")
    # One expression, since alternatives of a grammar would each be followed on their own.
    return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, dict.fromkeys(texts))))


def _literal(text: str) -> str:
    return re.sub(r"[\x00-\x7f]", lambda m: m[0] if m[0].isalnum() else f"\\x{ord(m[0]):02x}", text)


def _grammar(source: str) -> str:
    """Of Lark or of GBNF."""
    if _NESTED.search(source):
        raise ValueError("may not hold %json, %lark, %regex or %import")
    if not is_lark_syntax(source):
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # bare ones, and IndexError where the text breaks off
            raise ValueError("is neither Lark, with a rule start, nor GBNF, with a rule root") from error
    # Not as it is: a text that begins like JSON would be taken for a grammar in llguidance's own notation.
    return json.dumps({"grammars": [{"lark_grammar": source}]})


_MAKERS = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
