"""GGUF metadata as the config.json that the file was made from, and its spec: keys by the tables of gguf_families.py.

The family's own class reads the config, so that a file and a folder of one model give one spec. Tensors are looked at
where only they tell: which biases there are, whether the head is tied, Llama 3.1's rotary factors.
"""

import math
from typing import Any

import msgspec
from gguf import Keys

from paceline.proto.errors import StartupError
from paceline.worker.gguf_families import COUNTS, FAMILIES, OPTIONAL
from paceline.worker.gguf_file import GGUFFile, Held, decode
from paceline.worker.hf_files import read_spec
from paceline.worker.models.spec import ModelSpec, RopeScaling


class Metadata:
    """Keys by the names of the ``gguf`` package, which stand for any architecture, and all tensors of all parts."""

    def __init__(self, files: list[GGUFFile]):
        self.path, self.values = files[0].path, files[0].metadata
        self.tensors = {name: Held(file, tensor) for file in files for name, tensor in file.tensors.items()}
        self.architecture: str = self.need(Keys.General.ARCHITECTURE)
        if not isinstance(self.architecture, str) or self.architecture not in FAMILIES:
            raise StartupError(
                f"{self.path} holds architecture '{self.architecture}' ({Keys.General.ARCHITECTURE}), which is not "
                f"supported; supported: {', '.join(FAMILIES)}."
            )
        self.family = FAMILIES[self.architecture]

    def name(self, key: str) -> str:
        return key.format(arch=self.architecture) if "{arch}" in key else key

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(self.name(key), default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise StartupError(
                f"{self.path} lacks the metadata key {self.name(key)}; convert the model again with a current "
                "llama.cpp."
            )
        return value

    def number(self, key: str) -> int | float:
        """Also of a list with one number for each layer that are all the same."""
        value = self.need(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise StartupError(
                    f"{self.path} has layers of different shape ({self.name(key)}); all layers must be alike."
                )
            value = value[0]
        if not isinstance(value, int | float) or (key in COUNTS and not (isinstance(value, int) and value >= 1)):
            noun = "count" if key in COUNTS else "number"
            raise StartupError(
                f"{self.path} has {self.name(key)} {value!r}, which is no {noun}; download or convert the model again."
            )
        return value

    def tensor(self, name: str) -> Held:
        if name not in self.tensors:
            raise StartupError(f"{self.path} lacks the tensor {name}; download or convert the model again.")
        return self.tensors[name]

    def floats(self, name: str) -> list[float]:
        file, tensor = self.tensor(name)
        return decode(file.rows(name), tensor.kind).flatten().tolist()


def make_spec(meta: Metadata) -> ModelSpec:
    """What the config tells, corrected by what the file shows: which biases there are, Llama 3.1's rotary factors (a
    tensor of divisors with no trace of its four parameters), a scale of its own."""
    if meta.get(Keys.LLM.EXPERT_COUNT):
        raise StartupError(
            f"{meta.path} is a mixture of experts ({meta.name(Keys.LLM.EXPERT_COUNT)}); only dense models are "
            "supported."
        )
    if meta.get(Keys.Rope.SCALING_FINETUNED) is False and meta.architecture == "granite":  # its way to say: no rotation
        raise StartupError(
            f"{meta.path} is a Granite without rotation ({meta.name(Keys.Rope.SCALING_FINETUNED)} false), which is not "
            "supported."
        )
    spec = read_spec(_config(meta), meta.path)
    changes: dict[str, Any] = {
        "attention_bias": bool(meta.tensors.keys() & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        "attention_out_bias": "blk.0.attn_output.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.tensors,
    }
    if "rope_freqs.weight" in meta.tensors:
        factors = tuple(meta.floats("rope_freqs.weight"))
        changes["rope_scaling"] = RopeScaling(kind="factors", factors=factors) if set(factors) != {1.0} else None
    if Keys.Attention.SCALE not in meta.family.fields and meta.get(Keys.Attention.SCALE):
        changes["attention_scale"] = meta.number(Keys.Attention.SCALE)
    return msgspec.structs.replace(spec, **changes)


def _config(meta: Metadata) -> dict[str, Any]:
    """The config.json that the file was made from, as far as it matters."""
    family = meta.family
    config = dict(family.implied)
    for key, field in family.fields.items():
        if key == Keys.Attention.SLIDING_WINDOW:  # 0 stands for none
            continue
        if meta.get(key) is not None or key not in OPTIONAL:
            config[field] = meta.number(key)
    at = family.fields
    num_layers, hidden_size = config[at[Keys.LLM.BLOCK_COUNT]], config[at[Keys.LLM.EMBEDDING_LENGTH]]
    num_heads = config[at[Keys.Attention.HEAD_COUNT]]
    head_dim = config.get("head_dim", hidden_size // num_heads)
    config |= {
        "head_dim": head_dim,
        "vocab_size": meta.tensor("token_embd.weight").tensor.shape[0],
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.tensors,
    }
    if family.wide_scale:
        config["query_pre_attn_scalar"] = hidden_size // num_heads if num_layers == family.wide_scale else head_dim
    windows = _windows(meta, num_layers)
    config |= _rotation(meta, head_dim) | windows
    config["architectures"] = [(windows.get("sliding_window") and family.hf_windowed) or family.hf]
    return config


def _windows(meta: Metadata, num_layers: int) -> dict[str, Any]:
    """A pattern is a list, or a number of which all layers but each last one have the window."""
    key = Keys.Attention.SLIDING_WINDOW
    if not meta.get(key, meta.family.implied.get("sliding_window")):
        return {"sliding_window": None}
    window = meta.family.implied["sliding_window"] if meta.get(key) is None else meta.number(key)
    if meta.family.windows is None:
        raise StartupError(
            f"{meta.path} asks for windowed attention ({meta.name(key)} {window}), which architecture "
            f"{meta.architecture} is not known to have; convert the model again with a current llama.cpp."
        )
    pattern = meta.get(Keys.Attention.SLIDING_WINDOW_PATTERN, meta.family.windows)
    if isinstance(pattern, int):
        pattern = [not pattern or i % pattern < pattern - 1 for i in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise StartupError(
            f"{meta.path} does not say of each of its {num_layers} layers whether it has a window "
            f"({meta.name(Keys.Attention.SLIDING_WINDOW_PATTERN)}); convert the model again with a current llama.cpp."
        )
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _rotation(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """How much of a head is rotated, and how frequencies are stretched."""
    keys = (Keys.Rope.DIMENSION_COUNT, Keys.Attention.VALUE_LENGTH)
    sizes = {key: head_dim if meta.get(key) is None else meta.number(key) for key in keys}
    config: dict[str, Any] = {}
    if meta.family.rotated is not None:
        rotated = sizes.pop(Keys.Rope.DIMENSION_COUNT)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise StartupError(
                f"{meta.path} has {meta.name(Keys.Rope.DIMENSION_COUNT)} {rotated}, which is no even part of heads of "
                f"{head_dim}; convert the model again."
            )
        config[meta.family.rotated] = rotated / head_dim
    for key, size in sizes.items():
        if size != head_dim:
            raise StartupError(f"{meta.path} has {meta.name(key)} {size} but heads of {head_dim}; both must agree.")
    if scaling := _scaling(meta):
        config["rope_scaling"] = scaling
    return config


def _scaling(meta: Metadata) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    rope = Keys.Rope
    if "rope_factors_long.weight" in meta.tensors:
        factors = {name: meta.floats(f"rope_factors_{name}.weight") for name in ("long", "short")}
        config = {"rope_type": "longrope", "long_factor": factors["long"], "short_factor": factors["short"]}
        return config | ({"attention_factor": value} if (value := meta.get(rope.SCALING_ATTN_FACTOR)) else {})
    old_factor = meta.get("{arch}.rope.scale_linear")
    kind = meta.get(rope.SCALING_TYPE, "linear" if old_factor else "none")
    factor = float(meta.get(rope.SCALING_FACTOR, old_factor or 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": meta.number(rope.SCALING_ORIG_CTX_LEN),
            "beta_fast": float(meta.get(rope.SCALING_YARN_BETA_FAST, 32.0)),
            "beta_slow": float(meta.get(rope.SCALING_YARN_BETA_SLOW, 1.0)),
            # ggml multiplies YaRN's own factor by attn_factor.
            "attention_factor": float(meta.get(rope.SCALING_ATTN_FACTOR, 1.0)) * (0.1 * math.log(factor) + 1.0),
        }
    raise StartupError(
        f"{meta.path} asks for rotary scaling '{kind}' ({meta.name(rope.SCALING_TYPE)}), which is not supported; "
        "supported: none, linear, yarn, and the tensors rope_freqs and rope_factors."
    )
