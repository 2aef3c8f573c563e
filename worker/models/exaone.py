"""EXAONE 3.0 and 3.5 (a Llama under other names) and EXAONE 4 (norms behind each half, q and k normalised by heads).

EXAONE 4 may be hybrid: where it has a window at all, layers that see all are not rotated.
"""

from paceline.worker.models.attention import HeadNormedAttention
from paceline.worker.models.config import Config, decoder_spec, layer_windows
from paceline.worker.models.decoder import CausalLM, PostNormLayer
from paceline.worker.models.spec import ModelSpec

# ours -> as the files of 3.0 and 3.5 were published; files that transformers wrote have ours
FIELDS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


class Exaone(CausalLM):
    names = {
        "transformer.wte": "model.embed_tokens",
        "transformer.h": "model.layers",
        "transformer.ln_f": "model.norm",
        "attn.attention.out_proj": "self_attn.o_proj",
        "attn.attention": "self_attn",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc_0": "mlp.gate_proj",
        "mlp.c_fc_1": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        published = {ours: theirs for ours, theirs in FIELDS.items() if config.get(theirs) is not None}
        return decoder_spec(config.called(**published), "exaone")


class Exaone4Layer(PostNormLayer):
    attention_class = HeadNormedAttention


class Exaone4(CausalLM):
    layer_class = Exaone4Layer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.defaults(sliding_window=4096, sliding_window_pattern=4)
        window, num_layers = config.get("sliding_window"), config.need_int("num_hidden_layers")
        windows = layer_windows(
            config, window, lambda layer: (layer + 1) % config.need_int("sliding_window_pattern") != 0
        )
        wide = (layer for layer in range(num_layers) if not windows or not windows[layer])
        return decoder_spec(config, "exaone4", windows=windows, unrotated_layers=tuple(wide) if window else ())
