"""A Hugging Face folder becomes a checkpoint, in old and new spelling; what is wrong is said in one sentence."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.models.spec import RopeScaling
from tests.models import CHAT_TEMPLATE, edit_json, shard_folder, tiny_llama_folder, write_json


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "llama"))


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as error:
        open_checkpoint(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_spec_names_and_tensors_are_those_of_the_folder(pristine):
    checkpoint = open_checkpoint(pristine)
    expected = load_file(pristine / "model.safetensors")
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.get(name), tensor)
    spec = checkpoint.spec
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 128, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.vocab_size, spec.max_position, spec.norm_eps) == (384, 256, 1e-5)
    assert (spec.rope_theta, spec.rope_scaling, spec.tie_embeddings) == (10000.0, None, False)
    assert checkpoint.stored_dtype == "float32"


def test_rows_are_read_without_the_rest(pristine):
    checkpoint = open_checkpoint(pristine)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.get(name, slice(16, 48)), checkpoint.get(name)[16:48])


def test_columns_are_read_without_the_rest(pristine):
    checkpoint = open_checkpoint(pristine)
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(checkpoint.get(name, None, slice(5, 37)), checkpoint.get(name)[:, 5:37])
    assert torch.equal(checkpoint.get(name, slice(16, 48), slice(5, 37)), checkpoint.get(name)[16:48, 5:37])


def test_shards_are_one_checkpoint(pristine, folder):
    shard_folder(folder)
    whole, sharded = open_checkpoint(pristine), open_checkpoint(folder)
    assert set(sharded.names()) == set(whole.names())
    assert all(torch.equal(sharded.get(name), whole.get(name)) for name in whole.names())


def test_half_precision_stays_as_stored(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.stored_dtype == "bfloat16"
    assert checkpoint.get("lm_head.weight").dtype == torch.bfloat16


def test_rotary_buffers_and_a_tied_head_are_no_weights(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.float64)
    save_file(tensors, folder / "model.safetensors")
    names = open_checkpoint(folder).names()
    assert "lm_head.weight" not in names
    assert not any("inv_freq" in name for name in names)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeScaling(kind="linear", factor=2.0, original_max_position=256)),
        ({"rope_type": "dynamic", "factor": 4}, RopeScaling(kind="dynamic", factor=4.0, original_max_position=256)),
        ({"rope_type": "llama3", **LLAMA3}, RopeScaling(kind="llama3", factor=8.0, original_max_position=64)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
            RopeScaling(kind="yarn", factor=4.0, original_max_position=64, beta_fast=16.0),
        ),
        ({"rope_type": "default"}, None),
    ],
)
def test_rotary_scaling_reads_alike_in_both_spellings(folder, rope, expected):
    config = folder / "config.json"
    edit_json(config, rope_parameters=None, rope_theta=500000.0, rope_scaling=rope)
    old = open_checkpoint(folder).spec
    edit_json(config, rope_parameters={"rope_theta": 500000.0, **rope}, rope_theta=None, rope_scaling=None)
    new = open_checkpoint(folder).spec
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (500000.0, expected)


def test_what_transformers_saves_for_llama3_scaling_is_read(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    spec = open_checkpoint(tiny_llama_folder(tmp_path / "llama", rope_parameters=rope)).spec
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_max_position=64)


def test_biases_head_dim_and_missing_kv_heads(folder):
    edit_json(folder / "config.json", attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=None)
    spec = open_checkpoint(folder).spec
    assert (spec.attention_bias, spec.attention_out_bias, spec.mlp_bias) == (True, True, True)
    assert (spec.head_dim, spec.num_kv_heads) == (32, 4)


def test_partial_rotation_is_read(folder):
    edit_json(folder / "config.json", partial_rotary_factor=0.5)
    assert open_checkpoint(folder).spec.rotary_dim == 8


# The vocabulary


def test_the_vocabulary_has_template_tokens_and_ends(pristine):
    vocabulary = open_checkpoint(pristine).vocabulary
    assert vocabulary.chat_template == CHAT_TEMPLATE
    assert vocabulary.template_tokens["bos_token"] == "<|im_start|>"
    assert vocabulary.eos_ids == (2, 0)  # of generation_config.json; the tokenizer's eos, 2, is among them
    assert (vocabulary.bos_id, vocabulary.add_bos) == (1, False)
    assert Tokenizer.from_str(vocabulary.tokenizer_json).encode("<|im_start|>a").ids[0] == 1


def test_ends_come_from_the_config_where_no_generation_config_is(folder):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert open_checkpoint(folder).vocabulary.eos_ids == (7, 2)


def test_a_named_or_separate_chat_template_and_token_objects_are_read(folder):
    settings = folder / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(settings, chat_template=templates, eos_token={"content": "<|endoftext|>", "lstrip": False})
    vocabulary = open_checkpoint(folder).vocabulary
    assert vocabulary.chat_template == "D"
    assert vocabulary.template_tokens["eos_token"] == "<|endoftext|>"
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).vocabulary.chat_template == "J"


def test_tokens_may_stand_in_special_tokens_map(folder):
    edit_json(folder / "tokenizer_config.json", bos_token=None)
    write_json(folder / "special_tokens_map.json", {"bos_token": {"content": "<|im_start|>"}})
    assert open_checkpoint(folder).vocabulary.bos_id == 1


@pytest.mark.parametrize("setting", [None, True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_bos_is_added_as_the_setting_says_or_else_as_the_tokenizer_does(folder, setting, in_file):
    path = folder / "tokenizer.json"
    if in_file:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.post_processor = processors.TemplateProcessing(
            "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.save(str(path))
    edit_json(folder / "tokenizer_config.json", add_bos_token=setting)
    vocabulary = open_checkpoint(folder).vocabulary
    assert vocabulary.add_bos == (in_file if setting is None else setting)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == ([1] if vocabulary.add_bos else []) + plain
    assert set(map(type, vocabulary.template_tokens.values())) == {str}


def test_sampling_defaults_are_those_recommended_for_sampling(folder):
    path = folder / "generation_config.json"
    edit_json(path, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_length=20)
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    assert open_checkpoint(folder).generation_defaults == wanted
    edit_json(path, do_sample=False)
    assert open_checkpoint(folder).generation_defaults == {"repetition_penalty": 1.1}


# What makes it this model


def test_identity_sees_one_changed_weight_and_a_changed_config(pristine, folder):
    assert open_checkpoint(folder).identity() == open_checkpoint(pristine).identity()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(folder).identity() != open_checkpoint(pristine).identity()
    shutil.copy(pristine / "model.safetensors", folder / "model.safetensors")
    assert open_checkpoint(folder).identity() == open_checkpoint(pristine).identity()
    edit_json(folder / "config.json", rms_norm_eps=1e-6)
    assert open_checkpoint(folder).identity() != open_checkpoint(pristine).identity()


# Refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["NobodyForCausalLM"]},
            "NobodyForCausalLM, for which there is no family here",
        ),
        ({"architectures": None}, "architecture nothing, for which there is no family here"),
        ({"hidden_size": None}, "lacks the field hidden_size"),
        ({"num_hidden_layers": None}, "lacks the field num_hidden_layers"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
        ({"hidden_size": "wide"}, "hidden_size 'wide', which is no count"),
        ({"num_attention_heads": 0}, "num_attention_heads 0, which is no count"),
        ({"num_key_value_heads": 3}, "4 heads of 16 values over 3 KV heads"),
        ({"head_dim": 15}, "4 heads of 15 values"),
        ({"hidden_act": "mish"}, "hidden_act 'mish', which is not supported; supported: silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small', which is no number"),
        ({"rope_parameters": {"rope_type": "ntk"}}, r"'ntk' \(rope_parameters\)"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"lacks the field rope_parameters\.short_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"lacks the field rope_parameters\.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "original_max_position_embeddings"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(folder, changes, says):
    edit_json(folder / "config.json", **changes)
    message = refusal(folder)
    assert re.search(says, message), message
    assert "config.json" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_no_json_is_named(folder, name):
    (folder / name).write_text("{")
    assert f"{name} is not valid JSON" in refusal(folder)


def test_a_tokenizer_that_cannot_be_built_is_refused(folder):
    write_json(folder / "tokenizer.json", {"model": {"type": "Unknown"}})
    assert "tokenizer.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_weight_file_is_refused_at_any_cut(folder, keep):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "download it again" in message


def test_a_web_page_saved_as_weights_is_refused(folder):
    (folder / "model.safetensors").write_text("<html>404</html>")
    assert "is not a safetensors file" in refusal(folder)


def test_a_weight_file_without_tensors_is_refused(folder):
    save_file({}, folder / "model.safetensors")
    assert "hold no tensors" in refusal(folder)


def test_other_dtypes_are_refused_by_name(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight" in (message := refusal(folder))
    assert "F8_E4M3" in message


def test_missing_shards_are_counted_and_named(folder):
    shard_folder(folder)[1].unlink()
    message = refusal(folder)
    assert "lacks 1 of the 2 weight files" in message
    assert "model-00002-of-00002.safetensors" in message


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "PyTorch's pickle format" in refusal(folder)


def test_paths_that_hold_no_model_are_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing")
    (tmp_path / "file.txt").write_text("x")
    assert "neither a model folder nor a .gguf file" in refusal(tmp_path / "file.txt")
    (tmp_path / "model.gguf").write_text("x")
    assert "folder of GGUF files" in refusal(tmp_path)
