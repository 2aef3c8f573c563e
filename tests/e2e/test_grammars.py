"""A whole engine writes JSON by schemas: forks, preemption and neighbours change no id, and all that ends is valid."""

import json

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from paceline.proto.request import FINISH_STOP
from tests.e2e.engine import Bench
from tests.models import tiny_llama_folder

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["small", "large", "한"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,4}$"},
            "marks": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
            "inner": {"$ref": "#/$defs/pair"},
        },
        "required": ["kind", "code", "marks", "inner"],
        "additionalProperties": False,
        "$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "minItems": count, "maxItems": count}},
    }
    for count in (1, 2, 3)
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tiny_llama_folder(tmp_path_factory.mktemp("grammars") / "model"), max_model_len=256)


def requests(bench: Bench):
    for i, schema in enumerate(SCHEMAS):
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": " ?"})
        prompt = [(7 * i + 13 * j) % 384 for j in range(20 + i)]
        params = {"n": 2, "seed": i, "temperature": 1.0, "ignore_eos": False, "min_tokens": 100, "logprobs": 1}
        yield bench.request(f"r{i}", prompt, 120, grammar=grammar, **params)


def test_forks_preemption_and_neighbours_change_no_id_and_all_that_ends_is_valid(bench):
    alone = {key: answer for request in requests(bench) for key, answer in bench.new().run(request).items()}
    together = bench.new(num_blocks=18).run(*requests(bench))
    assert bench.scheduler.counters.preemptions > 0
    assert {key: answer.ids for key, answer in together.items()} == {key: a.ids for key, a in alone.items()}
    decoder = Tokenizer.from_str(bench.card.tokenizer_json)
    for (name, _), answer in together.items():
        assert (answer.ending.finish_reason, answer.ending.error) == (FINISH_STOP, None)
        assert len(answer.logprobs) == len(answer.ids)
        jsonschema.validate(json.loads(decoder.decode(answer.ids)), SCHEMAS[int(name[1:])])
    assert len({tuple(answer.ids) for answer in together.values()}) == 2 * len(SCHEMAS)


def test_a_grammar_that_fails_at_run_time_ends_its_request_alone(bench):
    [request, *others] = requests(bench)
    expected = bench.new().run(request)
    broken = bench.request("broken", [5, 6, 7], 9, grammar="start: /(/", n=2)
    answers = bench.new().run(broken, request, *others)
    assert {answers["broken", choice].ending.finish_reason for choice in (0, 1)} == {"error"}
    assert all(answers[key].ids == answer.ids for key, answer in expected.items())
