"""A Llama out of one GGUF file: metadata becomes the spec, ggml's tensor names and row order become Hugging Face's.

The container is gguf_file.py's, the tokenizer gguf_tokenizer.py's. Quantized tensors are dequantized to float32 when
asked for, and only the rows and columns asked for; nothing is computed on quantized weights.
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Checkpoint, checked, samples
from paceline.worker.gguf_file import GGUFFile, GGUFTensor
from paceline.worker.gguf_tokenizer import read_vocabulary
from paceline.worker.models.spec import ModelSpec, RopeScaling

ARCHITECTURES = ("llama",)
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
BUFFERS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?|blk\.\d+\.rope_freqs\.weight")
FOLDED_VALUES = 8192
PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
GENERATION_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class GGUFCheckpoint(Checkpoint):
    """See ``Checkpoint``. Raises ``StartupError`` for what cannot be read or is no plain Llama."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GGUFFile(path)
        meta = self.file.metadata
        if meta.get("split.count", 1) > 1:
            raise StartupError(
                f"{path} is one of {meta['split.count']} parts; merge them with llama-gguf-split --merge and give the "
                "merged file."
            )
        self.spec = checked(_spec(self.file), path)
        self.vocabulary = read_vocabulary(meta, path)
        self.generation_defaults = {name: meta[key] for name, key in GENERATION_KEYS.items() if key in meta}
        self.tensors = {
            canonical_name(name): tensor for name, tensor in self.file.tensors.items() if not BUFFERS.fullmatch(name)
        }
        num_values: Counter[str] = Counter()
        for tensor in self.tensors.values():
            num_values[PLAIN_DTYPES.get(tensor.kind.name, "float32")] += math.prod(tensor.shape)
        self.stored_dtype = num_values.most_common(1)[0][0]

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        raw = self.file.rows(tensor.name)
        order = self._order(name, rows or slice(None))
        if columns is None:
            return _decode(raw[order], tensor.kind).reshape(-1, *tensor.shape[1:])
        # Whole blocks that cover the columns are decoded, and what is too much is cut off.
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        first, last = columns.start // block_len, -(-columns.stop // block_len)
        values = _decode(raw[:, first * block_bytes : last * block_bytes][order], tensor.kind)
        return values[:, columns.start - first * block_len : columns.stop - first * block_len]

    def _order(self, name: str, rows: slice) -> slice | np.ndarray:
        """Which rows of the file are these? Rows are quantized one by one, so they may be picked before decoding."""
        if ".q_proj." in name:
            return halves_order(self.spec.num_heads, self.spec.head_dim)[rows]
        if ".k_proj." in name:
            return halves_order(self.spec.num_kv_heads, self.spec.head_dim)[rows]
        return rows

    def identity(self) -> bytes:
        """The whole header is part of it: config, directory and tokenizer."""
        return b"".join([bytes(self.file.data[: self.file.header_len]), *samples(self.path)])


def canonical_name(name: str) -> str:
    """The Hugging Face name of a ggml tensor; an unknown one keeps its own, for the loader to refuse as surplus."""
    if match := LAYER_NAME.fullmatch(name):
        layer, part, suffix = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}" if part in LAYER_NAMES else name
    stem, _, suffix = name.rpartition(".")
    return f"{TOP_NAMES[stem]}.{suffix}" if stem in TOP_NAMES else name


