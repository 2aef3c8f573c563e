"""Tiny random models for tests: made here with transformers, tokenizers and gguf, so that no test downloads one."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello again!",
    "서울은 대한민국의 수도이다. 안녕하세요 안녕",
    "def f(x):\n    return x + 12345  # code\n\n\n",
    "Requests become tokens, tokens become steps, and steps become text; an engine plans what its ranks execute.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Fields of `tiny_llama_folder` for models that are cut into ranks' shares: one into equal ones, one into unequal ones.
EVEN = {"num_hidden_layers": 4}
UNEVEN = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}


def tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """Byte-level BPE in the way of GPT-2: 256 bytes, three special tokens (ids 0, 1, 2) and some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def tiny_llama_folder(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """A random Llama of two layers as a Hugging Face folder (fp32, untied head unless asked). Returns ``path``.

    ``config`` overrides fields of transformers' LlamaConfig: hidden size 64, 4 heads, 2 KV heads, 384 ids, 256
    positions.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds to import: only tests that build a model pay

    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,  # large, so that greedy ids vary and near ties are rare
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    with torch.no_grad():  # initialised to constants, which would hide a mix-up
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.rand_like(weight) + (0.5 if "norm" in name else -0.5))
    return save_folder(model, path)


def save_folder(model: Any, path: Path) -> Path:
    """A transformers model with the tiny tokenizer, as a Hugging Face folder. Returns ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: Any) -> None:
    """Sets fields of a JSON object on disk; a value of None removes its field."""
    value = json.loads(path.read_text()) | changes
    write_json(path, {key: item for key, item in value.items() if item is not None})


def shard_folder(folder: Path) -> list[Path]:
    """Splits model.safetensors into two shards with an index, as large checkpoints come. Returns the shards."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = [names[::2], names[1::2]]
    shards = [folder / f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    for shard, part in zip(shards, parts, strict=True):
        save_file({name: tensors[name] for name in part}, shard)
    weight_map = {name: shard.name for shard, part in zip(shards, parts, strict=True) for name in part}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors").unlink()
    return shards


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from halves (Hugging Face) to neighbouring pairs (ggml), head by head."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_weights(folder: Path) -> dict[str, np.ndarray]:
    """The folder's fp32 weights under ggml's names, q and k permuted."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        weights[gguf_name(name)] = interleave(values, heads[part]) if part in heads else values
    return weights


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    extra: dict[str, Any] | None = None,
    raw: dict[str, tuple[str, np.ndarray]] | None = None,
) -> Path:
    """The tiny folder as a GGUF file whose matrices have ggml type ``kind``; norms and biases stay F32.

    ``extra`` adds or replaces metadata (str, bool, int, float or list); a value of None leaves the key out. ``raw``
    adds or replaces tensors by (type, array), where quantized types are given as bytes, uint8 [rows, row bytes].
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    meta: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "llama.rope.dimension_count": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "llama.vocab_size": config["vocab_size"],
        **bpe_metadata(folder),
        **(extra or {}),
    }
    writer = gguf.GGUFWriter(str(path), arch="llama")
    add_metadata(writer, meta)
    qtype = gguf.GGMLQuantizationType[kind]
    for name, (type_name, values) in (raw or {}).items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[type_name])
    for name, values in gguf_weights(folder).items():
        if name in (raw or {}):
            continue
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    finish_gguf(writer)
    return path


def bpe_metadata(folder: Path) -> dict[str, Any]:
    """The folder's byte-level BPE as ``tokenizer.ggml.*`` keys."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocab[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocab[settings["eos_token"]],
        "tokenizer.chat_template": settings["chat_template"],
    }


def add_metadata(writer: gguf.GGUFWriter, meta: dict[str, Any]) -> None:
    for key, value in meta.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
