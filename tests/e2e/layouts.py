"""The same requests to gangs of every layout, in every way that a scheduler may run them: ids as one rank gives them.

One answer per choice is the reference, from one rank that runs each request alone; everything else is compared with it.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.proto.request import Request
from tests.e2e.engine import Answer, Bench
from tests.models import tiny_llama_folder

LAYOUTS = [(tp, pp) for pp in (1, 2) for tp in (1, 2, 3)]
NUM_TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7}


def even_folder(path: Path) -> Path:
    """12 query and 6 KV heads, 4 layers, an MLP of 384: every size divides by 2 and by 3."""
    return tiny_llama_folder(
        path,
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=6,
    )


def uneven_folder(path: Path) -> Path:
    """9 query and 3 KV heads, 5 layers, an MLP of 200, a tied head: nothing divides by 2."""
    return tiny_llama_folder(
        path,
        hidden_size=72,
        intermediate_size=200,
        num_hidden_layers=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        seed=3,
    )


class Cell(NamedTuple):
    """One way to run the requests. ``warm``: the prefix cache holds them already; ``crowd``: eight at once;
    ``tight``: a pool too small for all, so that some are preempted."""

    chunk: int = 64
    warm: bool = False
    crowd: bool = False
    tight: bool = False
    seeded: bool = False

    def __str__(self) -> str:
        words = [f"chunk {self.chunk}", "warm" if self.warm else "cold", "8" if self.crowd else "1"]
        return ", ".join([*words, *(name for name in ("tight", "seeded") if getattr(self, name))])


CELLS = [Cell(*values) for values in itertools.product((7, 64), *[(False, True)] * 4)]


class Reference(NamedTuple):
    prompts: list[list[int]]
    answers: dict[bool, list[dict[int, Answer]]]  # seeded -> for each prompt its choices


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Eight, of 5 to 54 ids."""
    return [[3 + (31 * i + 7 * k + k * k) % (vocab_size - 3) for k in range(5 + 7 * i)] for i in range(8)]


def reference(bench: Bench, num_tokens: int = NUM_TOKENS) -> Reference:
    """Each request alone, on the ranks of ``bench``."""
    prompts = prompts_of(bench.card.vocab_size)
    answers: dict[bool, list[dict[int, Answer]]] = {}
    for seeded in (False, True):
        answers[seeded] = []
        for prompt in prompts:
            bench.new(max_num_batched_tokens=4096, enable_prefix_caching=False)
            got = bench.run(_request(bench, "a", prompt, seeded, num_tokens))
            answers[seeded].append({choice: answer for (_, choice), answer in got.items()})
    return Reference(prompts, answers)


def _request(bench: Bench, name: str, prompt: list[int], seeded: bool, num_tokens: int) -> Request:
    # Three choices: one request alone can then fill a pool, too.
    return bench.request(name, prompt, num_tokens, n=3, logprobs=5, **(SEEDED if seeded else GREEDY))


def compare(bench: Bench, expected: Reference, cell: Cell, num_tokens: int = NUM_TOKENS) -> float:
    """Runs the cell on the ranks of ``bench``. Returns the largest difference of a logprob; raises AssertionError where
    an id differs, or where the cell did not do what it is named for."""
    which = list(range(8)) if cell.crowd else [6]
    block_size = bench.card.block_size
    longest = max(len(expected.prompts[i]) for i in which) + num_tokens
    # Alone: the prompt and most of one choice more. In a crowd: two and a half of the longest.
    num_blocks = int((2.5 if cell.crowd else 1.7) * -(-longest // block_size)) if cell.tight else None
    config = {"num_blocks": num_blocks, "max_model_len": longest} if num_blocks else {}
    bench.new(max_num_batched_tokens=cell.chunk, enable_prefix_caching=cell.warm, **config)
    requests = [_request(bench, str(i), expected.prompts[i], cell.seeded, num_tokens) for i in which]
    if cell.warm:
        bench.run(*requests)
    cached = bench.scheduler.counters.cached
    got = bench.run(*requests)
    difference = 0.0
    for i in which:
        for choice, answer in expected.answers[cell.seeded][i].items():
            ours = got[str(i), choice]
            assert ours.ids == answer.ids, f"{cell}: request {i}, choice {choice}: {ours.ids} is not {answer.ids}"
            difference = max(difference, *_differences(ours, answer))
    assert not cell.warm or cell.tight or bench.scheduler.counters.cached > cached, f"{cell}: nothing was cached"
    assert not cell.tight or bench.scheduler.counters.preemptions, f"{cell}: nobody was preempted"
    return difference


def _differences(ours: Answer, theirs: Answer) -> Iterable[float]:
    assert len(ours.logprobs) == len(theirs.logprobs) == len(theirs.ids)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        yield abs(mine.logprob - other.logprob)
        by_id = dict(zip(other.top_ids, other.top_logprobs, strict=True))
        for token, logprob in zip(mine.top_ids, mine.top_logprobs, strict=True):
            if token in by_id:
                yield abs(logprob - by_id[token])
