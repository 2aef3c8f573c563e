"""The fallback against transformers, on architectures that have no family here: the same logits in fp32, the same ids,
on two ranks where transformers has a plan; and what it refuses."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.loader import check_tensors, load_weights
from paceline.worker.models import architectures, model_class
from paceline.worker.parallel import Groups, Place
from tests.e2e.engine import Bench
from tests.models import edit_json, tiny_tokenizer, write_json
from tests.worker.crew import gang_config
from tests.worker.drive import Driver, rank_of
from tests.worker.families import SHARED, WINDOW, dense
from tests.worker.oracle import IDS, NUM_PROMPT, check, maker
from tests.worker.test_models_llama import Recorder, ids_of

EXPERTS = {"num_experts_per_tok": 2}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

TINY = {
    # layer norms, biases, a plain MLP, a window on every layer, a tied head
    "starcoder2": dense("Starcoder2", sliding_window=WINDOW, tie_word_embeddings=True),
    # experts that the file has one by one
    "mixtral": dense("Mixtral", num_local_experts=4, **EXPERTS),
    # beside them one that all tokens go through, and a layer without
    "qwen2_moe": dense(
        "Qwen2Moe",
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
        **EXPERTS,
    ),
    # sinks, windows on every other layer, experts stacked in the file
    "gpt_oss": dense(
        "GptOss", num_local_experts=4, head_dim=16, sliding_window=WINDOW, rope_parameters=DEFAULT_ROPE, **EXPERTS
    ),
    # hands none of our arguments on to attention; rotates a part of each head
    "stablelm": dense("StableLm", qk_layernorm=True),
    "nemotron": dense("Nemotron"),
    # single numbers among its weights
    "apertus": dense("Apertus"),
    # gate and up in one product, which its plan does not share
    "glm4": dense("Glm4", head_dim=16),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return maker(TINY, lambda: tmp_path_factory.mktemp("fallback"))


@pytest.mark.parametrize("name", TINY)
def test_prefill_chunks_and_decodes_give_the_oracles_logits(made, name):
    assert TINY[name].architecture not in architectures()
    rank = rank_of(made(name).folder, num_threads=1)
    recorder, driver = Recorder(rank), Driver(rank)
    for chunk in (None, 7):
        check(driver, recorder.take, made(name).logits, chunk)


@pytest.mark.parametrize("name", ["starcoder2", "mixtral", "nemotron", "glm4"])
def test_two_tensor_ranks_give_the_oracles_logits(made, crew, name):
    gang = crew.gang(gang_config(made(name).folder, 2, 1))
    check(Driver(gang), gang.take, made(name).logits, 7)
    whole = sum(weight.nbytes for weight in made(name).model.model.layers.parameters())
    assert gang.layer_bytes[0] < (0.9 if name == "glm4" else 0.6) * whole


@pytest.mark.parametrize("name", ["starcoder2", "qwen2_moe", "gpt_oss"])
def test_ids_are_those_of_generate_in_a_crowd_and_from_the_prefix_cache(made, name):
    bench = Bench(made(name).folder, max_model_len=128, num_kv_blocks=128).new(max_num_batched_tokens=24)
    start = ids_of(48, seed=7)
    prompts = [start[:36] + ids_of(4 + 5 * i, seed=i) for i in range(4)] + [ids_of(3, seed=9)]
    expected = [greedy(made(name).model, prompt) for prompt in prompts]
    for turn in ("cold", "warm"):
        cached = bench.scheduler.counters.cached
        answers = bench.run(*(bench.request(f"{turn}{i}", prompt, 20) for i, prompt in enumerate(prompts)))
        assert [answers[f"{turn}{i}", 0].ids for i in range(len(prompts))] == expected, turn
    assert bench.scheduler.counters.cached > cached


def greedy(model, prompt: list[int], count: int = 20) -> list[int]:
    """transformers' own, past any end."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def test_a_model_knows_its_windows_heads_and_head(made):
    spec = open_checkpoint(made("gpt_oss").folder).spec
    assert spec.architecture == "GptOssForCausalLM"
    assert spec.windows == (WINDOW, 0, WINDOW)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert (spec.hidden_size, spec.vocab_size, spec.max_position, spec.tie_embeddings) == (64, 384, 256, False)
    assert open_checkpoint(made("starcoder2").folder).spec.tie_embeddings


def test_the_line_at_the_start_says_what_it_runs_through(made, caplog):
    caplog.set_level("INFO", logger="paceline.worker")
    rank_of(made("nemotron").folder, num_threads=1)
    [line] = [record.message for record in caplog.records if "fallback" in record.message]
    assert "architecture NemotronForCausalLM through transformers (fallback)" in line


