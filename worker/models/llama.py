"""Llama 1 to 3.x and what shares its shape (SmolLM, TinyLlama, Yi, ...), and Mistral, which adds a window."""

from paceline.worker.models.config import Config, decoder_spec, even_windows
from paceline.worker.models.decoder import CausalLM
from paceline.worker.models.spec import ModelSpec


class Llama(CausalLM):
    """Pre-norm RMSNorm, rotary grouped-query attention, gated SiLU MLP; biases and a tied head where the spec says."""

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        return decoder_spec(config, "llama")


class Mistral(Llama):
    """All layers have the same window. Computed as a Llama: the spec says so."""

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.defaults(sliding_window=4096)
        return decoder_spec(config, "llama", windows=even_windows(config, config.get("sliding_window")))
