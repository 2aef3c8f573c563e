"""Phi-3, 3.5 and 4 (Phi3ForCausalLM): a Llama whose files hold q, k and v, and gate and up, as one tensor each; with
partial rotation, two rows of rotary factors and a window where the config says so."""

from paceline.worker.models.config import Config, decoder_spec, even_windows
from paceline.worker.models.decoder import CausalLM
from paceline.worker.models.spec import ModelSpec
from paceline.worker.tensor_view import TensorView, stacked


class Phi3(CausalLM):
    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config.only("attention_bias", False)
        return decoder_spec(config, "phi3", windows=even_windows(config, config.get("sliding_window")))

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        q, kv, mlp = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
        for fused, sizes in (("qkv_proj", (q, kv, kv)), ("gate_up_proj", (mlp, mlp))):
            stem, found, rest = name.rpartition(f"{fused}.")
            if found:
                parts = zip(cls.packed[fused], stacked(*sizes), strict=True)
                return {f"{stem}{part}.{rest}": TensorView(rows, whole=sum(sizes)) for part, rows in parts}
        return super().tensors_of(spec, name)
