"""What GGUF files of each architecture hold, in the words of the Hugging Face folder that they were made from.

A file is read as if it were that folder: metadata becomes fields of config.json, which the model's own class reads, and
tensors get the names and the order of rows that they had. Data only; gguf.py does the reading. The facts follow
llama.cpp: what its converters write (conversion/*.py) and what its models take for granted (src/models/*.cpp).
"""

from typing import Any, NamedTuple

from gguf import MODEL_TENSOR as T
from gguf import TENSOR_NAMES, Keys

MODEL, ATTENTION, ROPE = Keys.LLM, Keys.Attention, Keys.Rope

# metadata key -> field of config.json. Those of OPTIONAL may be missing, those of COUNTS are 1 or more.
FIELDS = {
    MODEL.BLOCK_COUNT: "num_hidden_layers",
    MODEL.CONTEXT_LENGTH: "max_position_embeddings",
    MODEL.EMBEDDING_LENGTH: "hidden_size",
    MODEL.FEED_FORWARD_LENGTH: "intermediate_size",
    ATTENTION.HEAD_COUNT: "num_attention_heads",
    ATTENTION.HEAD_COUNT_KV: "num_key_value_heads",
    ATTENTION.KEY_LENGTH: "head_dim",
    ATTENTION.LAYERNORM_RMS_EPS: "rms_norm_eps",
    ROPE.FREQ_BASE: "rope_theta",
}
COUNTS = {
    MODEL.BLOCK_COUNT,
    MODEL.CONTEXT_LENGTH,
    MODEL.EMBEDDING_LENGTH,
    MODEL.FEED_FORWARD_LENGTH,
    ATTENTION.HEAD_COUNT,
    ATTENTION.HEAD_COUNT_KV,
    ATTENTION.KEY_LENGTH,
    ATTENTION.SLIDING_WINDOW,
    ROPE.DIMENSION_COUNT,
    ROPE.SCALING_ORIG_CTX_LEN,
}
OPTIONAL = {
    ATTENTION.HEAD_COUNT_KV,
    ATTENTION.KEY_LENGTH,
    ATTENTION.SCALE,
    ATTENTION.SLIDING_WINDOW,
    MODEL.ATTN_LOGIT_SOFTCAPPING,
    MODEL.EMBEDDING_SCALE,
    MODEL.FINAL_LOGIT_SOFTCAPPING,
    MODEL.RESIDUAL_SCALE,
    MODEL.USE_PARALLEL_RESIDUAL,
    ROPE.FREQ_BASE,
    ROPE.FREQ_BASE_SWA,
    ROPE.SCALING_ORIG_CTX_LEN,
}


def names(layer: str, own: dict[T, str]) -> dict[str, str]:
    """ggml's names to the folder's, without suffix; ``layer`` stands before what belongs to one."""
    return {
        TENSOR_NAMES[tensor]: layer + name if "{bid}" in TENSOR_NAMES[tensor] else name for tensor, name in own.items()
    }


TOP = {T.TOKEN_EMBD: "model.embed_tokens", T.OUTPUT_NORM: "model.norm", T.OUTPUT: "lm_head"}
PARTS = {
    T.ATTN_Q: "self_attn.q_proj",
    T.ATTN_K: "self_attn.k_proj",
    T.ATTN_V: "self_attn.v_proj",
    T.ATTN_OUT: "self_attn.o_proj",
    T.ATTN_Q_NORM: "self_attn.q_norm",
    T.ATTN_K_NORM: "self_attn.k_norm",
    T.FFN_GATE: "mlp.gate_proj",
    T.FFN_UP: "mlp.up_proj",
    T.FFN_DOWN: "mlp.down_proj",
}
BEFORE = {T.ATTN_NORM: "input_layernorm", T.FFN_NORM: "post_attention_layernorm"}
AFTER = {T.ATTN_POST_NORM: "post_attention_layernorm", T.FFN_POST_NORM: "post_feedforward_layernorm"}
BOTH = AFTER | {T.ATTN_NORM: "input_layernorm", T.FFN_NORM: "pre_feedforward_layernorm"}
FUSED = {T.ATTN_QKV: "self_attn.qkv_proj", T.FFN_UP: "mlp.gate_up_proj"}

