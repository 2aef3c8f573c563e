"""GPT-2: learned positions instead of rotation, LayerNorm, a plain MLP, biases everywhere. Files hold matrices as [in,
out], and q, k and v as one; the first published ones leave out the leading "transformer."."""

import torch

from paceline.proto.errors import StartupError
from paceline.worker.layers.embedding import Embedding
from paceline.worker.layers.norm import LayerNorm
from paceline.worker.models.config import Config, decoder_spec, read_activation
from paceline.worker.models.decoder import CausalLM, DecoderLayer
from paceline.worker.models.mlp import PlainMLP
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Part
from paceline.worker.tensor_view import TensorView, stacked

FIELDS = {  # ours -> GPT-2's
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
TURNED = ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")  # what the files have as [in, out], beside q, k and v


class GPT2Layer(DecoderLayer):
    norm_class = LayerNorm
    mlp_class = PlainMLP


class GPT2(CausalLM):
    layer_class = GPT2Layer
    names = {
        "wte": "model.embed_tokens",
        "wpe": "embed_positions",
        "ln_f": "model.norm",
        "h": "model.layers",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    ignorable = r"(.*\.)?attn\.(bias|masked_bias)"  # masks

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, groups: Groups | None = None):
        super().__init__(spec, dtype, groups)
        if self.place.is_first_stage:
            factory = {"device": torch.device("meta"), "dtype": dtype}
            positions = Part.all(spec.max_position)
            self.embed_positions = Embedding(positions, spec.hidden_size, groups or Groups(), **factory)

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.called(**FIELDS).defaults(tie_word_embeddings=True, layer_norm_epsilon=1e-5)
        config.only("scale_attn_by_inverse_layer_idx", False)
        config.only("add_cross_attention", False)
        return decoder_spec(
            config,
            "gpt2",
            num_kv_heads=config.need_int("num_attention_heads"),
            intermediate_size=config.get("n_inner", 4 * config.need_int("hidden_size")),
            activation=read_activation(config, default="gelu_new"),
            attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
            attention_bias=True,
            mlp_bias=True,
            unrotated_layers=tuple(range(config.need_int("num_hidden_layers"))),
        )

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        held = super().tensors_of(spec, name.removeprefix("transformer."))
        ours = next(iter(held), "")
        stem = ours.rpartition(".")[0]
        if stem.endswith("qkv_proj"):
            parts, size = cls.packed["qkv_proj"], spec.hidden_size
            return {
                ours.replace("qkv_proj", part): TensorView(rows, transposed=True, whole=3 * size)
                for part, rows in zip(parts, stacked(size, size, size), strict=True)
            }
        return {ours: TensorView(transposed=True)} if stem.endswith(TURNED) else held

    def serve_up_to(self, length: int) -> None:
        if length > self.spec.max_position:
            raise StartupError(
                f"--max-model-len {length} is more than the {self.spec.max_position} positions that this model has; "
                f"{self.spec.max_position} would work."
            )

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().embed(ids, positions) + self.embed_positions(positions)
