"""Tiny random models of every family, made with transformers, which is also what they are compared with.

A family has a row or more in `FAMILIES`; what it has that others have not, its row switches on.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import edit_json, save_folder

WINDOW = 20  # tokens; no multiple of a block
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large, so that logits differ
}


@dataclass(frozen=True)
class Tiny:
    """``architecture`` and ``config`` are transformers' classes, ``fields`` are the config's, over `SHARED`. ``oracle``
    is the class that computes it where transformers has none of the architecture's name.

    ``wrap`` makes the config's arguments of the fields where they are not the same; ``finish`` edits the folder.
    """

    architecture: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = dict
    finish: Callable[[Path], None] | None = None
    oracle: str | None = None

    def make(self, path: Path, seed: int = 0, **fields: Any) -> Any:
        """Saves one as a Hugging Face folder with a tokenizer, and returns transformers' model of it."""
        import transformers  # seconds to import: only tests that build a model pay

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.wrap(SHARED | self.fields | fields))
        oracle = getattr(transformers, self.oracle or self.architecture)
        model = oracle._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():  # initialised to constants, which would hide a mix-up
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight += torch.rand_like(weight) - 0.5
        save_folder(model, path)
        if self.finish is not None:
            self.finish(path)
        return model


def dense(name: str, **fields: Any) -> Tiny:
    return Tiny(f"{name}ForCausalLM", f"{name}Config", fields)


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LONGROPE = {  # 12 of 16 entries of a head are rotated
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
GEMMA3_LAYERS = {"num_hidden_layers": 5, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
GEMMA3_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
}


def rename_tensors(path: Path, *names: tuple[str, str], **more: torch.Tensor) -> None:
    """Patterns and what to put for them, in turn, in the names of a folder's tensors; ``more`` tensors beside them."""
    file = path / "model.safetensors"
    tensors = {}
    for name, values in load_file(file).items():
        for pattern, new in names:
            name = re.sub(pattern, new, name)
        tensors[name] = values
    save_file(tensors | more, file, {"format": "pt"})


def as_exaone(path: Path) -> None:
    """A Llama as EXAONE 3.5 was published."""
    rename_tensors(
        path,
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"gate_proj", "c_fc_0"),
        (r"up_proj", "c_fc_1"),
        (r"down_proj", "c_proj"),
    )
    edit_json(
        path / "config.json",
        architectures=["ExaoneForCausalLM"],
        model_type="exaone",
        num_layers=3,
        num_hidden_layers=None,
        layer_norm_epsilon=1e-6,  # LlamaConfig's
        rms_norm_eps=None,
        activation_function="silu",
        hidden_act=None,
        rope_parameters=None,
        rope_theta=10000.0,
    )


def gpt2_fields(fields: dict[str, Any]) -> dict[str, Any]:
    theirs = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    theirs |= {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    return {theirs.get(name, name): value for name, value in fields.items() if name != "num_key_value_heads"}


def as_first_gpt2(path: Path) -> None:
    """Without the leading name, and with a layer's mask among the weights."""
    rename_tensors(path, (r"^transformer\.", ""), **{"h.0.attn.bias": torch.ones(1, 1, 256, 256).tril()})


def as_pythia(path: Path) -> None:
    """Older names of fields and tensors, and a layer's masks among the weights."""
    masks = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 256, 256, dtype=torch.bool).tril(),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    }
    rename_tensors(path, (r"^lm_head", "embed_out"), **masks)
    edit_json(path / "config.json", rope_parameters=None, rotary_pct=0.25, rotary_emb_base=10000)


HYBRID = {"num_hidden_layers": 4, "sliding_window": WINDOW}  # with three layers of four windowed
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0}

FAMILIES = {
    "llama": dense("Llama"),
    "mistral": dense("Mistral", sliding_window=WINDOW),
    "mistral, no window": dense("Mistral", sliding_window=None),
    "qwen2": dense("Qwen2"),
    "qwen2, windows from the second layer on": dense(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": dense("Qwen3", head_dim=32),
    "gemma": dense("Gemma", **GEMMA),
    "gemma2": dense(
        "Gemma2",
        **GEMMA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,  # low, so that it changes scores
        final_logit_softcapping=4.0,
    ),
    "gemma3": Tiny(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GEMMA, **GEMMA3_LAYERS, "layer_types": GEMMA3_TYPES, "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma3, multimodal": Tiny(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {**GEMMA, **GEMMA3_LAYERS, "layer_types": GEMMA3_TYPES, "rope_parameters": GEMMA3_ROPE},
        wrap=lambda fields: {"text_config": fields, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "phi3": dense("Phi3", sliding_window=WINDOW),
    "phi3, longrope": dense("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "exaone": Tiny("ExaoneForCausalLM", "LlamaConfig", finish=as_exaone, oracle="LlamaForCausalLM"),
    "exaone4": dense("Exaone4", **HYBRID),
    "exaone4, all see all": dense("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "smollm3": dense("SmolLM3", num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3, windows": dense(
        "SmolLM3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW, attention_bias=True
    ),
    "olmo2": dense("Olmo2"),
    "olmo3": dense("Olmo3", **HYBRID, rope_parameters=OLMO3_ROPE),
    "cohere2": dense("Cohere2", **HYBRID, logit_scale=0.5, tie_word_embeddings=True),
    "cohere2, biases": dense("Cohere2", **HYBRID, attention_bias=True),
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", wrap=gpt2_fields),
    "gpt2, as first published": Tiny(
        "GPT2LMHeadModel", "GPT2Config", {"tie_word_embeddings": True}, wrap=gpt2_fields, finish=as_first_gpt2
    ),
    "neox": dense("GPTNeoX"),
    "neox, one half after the other": Tiny(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {"use_parallel_residual": False}, finish=as_pythia
    ),
    "granite": dense("Granite", **GRANITE, attention_bias=True, mlp_bias=True),
}
