"""Greedy ids in fp32 against transformers on the same file, on prompts that were fixed before the first run."""

import pytest

from tests.e2e.conftest import PROMPTS

NUM_TOKENS = 64
NEAR_TIE = 1e-4  # of the oracle's two best logits: there, one id is as right as the other


def test_the_ids_of_eight_prompts_are_those_of_transformers(bench, oracle, capsys):
    prompts = [oracle.encode(text) for text in PROMPTS]
    answers = bench.new().run(*(bench.request(str(i), ids, NUM_TOKENS) for i, ids in enumerate(prompts)))
    ties = []
    for i, prompt in enumerate(prompts):
        ours, (theirs, gaps) = answers[str(i), 0].ids, oracle.greedy(prompt, NUM_TOKENS)
        if ours == theirs:
            continue
        first = next(k for k in range(NUM_TOKENS) if ours[k] != theirs[k])
        ties.append(f"prompt {i} differs at {first}, where the oracle's two best are {gaps[first]:.2e} apart")
        assert gaps[first] < NEAR_TIE, ties[-1]
    with capsys.disabled():
        print(f"\n{len(prompts) - len(ties)} of {len(prompts)} x {NUM_TOKENS} ids equal", *ties, sep="\n")
    assert len(ties) <= 1


@pytest.mark.parametrize("text", PROMPTS)
def test_the_tokenizer_is_that_of_transformers(bench, oracle, text):
    from paceline.router.tokenizer import Tokenizer

    assert Tokenizer(bench.card).encode(text) == oracle.encode(text)