def halves_order(num_heads: int, head_dim: int) -> np.ndarray:
    """For each row of a Hugging Face q or k projection, the row of ggml's that holds it.

    ggml rotates neighbouring values (0, 1), (2, 3), ..., Hugging Face the two halves of a head: llama.cpp's converter
    interleaves the rows of each head, and this order undoes it.
    """
    pairs = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _decode(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """uint8 [rows, bytes] -> [rows, values per row] in the plain dtype stored, or float32 where quantized."""
    if kind.name in PLAIN_DTYPES:  # a copy: the map is read-only
        return torch.from_numpy(np.array(raw, order="C")).view(getattr(torch, PLAIN_DTYPES[kind.name]))
    # The package works on 16 rows at a time. Blocks know no rows, so short rows are joined until 16 of them fill the
    # cache: measured twice as fast on SmolLM2.
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, row_len = raw.shape[0], raw.shape[1] // block_bytes * block_len
    power = max(FOLDED_VALUES // row_len, 1).bit_length() - 1
    fold = math.gcd(num_rows, 1 << power)
    values = gguf.quants.dequantize(raw.reshape(num_rows // fold, -1), kind)
    return torch.from_numpy(values).reshape(num_rows, row_len)


def _spec(file: GGUFFile) -> ModelSpec:
    architecture = _need(file, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise StartupError(
            f"{file.path} holds architecture '{architecture}' (general.architecture), which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}."
        )
    if file.metadata.get("llama.expert_count", 0):
        raise StartupError(
            f"{file.path} is a mixture of experts (llama.expert_count); only dense models are supported."
        )
    embedding = _tensor(file, "token_embd.weight")
    num_heads = _need_int(file, "llama.attention.head_count")
    hidden_size = _need_int(file, "llama.embedding_length")
    head_dim = file.metadata.get("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.metadata.get(key, head_dim) != head_dim:
            raise StartupError(f"{file.path} has {key} {file.metadata[key]} but heads of {head_dim}; both must agree.")
    return ModelSpec(
        architecture="llama",
        hidden_size=hidden_size,
        intermediate_size=_need_int(file, "llama.feed_forward_length"),
        num_layers=_need_int(file, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_need_int(file, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=_need_int(file, "llama.context_length"),
        norm_eps=float(_need(file, "llama.attention.layer_norm_rms_epsilon")),
        rope_theta=float(file.metadata.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _rope_scaling(file: GGUFFile) -> RopeScaling | None:
    """Llama 3.1's scaling comes as a tensor of divisors, one per frequency, with no trace of its four parameters."""
    meta = file.metadata
    if ROPE_FACTORS in file.tensors:
        factors = _decode(file.rows(ROPE_FACTORS), file.tensors[ROPE_FACTORS].kind).flatten().tolist()
        return RopeScaling(kind="factors", factors=tuple(factors)) if set(factors) != {1.0} else None
    kind = meta.get("llama.rope.scaling.type", "linear" if "llama.rope.scale_linear" in meta else "none")
    factor = float(meta.get("llama.rope.scaling.factor", meta.get("llama.rope.scale_linear", 1.0)))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=_need_int(file, "llama.rope.scaling.original_context_length"),
            beta_fast=float(meta.get("llama.rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(meta.get("llama.rope.scaling.yarn_beta_slow", 1.0)),
            # ggml multiplies YaRN's own factor by attn_factor.
            attention_factor=float(meta.get("llama.rope.scaling.attn_factor", 1.0)) * (0.1 * math.log(factor) + 1.0),
        )
    raise StartupError(
        f"{file.path} asks for rotary scaling '{kind}' (llama.rope.scaling.type), which is not supported; "
        "supported: none, linear, yarn and Llama 3.1's rope_freqs tensor."
    )


def _need(file: GGUFFile, key: str, default: Any = None) -> Any:
    value = file.metadata.get(key, default)
    if value is None:
        raise StartupError(
            f"{file.path} lacks the metadata key {key}; convert the model again with a current llama.cpp."
        )
    return value


def _need_int(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A count, or a list with one count per layer that are all the same."""
    value = _need(file, key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise StartupError(f"{file.path} has layers of different shape ({key}); all layers must be alike.")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{file.path} has {key} {value!r}, which is no count; download or convert the model again.")
    return value


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors:
        raise StartupError(f"{file.path} lacks the tensor {name}; download or convert the model again.")
    return file.tensors[name]
