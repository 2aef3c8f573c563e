"""Llama against transformers: the same logits in fp32, however the prompt is cut and wherever its blocks lie."""

import pytest
import torch

from paceline.proto.step import TAKE_SAMPLE
from paceline.worker.rank import Rank
from tests.models import tiny_llama_folder
from tests.worker.drive import Driver, Row, rank_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
SHAPES = {
    "grouped 4/2": {},
    "grouped 9/3": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    "one for each 4/4": {"num_key_value_heads": 4},
    "one for all 8/1": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn mscale": {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}},
    "yarn factor": {"rope_parameters": YARN | {"attention_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0}},
}
NUM_PROMPT, NUM_DECODES = 45, 20


def ids_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


class Recorder:
    """Keeps the logits that a rank's model makes, and turns back to the model for everything else."""

    def __init__(self, rank: Rank):
        self.rows: list[torch.Tensor] = []
        model = rank.runner.model
        compute = model.logits

        def logits(hidden):
            self.rows.append(compute(hidden))
            return self.rows[-1]

        model.logits = logits

    def take(self) -> torch.Tensor:
        rows, self.rows = torch.cat(self.rows), []
        return rows


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-4 * max(1.0, theirs.abs().max().item() / 10))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_chunks_and_decodes_give_the_oracles_logits(tmp_path, shape):
    folder = tiny_llama_folder(tmp_path / "model", **SHAPES[shape])
    ids = ids_of(NUM_PROMPT + NUM_DECODES)
    with torch.no_grad():
        theirs = oracle(folder)(torch.tensor([ids])).logits[0, NUM_PROMPT - 1 :]
    rank = rank_of(folder)
    recorder, driver = Recorder(rank), Driver(rank)
    for chunk in (None, 7):
        slot = driver.admit(3, ids[:NUM_PROMPT])
        driver.prefill(slot, NUM_PROMPT, chunk)
        for position in range(NUM_PROMPT, len(ids)):
            driver.step(Row(slot, position, 1, token=ids[position]))
        ours = recorder.take()
        assert ours.shape == theirs.shape
        assert close(ours, theirs), f"chunk {chunk}: differs by {(ours - theirs).abs().max():.2e}"
        driver.release(slot)


def test_dynamic_scaling_follows_generation_past_the_trained_length(tmp_path):
    dynamic = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    folder = tiny_llama_folder(tmp_path / "model", rope_parameters=dynamic, max_position_embeddings=48)
    ids = ids_of(NUM_PROMPT + NUM_DECODES)
    model, theirs, past = oracle(folder), [], None
    with torch.no_grad():
        for piece in (ids[:NUM_PROMPT], *([i] for i in ids[NUM_PROMPT:])):
            out = model(torch.tensor([piece]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            theirs.append(out.logits[0, -1:])
    rank = rank_of(folder, max_model_len=128)
    recorder, driver = Recorder(rank), Driver(rank)
    slot = driver.admit(0, ids[:NUM_PROMPT])
    driver.prefill(slot, NUM_PROMPT)
    for position in range(NUM_PROMPT, len(ids)):
        driver.step(Row(slot, position, 1, token=ids[position]))
    assert close(recorder.take(), torch.cat(theirs))
    # And chunks that cross the trained length agree with single steps.
    slot = driver.admit(1, ids)
    driver.prefill(slot, len(ids), 17)
    assert close(recorder.take(), theirs[-1])


def test_bf16_is_close_to_fp32(tmp_path):
    folder = tiny_llama_folder(tmp_path / "model", attention_bias=True)
    ids = ids_of(NUM_PROMPT)
    logits = []
    for dtype in ("float32", "bfloat16"):
        rank = rank_of(folder, dtype=dtype)
        recorder, driver = Recorder(rank), Driver(rank)
        slot = driver.admit(0, ids)
        driver.prefill(slot, NUM_PROMPT - 5, 16)
        for position in range(NUM_PROMPT - 5, NUM_PROMPT):
            driver.step(Row(slot, position, 1, take=TAKE_SAMPLE))
        logits.append(recorder.take().float())
    fp32, bf16 = logits
    assert (fp32 - bf16).abs().mean() < 0.05 * fp32.std()
    assert (fp32.log_softmax(-1).exp() * (fp32.log_softmax(-1) - bf16.log_softmax(-1))).sum(-1).max() < 0.1
