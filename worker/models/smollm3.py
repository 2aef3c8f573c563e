"""SmolLM 3: a Llama of which some layers, mostly each fourth, are not rotated (NoPE: Yang et al., 2025,
arXiv:2501.18795)."""

from paceline.worker.models.config import Config, decoder_spec, layer_windows
from paceline.worker.models.decoder import CausalLM
from paceline.worker.models.spec import ModelSpec


class SmolLM3(CausalLM):
    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.defaults(tie_word_embeddings=True, no_rope_layer_interval=4)
        num_layers, interval = config.need_int("num_hidden_layers"), config.need_int("no_rope_layer_interval")
        # In spite of the name, 1 stands for a layer that is rotated.
        rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if len(rotated) < num_layers:
            config.refuse("no_rope_layers", [f"a list of {num_layers}"])
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        return decoder_spec(
            config,
            "smollm3",
            unrotated_layers=tuple(layer for layer in range(num_layers) if not rotated[layer]),
            windows=layer_windows(config, window, lambda layer: not rotated[layer]),
        )
