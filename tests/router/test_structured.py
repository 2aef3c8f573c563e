"""Structures that clients ask for: what becomes of them, what is refused, and what a hostile one can do."""

import json
import os
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.proto.errors import InvalidRequest
from paceline.proto.grammar import MAX_GRAMMAR_BYTES, matcher_of, vocabulary_of
from paceline.router import grammar_process, grammars
from paceline.router.formats import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, Structure
from paceline.router.structured import Structures
from tests.fakes import tiny_card

EXAMPLES = int(os.environ.get("PACELINE_EXAMPLES", "100"))  # the prover asks for more
VOCABULARY = vocabulary_of(tiny_card())
EOS = tiny_card().eos_ids[0]


@pytest.fixture(scope="module")
def structures():
    return Structures(tiny_card())


def schema(value) -> Structure:
    return Structure(JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value), "guided_json")


async def refusal(structures, structure: Structure) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await structures.compile(structure)
    assert caught.value.param == structure.param
    return caught.value.message


def takes(grammar: str, text: str) -> bool:
    """Whether the text is a whole one of the grammar."""
    matcher = matcher_of(VOCABULARY, grammar)
    ids = VOCABULARY.tokenize_str(text)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def written(grammar: str, seed: int, most: int = 300) -> str | None:
    """Some text of the grammar, a token at a time and at random; None if it has not ended by then."""
    matcher, draw, ids = matcher_of(VOCABULARY, grammar), np.random.default_rng(seed), []
    while len(ids) < most:
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8).nonzero()[0]
        allowed = allowed[allowed < VOCABULARY.vocab_size]
        assert len(allowed), matcher.get_error()
        closing = [id for id in allowed if id == EOS or VOCABULARY.decode_bytes([int(id)]) in (b'"', b"}", b"]")]
        id = int(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
        if id == EOS:
            return VOCABULARY.decode_str(ids)
        ids.append(id)
        matcher.consume_token(id)
    return None


# -- what works --------------------------------------------------------------------------------------------------------


async def test_a_json_object_is_an_object_with_at_most_one_blank_between_tokens(structures):
    for structure in (Structure(JSON_OBJECT), schema({}), schema({"type": "object"})):
        grammar = await structures.compile(structure)
        assert takes(grammar, '{"a": [1, true, null], "b":{}}')
        assert not takes(grammar, "5")
        assert not takes(grammar, '"text"')
        assert not takes(grammar, '{"a":  1}')
        assert not takes(grammar, '{"a":\n1}')


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (JSON_SCHEMA, '{"type":"integer","maximum":20000000000}', "20000000000", "20000000001"),
        (JSON_SCHEMA, '{"enum":["a",1,null,{"x":[1]}]}', '{"x":[1]}', "2"),
        (
            JSON_SCHEMA,
            '{"$ref":"#/$defs/t","$defs":{"t":{"type":"array","items":{"$ref":"#/$defs/t"}}}}',
            "[[],[[]]]",
            "[",
        ),
        (JSON_SCHEMA, '{"type":"object","properties":{"x-guidance":{"type":"null"}}}', '{"x-guidance":null}', "{1"),
        (JSON_SCHEMA, '{"const":"ä日本"}', '"ä日本"', '"a"'),
        (JSON_SCHEMA, '{"type":"integer","minimum":0,"maximum":18446744073709551615}', "7", "-1"),
        (REGEX, "[0-9]{3}-[0-9]{4}", "555-0199", "555-019"),
        (REGEX, r"\x{41}[]a-]+?(?P<name>b|c)\u{1F600}", "A]-aab\U0001f600", "A"),
        (REGEX, r"(?i:yes)\{\}", "YES{}", "yes"),
        (CHOICE, json.dumps(["yes", "yes please", 'a"b\\c\n', "日本"]), "yes please", "ye"),
        (CHOICE, json.dumps(["yes", "yes please", 'a"b\\c\n', "日本"]), 'a"b\\c\n', "a"),
        (CHOICE, json.dumps(["(a|b)*", "{2}"]), "(a|b)*", "ab"),
        (GRAMMAR, 'start: "a" start "b" | "x"', "aaxbb", "aaxb"),
        (GRAMMAR, 'root ::= "a" root "b" | digit+\ndigit ::= [0-9]', "aa42bb", "aabb"),
    ],
)
async def test_every_kind_takes_what_it_describes_and_nothing_else(structures, kind, source, good, bad):
    grammar = await structures.compile(Structure(kind, source, "f"))
    assert takes(grammar, good)
    assert not takes(grammar, bad)


