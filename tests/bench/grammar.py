"""What grammars cost: time per token of a batch that writes JSON by schemas, against the same batch without them."""

import json
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import llguidance

from paceline.cluster.engine.engine import Engine
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto.request import TokenDelta
from tests.cluster.engine.fakes import make_request
from tests.e2e.engine import engine_config

NUM_TOKENS = 64


@dataclass(frozen=True)
class GrammarCost:
    """Medians over the rounds, microseconds per token."""

    plain: float
    grammar: float
    difference: float  # of a round's two halves

    def __str__(self) -> str:
        return f"{self.difference:.0f} µs a token beside {self.plain:.0f} ({self.difference / self.plain:.1%})"


def schemas(count: int) -> list[str]:
    """Grammars of ``count`` different objects that no answer of NUM_TOKENS tokens comes to the end of."""
    note = {"type": "string", "minLength": 8 * NUM_TOKENS}
    grammars = []
    for i in range(count):
        person = {
            "type": "object",
            "properties": {
                f"name{i}": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
                "kind": {"enum": ["small", "large", i]},
                "weight": {"type": "number", "minimum": 0},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
                "note": note,
            },
            "required": [f"name{i}", "kind", "weight", "tags", "note"],
            "additionalProperties": False,
        }
        one_blank = {"whitespace_pattern": " ?"}
        grammars.append(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(person), overrides=one_blank))
    return grammars


def grammar_cost(loaded: Loaded, batch: int = 16, rounds: int = 7) -> GrammarCost:
    """Rounds of both kinds in turn, all of a round's sequences at once. The first round warms up and does not count."""
    grammars = schemas(batch)
    plain, grammar = [], []
    for _ in range(rounds + 1):
        plain.append(_decode(loaded, [""] * batch))
        grammar.append(_decode(loaded, grammars))
    both = zip(plain[1:], grammar[1:], strict=True)
    halves = (plain[1:], grammar[1:], [with_it - without for without, with_it in both])
    return GrammarCost(*(1e6 * statistics.median(values) for values in halves))


def _decode(loaded: Loaded, grammars: list[str]) -> float:
    """Seconds per token, by the median step."""
    batch = len(grammars)
    scheduler = Scheduler(engine_config(loaded, max_num_seqs=batch, max_num_batched_tokens=max(256, 16 * batch)))
    news: list[float] = []

    def publish(deltas: list[TokenDelta]) -> None:
        assert not any(delta.error for delta in deltas), deltas
        news.append(time.perf_counter())
        if not scheduler.has_work:
            engine.stop()

    engine = Engine(scheduler, loaded.executor, publish)
    for i, text in enumerate(grammars):
        request = make_request(f"r{i}", 16, NUM_TOKENS, named=False, ignore_eos=True, temperature=1.0, grammar=text)
        engine.submit(request, lambda error: None)
    engine.run()
    return statistics.median(after - before for before, after in pairwise(news)) / batch
