"""Cohere 2 (Command R7B, Command A): both halves of a layer read one LayerNorm without bias, three layers of four
have a window, and only those are rotated. Files hold the heads of q and k as the neighbours that GPT-J rotates."""

from paceline.worker.layers.norm import BiaslessLayerNorm
from paceline.worker.models.config import Config, decoder_spec, layer_windows
from paceline.worker.models.decoder import CausalLM, ParallelLayer
from paceline.worker.models.spec import ModelSpec
from paceline.worker.tensor_view import TensorView, halves_order

MISSING = {  # what files mean that leave a field out
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
}


class Cohere2Layer(ParallelLayer):
    norm_class = BiaslessLayerNorm


class Cohere2(CausalLM):
    layer_class = Cohere2Layer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config.only("use_qk_norm", False)
        config = config.called(rms_norm_eps="layer_norm_eps").defaults(**MISSING)
        window, num_layers = config.get("sliding_window"), config.need_int("num_hidden_layers")
        windows = layer_windows(
            config, window, lambda layer: (layer + 1) % config.need_int("sliding_window_pattern") != 0
        )
        return decoder_spec(
            config,
            "cohere2",
            windows=windows,
            unrotated_layers=tuple(layer for layer in range(num_layers) if not windows or not windows[layer]),
            logit_scale=config.need_float("logit_scale"),
        )

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        num_heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
        part = name.rpartition(".")[0].rpartition(".")[2]
        if part in num_heads:
            order = halves_order(num_heads[part], spec.head_dim)
            return {name: TensorView(order, whole=len(order))}
        return super().tensors_of(spec, name)