def test_bf16_is_close_to_fp32(made):
    logits = []
    for dtype in ("float32", "bfloat16"):
        rank = rank_of(made("mixtral").folder, num_threads=1, dtype=dtype)
        recorder, driver = Recorder(rank), Driver(rank)
        driver.prefill(driver.admit(0, IDS[:NUM_PROMPT]), NUM_PROMPT, 16)
        logits.append(recorder.take())
    fp32, bf16 = logits
    assert bf16.dtype == torch.float32
    assert (fp32 - bf16).abs().mean() < 0.1 * fp32.std()


# -- refusals ----------------------------------------------------------------------------------------------------------


def config_only(path: Path, architecture: str, **fields) -> Path:
    """A folder with a config, a tokenizer and one tensor: enough for what is refused before weights are looked at."""
    path.mkdir()
    write_json(path / "config.json", {"architectures": [architecture], **SHARED, **fields})
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    save_file({"lm_head.weight": torch.zeros(1)}, path / "model.safetensors")
    return path


UNSERVED = {
    "MambaForCausalLM": ({}, "state"),
    "FalconH1ForCausalLM": ({}, "state"),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention", "conv"]}, "convolution"),
    "BloomForCausalLM": ({}, "attention interface"),
    "BartForCausalLM": ({}, "BartForCausalLM"),
    "T5ForConditionalGeneration": ({}, "no causal language model"),
    "DeepseekV3ForCausalLM": (
        {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        "not shaped like its keys",
    ),
    "ArceeForCausalLM": ({"rope_parameters": DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "WeirdForCausalLM": ({"auto_map": {"AutoModelForCausalLM": "weird.Weird"}}, "code of its own is not run"),
}


@pytest.mark.parametrize("architecture", UNSERVED)
def test_what_cannot_be_served_is_refused_with_its_name_and_the_reason(tmp_path, architecture):
    fields, reason = UNSERVED[architecture]
    with pytest.raises(StartupError) as error:
        open_checkpoint(config_only(tmp_path / "model", architecture, **fields))
    assert architecture in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_extra_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    for name in ("fallback", "fallback_modeling"):
        monkeypatch.delitem(sys.modules, f"paceline.worker.models.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StartupError, match=r"ArceeForCausalLM.*pip install 'paceline\[transformers\]'.*Llama"):
        open_checkpoint(config_only(tmp_path / "model", "ArceeForCausalLM"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("stablelm", "no plan|does not run"), ("gpt_oss", "no plan|does not run"), ("qwen2_moe", "do not divide")],
)
def test_tensor_ranks_are_refused_by_name_where_there_is_no_plan(made, name, reason):
    spec = open_checkpoint(made(name).folder).spec
    tp = 4 if "divide" in reason else 2
    with pytest.raises(StartupError, match=f"--tensor-parallel-size {tp}.*{spec.architecture}.*({reason}).*1 works"):
        model_class(spec)(spec, torch.float32, Groups(Place(tp, 1)))


def test_pipeline_stages_are_refused_by_name(made):
    spec = open_checkpoint(made("nemotron").folder).spec
    with pytest.raises(StartupError, match=r"--pipeline-parallel-size 2 .* NemotronForCausalLM"):
        model_class(spec)(spec, torch.float32, Groups(Place(1, 2)))


def test_layers_that_mix_neighbours_beside_attention_are_found_out(made):
    checkpoint = open_checkpoint(made("nemotron").folder)
    model = model_class(checkpoint.spec)(checkpoint.spec, torch.float32)
    load_weights(model, checkpoint, torch.device("cpu"))
    with torch.inference_mode():
        model.serve_up_to(256)
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + 0.3 * out.roll(1, 1))
        with pytest.raises(StartupError, match=r"NemotronForCausalLM.*mix neighbouring tokens"):
            model.serve_up_to(256)


def spoiled(folder: Path, path: Path, spoil) -> Path:
    """A copy whose tensors went through ``spoil``."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lack tensor model.norm.weight"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}), "hold tensor model.extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), "model.norm.weight is \\[2\\]"),
        (
            lambda tensors: tensors.pop(next(name for name in tensors if "experts.2.w1" in name)),
            "7 of the 8 tensors that make up model.layers.0.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_missing_surplus_and_misshapen_tensors_are_named(made, tmp_path, spoil, said):
    folder = spoiled(made("mixtral").folder, tmp_path / "model", spoil)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(StartupError, match=said):
        check_tensors(model_class(checkpoint.spec)(checkpoint.spec, torch.float32), checkpoint)


def test_quantized_weights_are_refused_before_transformers_is_asked(tmp_path):
    folder = config_only(tmp_path / "model", "ArceeForCausalLM")
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(StartupError, match="mxfp4"):
        open_checkpoint(folder)
