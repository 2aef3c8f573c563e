"""Gemma 1, 2 and 3 (text; of the multimodal files the language model).

All: embeddings scaled by the root of their size, norms whose weights are stored less one, tanh GELU. Gemma 2 adds norms
behind each half, soft caps and windows on every other layer; Gemma 3 has normalised q and k instead of soft caps, five
windowed layers to one that sees all, and a rotary base of their own for those.
"""

from typing import Any

from paceline.worker.layers.norm import OffsetRMSNorm
from paceline.worker.models.attention import HeadNormedAttention
from paceline.worker.models.config import Config, decoder_spec, layer_windows, read_activation
from paceline.worker.models.decoder import CausalLM, DecoderLayer, SandwichLayer
from paceline.worker.models.spec import ModelSpec
from paceline.worker.tensor_view import TensorView

VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class GemmaLayer(DecoderLayer):
    norm_class = OffsetRMSNorm


class Gemma(CausalLM):
    layer_class = GemmaLayer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        # The first files say gelu and mean the tanh kind.
        meant = {} if config.get("hidden_act", "gelu") != "gelu" else {"activation": "gelu_pytorch_tanh"}
        return gemma_spec(config, "gemma", **meant)


class Gemma2Layer(SandwichLayer):
    norm_class = OffsetRMSNorm


class Gemma2(CausalLM):
    layer_class = Gemma2Layer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.defaults(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        return windowed_spec(config, "gemma2", 2)


class Gemma3Attention(HeadNormedAttention):
    norm_class = OffsetRMSNorm


class Gemma3Layer(Gemma2Layer):
    attention_class = Gemma3Attention


class Gemma3(CausalLM):
    layer_class = Gemma3Layer
    # of the multimodal files, older and newer
    names = {"language_model.model": "model", "model.language_model": "model", "language_model.lm_head": "lm_head"}

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        if config.architecture == "Gemma3ForConditionalGeneration":
            config = config.inner("text_config")
        # Multimodal files leave out what is the same in all sizes.
        config = config.defaults(
            vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=131072
        )
        old = config.defaults(rope_theta=1e6, rope_local_base_freq=1e4)
        by_kind = config.inner("rope_parameters").get("sliding_attention")
        thetas = {} if by_kind else {"local_rope_theta": old.need_float("rope_local_base_freq")}
        return windowed_spec(old, "gemma3", config.get("sliding_window_pattern", 6), **thetas)

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        return {} if name.startswith(VISION) else super().tensors_of(spec, name)


def windowed_spec(config: Config, architecture: str, pattern: int, **differences: Any) -> ModelSpec:
    """Every ``pattern``-th layer sees all, the others the window."""
    config = config.defaults(sliding_window=4096, query_pre_attn_scalar=256)
    return gemma_spec(
        config.called(hidden_act="hidden_activation"),
        architecture,
        attention_scale=config.need_float("query_pre_attn_scalar") ** -0.5,
        attention_softcap=float(config.get("attn_logit_softcapping", 0.0)),
        logit_softcap=float(config.get("final_logit_softcapping", 0.0)),
        windows=layer_windows(config, config.get("sliding_window"), lambda layer: (layer + 1) % pattern != 0),
        **differences,
    )


def gemma_spec(config: Config, architecture: str, **differences: Any) -> ModelSpec:
    config.only("use_bidirectional_attention", False)
    config = config.defaults(tie_word_embeddings=True, head_dim=256, rms_norm_eps=1e-6)
    fields = {"activation": read_activation(config, "hidden_act", "gelu_pytorch_tanh"), **differences}
    return decoder_spec(config, architecture, embedding_scale=config.need_int("hidden_size") ** 0.5, **fields)
