"""Hugging Face folders of any family as GGUF files, written as llama.cpp's converters do.

Names of tensors are those that the ``gguf`` package gives them: the reader under test has tables of its own.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.models import add_metadata, bpe_metadata, finish_gguf, interleave

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "ExaoneForCausalLM": "exaone",
    "Exaone4ForCausalLM": "exaone4",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Cohere2ForCausalLM": "cohere2",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
}
LAYER_NORM = ("cohere2", "gpt2", "gptneox")
PAIRED = ("llama", "smollm3", "granite")  # rotated as neighbours
PATTERNED = ("exaone4", "olmo2", "gemma3")  # files say which layers are windowed
NAMES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_family(folder: Path, path: Path, kind: str = "F32", *, part: int = 0, **metadata: Any) -> Path:
    """Matrices get ggml's type ``kind``, the rest stays F32. ``part``: so many tensors a file at most; the first file
    is returned. ``metadata`` sets keys below the architecture's name, "__" standing for a dot; None takes one away."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), arch=arch, split_max_tensors=part)
    num_layers = _shape(writer, config, arch)
    _rotation(writer, config, arch)
    _attention(writer, config, arch)
    add_metadata(writer, bpe_metadata(folder))
    for key, value in metadata.items():
        name = f"{arch}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(name, None)
        add_metadata(writer, {name: value})
    for name, values in _tensors(folder, config, arch, num_layers):
        qtype = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        raw = values if qtype.name == "F32" else gguf.quants.quantize(values, qtype)
        writer.add_tensor(name, raw, raw_dtype=qtype)
    finish_gguf(writer)
    return next(iter(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))) if part else path


def field(config: dict[str, Any], *names: str) -> Any:
    """The first of these fields that there is."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def head_dim(config: dict[str, Any]) -> int:
    width, heads = field(config, "hidden_size", "n_embd"), field(config, "num_attention_heads", "n_head")
    return config.get("head_dim") or width // heads


def _shape(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> int:
    num_layers = field(config, "num_hidden_layers", "num_layers", "n_layer")
    writer.add_block_count(num_layers)
    writer.add_context_length(field(config, "max_position_embeddings", "n_positions"))
    writer.add_embedding_length(field(config, "hidden_size", "n_embd"))
    writer.add_feed_forward_length(field(config, "intermediate_size", "n_inner"))
    writer.add_head_count(field(config, "num_attention_heads", "n_head"))
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch in LAYER_NORM:
        writer.add_layer_norm_eps(field(config, "layer_norm_eps", "layer_norm_epsilon"))
    else:
        writer.add_layer_norm_rms_eps(field(config, "rms_norm_eps", "layer_norm_epsilon"))
    return num_layers


def _rotation(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    if arch == "gpt2":
        return
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or field(config, "rope_theta", "rotary_emb_base")))
    share = rope.get("partial_rotary_factor") or field(config, "partial_rotary_factor", "rotary_pct") or 1.0
    writer.add_rope_dimension_count(int(head_dim(config) * share))
    kind = rope.get("rope_type")
    if arch == "phi3":
        original = field(config, "original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if kind == "longrope":
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _attention(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """Windows, caps and scales."""
    if config.get("sliding_window") and arch not in ("qwen2", "qwen3", "smollm3"):
        writer.add_sliding_window(config["sliding_window"])
        if arch in PATTERNED:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    numbers: dict[str, Callable[[float], None]] = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
    }
    for name, add in numbers.items():
        if config.get(name) is not None:
            add(config[name])
    scalar = config.get("query_pre_attn_scalar")
    if scalar not in (None, head_dim(config)):
        writer.add_attention_scale(scalar**-0.5)  # the published ones need none


def _tensors(folder: Path, config: dict[str, Any], arch: str, num_layers: int):
    """ggml's names and values."""
    names = gguf.get_tensor_name_map(NAMES[arch], num_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attention.bias", ".masked_bias")):  # a mask
            continue
        ggml = names.get_name(name, (".weight", ".bias"))
        assert ggml is not None, name
        values = tensor.float().numpy()
        if arch in PAIRED and ".attn_q." in ggml:
            values = interleave(values, config["num_attention_heads"])
        elif arch in PAIRED and ".attn_k." in ggml:
            values = interleave(values, config["num_key_value_heads"])
        elif arch.startswith("gemma") and ggml.endswith("norm.weight"):
            values = values + 1
        elif arch == "gpt2" and ggml.startswith("blk.") and values.ndim == 2:
            values = values.T.copy()
        elif arch == "gptneox" and ".attn_qkv." in ggml:
            by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape).copy()
        yield ggml, values
