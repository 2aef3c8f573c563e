"""Qwen 2 and 2.5 (biases of q, k and v) and Qwen 3 (q and k normalised head by head)."""

from paceline.worker.models.attention import HeadNormedAttention
from paceline.worker.models.config import Config, decoder_spec, layer_windows
from paceline.worker.models.decoder import CausalLM, DecoderLayer
from paceline.worker.models.spec import ModelSpec


class Qwen2(CausalLM):
    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        windows = windows_of(config)
        return decoder_spec(config, "qwen2", attention_bias=True, attention_out_bias=False, windows=windows)


class Qwen3Layer(DecoderLayer):
    attention_class = HeadNormedAttention


class Qwen3(CausalLM):
    layer_class = Qwen3Layer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        return decoder_spec(config.defaults(head_dim=128), "qwen3", windows=windows_of(config))


def windows_of(config: Config) -> tuple[int, ...]:
    """The first max_window_layers see all, where use_sliding_window is on at all."""
    config = config.defaults(sliding_window=4096, max_window_layers=28)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return layer_windows(config, window, lambda layer: layer >= config.need("max_window_layers"))