async def test_the_same_structure_is_compiled_once(structures, monkeypatch):
    grammar = await structures.compile(schema({"type": "boolean"}))
    monkeypatch.setattr(structures, "_ask", None)
    assert await structures.compile(schema({"type": "boolean"})) == grammar


async def test_its_processes_end_with_it():
    structures = Structures(tiny_card())
    await structures.compile(Structure(JSON_OBJECT))
    child = structures._idle.get_nowait()._child
    # Its output ends when all that it forked have ended, too.
    assert child.stdout.closed
    assert child.returncode is not None


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (schema({"type": "nope"}), "type"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"properties": {"a": {"not": {}}}}), "not"),
        (schema({"if": {}, "then": {}}), "if, then"),
        (schema({"type": "string", "format": "secret"}), "format"),
        (schema({"type": "integer", "minimum": 5, "maximum": 1}), "no value"),
        (schema({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "anyOf"),
        (schema({"type": "number", "minimum": 1e300}), "range"),
        (schema({"$ref": "#/nope"}), r"\$ref"),
        (schema({"$ref": "http://example.com/x"}), "not fetched"),
        (schema({"x-guidance": {"lenient": True}, "uniqueItems": True}), "x-guidance"),
        (schema({"pattern": "foo**"}), "repeat"),
        (schema({"patternProperties": {"(a{1,999}){1,999}": {}}}), "multiply"),
        (schema({"pattern": "a(?=b)"}), "look-around"),
        (schema('{"maximum":' + "9" * 5000 + "}"), "JSON"),
        (schema('{"maximum":1e400}'), "64 bits"),
        (schema({"enum": [2**64]}), "64 bits"),
        (schema({"const": -(2**63) + 1}), "64 bits"),
        (schema("[" * 5000), "JSON"),
        (schema('{"items":' * 900 + "{}" + "}" * 900), "complex|JSON"),
        (schema("true"), "object"),
        (schema('"' + "a" * MAX_GRAMMAR_BYTES + '"'), "bytes"),
        (Structure(REGEX, "foo**", "regex"), "repeat"),
        (Structure(REGEX, "a|*", "regex"), "repeat"),
        (Structure(REGEX, "a{2}{3}", "regex"), "repeat"),
        (Structure(REGEX, "(a{1,999}){1,999}", "regex"), "multiply"),
        (Structure(REGEX, "((a{1,100}|b){1,100}){1,100}", "regex"), "multiply"),
        (Structure(REGEX, "(a", "regex"), "cannot be read"),
        (Structure(REGEX, "", "regex"), "empty"),
        (Structure(REGEX, r"(a)\1", "regex"), "backreference"),
        (Structure(CHOICE, '["a",""]', "guided_choice"), "empty"),
        (Structure(GRAMMAR, "start: (", "ebnf"), "cannot be read"),
        (Structure(GRAMMAR, 'start: %json {"uniqueItems":true}', "ebnf"), "may not hold"),
        (Structure(GRAMMAR, '{"grammars":[{"json_schema":{"x-guidance":{"lenient":true}}}]}\nstart:', "ebnf"), "read"),
        (Structure(GRAMMAR, 'root ::= "a', "ebnf"), "neither Lark"),
        (Structure(GRAMMAR, "", "ebnf"), "neither Lark"),
    ],
)
async def test_what_cannot_work_is_refused_in_a_sentence_that_names_the_field_and_quotes_nothing(
    structures, structure, words
):
    message = await refusal(structures, structure)
    assert message.startswith(f"{structure.param} ")
    assert re.search(words, message)
    assert len(message) < 120
    assert "secret" not in message
    assert "example" not in message