LAYER = "model.layers.{bid}."
PRE_NORM = names(LAYER, TOP | PARTS | BEFORE)
POST_NORM = names(LAYER, TOP | PARTS | AFTER)
SANDWICHED = names(LAYER, TOP | PARTS | BOTH)
EXAONE = names(
    "transformer.h.{bid}.",
    {
        T.TOKEN_EMBD: "transformer.wte",
        T.OUTPUT_NORM: "transformer.ln_f",
        T.OUTPUT: "lm_head",
        T.ATTN_NORM: "ln_1",
        T.ATTN_Q: "attn.attention.q_proj",
        T.ATTN_K: "attn.attention.k_proj",
        T.ATTN_V: "attn.attention.v_proj",
        T.ATTN_OUT: "attn.attention.out_proj",
        T.FFN_NORM: "ln_2",
        T.FFN_GATE: "mlp.c_fc_0",
        T.FFN_UP: "mlp.c_fc_1",
        T.FFN_DOWN: "mlp.c_proj",
    },
)
GPT2 = names(
    "transformer.h.{bid}.",
    {
        T.TOKEN_EMBD: "transformer.wte",
        T.POS_EMBD: "transformer.wpe",
        T.OUTPUT_NORM: "transformer.ln_f",
        T.OUTPUT: "lm_head",
        T.ATTN_NORM: "ln_1",
        T.ATTN_QKV: "attn.c_attn",
        T.ATTN_OUT: "attn.c_proj",
        T.FFN_NORM: "ln_2",
        T.FFN_UP: "mlp.c_fc",
        T.FFN_DOWN: "mlp.c_proj",
    },
)
NEOX = names(
    "gpt_neox.layers.{bid}.",
    {
        T.TOKEN_EMBD: "gpt_neox.embed_in",
        T.OUTPUT_NORM: "gpt_neox.final_layer_norm",
        T.OUTPUT: "embed_out",
        T.ATTN_NORM: "input_layernorm",
        T.ATTN_QKV: "attention.query_key_value",
        T.ATTN_OUT: "attention.dense",
        T.FFN_NORM: "post_attention_layernorm",
        T.FFN_UP: "mlp.dense_h_to_4h",
        T.FFN_DOWN: "mlp.dense_4h_to_h",
    },
)


class GGUFFamily(NamedTuple):
    """One GGUF architecture.

    ``windows`` says which layers have the window that the file names, where it does not say so itself: of each so many
    layers all but the last, or every layer (0). None: no layer may have one.
    """

    hf: str  # architecture in config.json
    hf_windowed: str | None = None  # the same where the file names a window, if that is another
    fields: dict[str, str] = FIELDS
    implied: dict[str, Any] = {}  # fields that have these values where no key says otherwise
    names: dict[str, str] = PRE_NORM
    windows: int | None = None
    rotated: str | None = None  # field with the share of a head that is rotated; None: the whole head must be
    wide_scale: int | None = None  # so many layers: scores are scaled by hidden size / heads instead of the head size
    norm_offset: float = 0.0  # norms have so much more in the file
    pairs: bool = False  # q and k of a head lie as the neighbours that ggml rotates, not as halves
    qkv_in_turn: bool = False  # in the folder q, k and v alternate head by head, in the file they follow each other
    turned: bool = False  # in the folder a layer's matrices are [in, out]


GELU_TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
WINDOW = {ATTENTION.SLIDING_WINDOW: "sliding_window"}
CAPS = {
    MODEL.ATTN_LOGIT_SOFTCAPPING: "attn_logit_softcapping",
    MODEL.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
}


def renamed(**own: str) -> dict[str, str]:
    """FIELDS where config.json calls some otherwise."""
    return {key: own.get(field, field) for key, field in FIELDS.items()}


