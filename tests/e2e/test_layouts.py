"""Gangs of several layouts give the ids of one rank, however requests are scheduled. The prover runs all cells."""

import pytest

from tests.e2e.engine import Bench
from tests.e2e.layouts import Cell, compare, prompts_of, reference, uneven_folder

CELLS = (
    Cell(chunk=7, crowd=True, tight=True),
    Cell(chunk=64, warm=True, crowd=True, seeded=True),
    Cell(chunk=7, warm=True, seeded=True),
    Cell(chunk=64, tight=True, crowd=True, seeded=True),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return uneven_folder(tmp_path_factory.mktemp("uneven") / "model")


@pytest.fixture(scope="module")
def expected(model):
    return reference(Bench(model))


@pytest.mark.parametrize(("tp", "pp", "block_size"), [(2, 1, 16), (3, 1, 16), (1, 2, 32), (2, 2, 16)])
def test_ids_do_not_depend_on_the_layout(model, expected, tp, pp, block_size):
    gang = Bench(model, tensor_parallel_size=tp, pipeline_parallel_size=pp, block_size=block_size)
    try:
        difference = max(compare(gang, expected, cell) for cell in CELLS)
    finally:
        gang.close()
    print(f"tp {tp}, pp {pp}: logprobs differ by {difference:.1e} at most")
    assert difference < 1e-4


def test_the_reference_is_what_transformers_generates(model, expected):
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = prompts_of(oracle.config.vocab_size)
    for prompt, choices in zip(prompts, expected.answers[False], strict=True):
        with torch.inference_mode():
            ids = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=len(choices[0].ids), do_sample=False, eos_token_id=None
            )
        assert ids[0, len(prompt) :].tolist() == choices[0].ids