async def test_a_tokenizer_that_cannot_be_followed_refuses_every_structure():
    structures = Structures(tiny_card(tokenizer_json="{}"))
    assert "tokenizer" in await refusal(structures, Structure(JSON_OBJECT, param="response_format"))


# -- hostile ones ------------------------------------------------------------------------------------------------------

CHAIN = {f"a{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}}]} for i in range(800)}
BOMBS = [
    # A few hundred bytes that llguidance works on for minutes: an intersection of automata.
    schema({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(24)]}),
    Structure(REGEX, "a?" * 20_000, "regex"),
    Structure(GRAMMAR, "\n" * 60_000 + "root ::= ", "ebnf"),
]


@pytest.mark.parametrize("bomb", BOMBS)
async def test_one_that_takes_too_long_is_refused_and_the_next_one_works(structures, bomb):
    assert "complex" in await refusal(structures, bomb)
    assert await structures.compile(Structure(REGEX, "a+", "regex"))


@pytest.mark.parametrize(
    "structure",
    [
        schema({"$ref": "#/$defs/a0", "$defs": CHAIN | {"a800": {"type": "string"}}}),
        Structure(GRAMMAR, "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"', "ebnf"),
    ],
)
async def test_a_chain_without_end_does_not_overflow_the_stack(structures, structure):
    grammar = await structures.compile(structure)
    assert not matcher_of(VOCABULARY, grammar).is_error()


# -- anything ----------------------------------------------------------------------------------------------------------

# fmt: off
KEYWORDS = [
    "type", "properties", "required", "items", "additionalProperties", "patternProperties", "enum",
    "const", "anyOf", "allOf", "oneOf", "not", "$ref", "$defs",
    "minimum", "maximum", "multipleOf", "minLength", "maxLength", "pattern", "format",
    "minItems", "maxItems", "minProperties", "uniqueItems", "contains", "if", "then",
    "x-guidance",
]
# fmt: on
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["object", "#", "a*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=12,
)
INT64 = st.integers(-(2**63) + 2**10, 2**62)
SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, INT64, st.integers(0, 2**62)
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 9)),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-c]{2,4}$", "^x+$", r"^\d-\w?$", "^(ä|日)*$")]),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4) | INT64, min_size=1, max_size=4)),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda kinds: {"anyOf": kinds}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda props: {
                "type": "object",
                "properties": props,
                "required": sorted(props)[:2],
                "additionalProperties": False,
            },
            st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3),
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=EXAMPLES)
@given(st.sampled_from([JSON_SCHEMA, REGEX, CHOICE, GRAMMAR]), st.text(max_size=20) | JUNK.map(json.dumps))
def test_any_source_is_a_grammar_or_a_sentence(kind, source):
    answer = grammar_process.answer(VOCABULARY, grammar_process.Question(kind, source))
    assert answer.good or 0 < len(answer.text) < 120


@settings(max_examples=EXAMPLES)
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_written_to_the_end_validates(schema, seed):
    grammar = grammars.grammar_of(JSON_SCHEMA, json.dumps(schema))
    text = written(grammar, seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_choice_takes_each_of_its_texts_and_writes_no_other(texts):
    grammar = grammars.grammar_of(CHOICE, json.dumps(texts))
    assert not matcher_of(VOCABULARY, grammar).is_error()
    assert written(grammar, len(texts[0])) in texts


@settings(max_examples=EXAMPLES)
@given(st.from_regex(r"([ab.]|\[ab\]|\\d|\(\?:a\|b\)|\(ab\))(\*|\+|\?|\{2\}|\{1,3\})?\??", fullmatch=True))
def test_a_plain_regex_is_never_taken_for_a_mistake(expression):
    try:
        re.compile(expression)
    except re.error:
        return
    if not re.search(r"[*+?}]\?\?", expression):
        grammars.check_regex(expression)