def layer_norm(fields: dict[str, str], name: str) -> dict[str, str]:
    """The fields, with the epsilon of LayerNorm for that of RMSNorm."""
    rest = {key: field for key, field in fields.items() if key != ATTENTION.LAYERNORM_RMS_EPS}
    return rest | {ATTENTION.LAYERNORM_EPS: name}


# by general.architecture
FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily(
        hf="LlamaForCausalLM", hf_windowed="MistralForCausalLM", fields=FIELDS | WINDOW, windows=0, pairs=True
    ),
    "qwen2": GGUFFamily(hf="Qwen2ForCausalLM"),
    "qwen3": GGUFFamily(hf="Qwen3ForCausalLM"),
    "gemma": GGUFFamily(hf="GemmaForCausalLM", implied=GELU_TANH, norm_offset=1.0),
    "gemma2": GGUFFamily(
        hf="Gemma2ForCausalLM",
        fields=FIELDS | WINDOW | CAPS,
        implied=GELU_TANH | {"sliding_window": 4096},
        names=SANDWICHED,
        windows=2,
        wide_scale=46,
        norm_offset=1.0,
    ),
    "gemma3": GGUFFamily(
        hf="Gemma3ForCausalLM",
        fields=FIELDS | WINDOW | CAPS | {ROPE.FREQ_BASE_SWA: "rope_local_base_freq"},
        implied=GELU_TANH | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        names=SANDWICHED,
        windows=6,
        wide_scale=62,
        norm_offset=1.0,
    ),
    "phi3": GGUFFamily(
        hf="Phi3ForCausalLM",
        fields=FIELDS | WINDOW | {ROPE.SCALING_ORIG_CTX_LEN: "original_max_position_embeddings"},
        names=PRE_NORM | names(LAYER, FUSED),
        windows=0,
        rotated="partial_rotary_factor",
    ),
    "exaone": GGUFFamily(
        hf="ExaoneForCausalLM",
        fields=renamed(num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon"),
        implied={"activation_function": "silu"},
        names=EXAONE,
    ),
    "exaone4": GGUFFamily(hf="Exaone4ForCausalLM", fields=FIELDS | WINDOW, names=POST_NORM, windows=4),
    "smollm3": GGUFFamily(hf="SmolLM3ForCausalLM", implied={"no_rope_layer_interval": 4}, pairs=True),
    "olmo2": GGUFFamily(
        hf="Olmo2ForCausalLM", hf_windowed="Olmo3ForCausalLM", fields=FIELDS | WINDOW, names=POST_NORM, windows=4
    ),
    "granite": GGUFFamily(
        hf="GraniteForCausalLM",
        fields=FIELDS
        | {
            ATTENTION.SCALE: "attention_multiplier",
            MODEL.EMBEDDING_SCALE: "embedding_multiplier",
            MODEL.RESIDUAL_SCALE: "residual_multiplier",
            MODEL.LOGIT_SCALE: "logits_scaling",
        },
        pairs=True,
    ),
    "cohere2": GGUFFamily(
        hf="Cohere2ForCausalLM",
        fields=layer_norm(FIELDS, "layer_norm_eps") | WINDOW | {MODEL.LOGIT_SCALE: "logit_scale"},
        windows=4,
    ),
    "gpt2": GGUFFamily(
        hf="GPT2LMHeadModel",
        fields=layer_norm(
            renamed(
                num_hidden_layers="n_layer",
                max_position_embeddings="n_positions",
                hidden_size="n_embd",
                intermediate_size="n_inner",
                num_attention_heads="n_head",
            ),
            "layer_norm_epsilon",
        ),
        implied={"activation_function": "gelu_new"},
        names=GPT2,
        turned=True,
    ),
    "gptneox": GGUFFamily(
        hf="GPTNeoXForCausalLM",
        fields=layer_norm(renamed(rope_theta="rotary_emb_base"), "layer_norm_eps")
        | {MODEL.USE_PARALLEL_RESIDUAL: "use_parallel_residual"},
        implied={"hidden_act": "gelu"},
        names=NEOX,
        rotated="rotary_pct",
        qkv_in_turn=True,
    ),
}
