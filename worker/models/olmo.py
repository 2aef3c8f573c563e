"""OLMo 2 (norms behind each half; the whole q and the whole k projection normalised) and OLMo 3, which adds windows, by
default on three layers of four. Those know nothing of a stretched rotation."""

import msgspec

from paceline.worker.models.attention import ProjectionNormedAttention
from paceline.worker.models.config import Config, decoder_spec, layer_windows
from paceline.worker.models.decoder import CausalLM, PostNormLayer
from paceline.worker.models.spec import ModelSpec


class Olmo2Layer(PostNormLayer):
    attention_class = ProjectionNormedAttention


class Olmo2(CausalLM):
    layer_class = Olmo2Layer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        return decoder_spec(config, "olmo2")


class Olmo3(Olmo2):
    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        window = config.defaults(sliding_window=4096).get("sliding_window")
        windows = layer_windows(config, window, lambda layer: (layer + 1) % 4 != 0)
        spec = decoder_spec(config, "olmo3", windows=windows)
        # Older files have one rotation for all layers, and mean its base alone where there is a window.
        return msgspec.structs.replace(spec, local_rope_theta=spec.local_rope_theta or spec.rope_theta)
