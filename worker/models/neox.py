"""GPT-NeoX (Pythia, Polyglot, ...): LayerNorm, a plain MLP, a part of each head rotated; mostly both halves of a layer
read the stream as it came in, each by a norm of its own. Files hold q, k and v as one tensor, in turn head by head."""

import torch

from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.norm import LayerNorm
from paceline.worker.layers.rotary import Turns
from paceline.worker.models.config import Config, decoder_spec, read_activation
from paceline.worker.models.decoder import CausalLM, DecoderLayer
from paceline.worker.models.mlp import PlainMLP
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard
from paceline.worker.tensor_view import TensorView, interleaved_order


class NeoXLayer(DecoderLayer):
    norm_class = LayerNorm
    mlp_class = PlainMLP

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__(spec, shard, layer, groups, **factory)
        self.is_parallel = spec.parallel_residual

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        after = self.self_attn(self.input_layernorm(x), x, turns, attn)
        return self.mlp(self.post_attention_layernorm(x if self.is_parallel else after), after)


class NeoX(CausalLM):
    layer_class = NeoXLayer
    names = {
        "gpt_neox.embed_in": "model.embed_tokens",
        "gpt_neox.layers": "model.layers",
        "gpt_neox.final_layer_norm": "model.norm",
        "embed_out": "lm_head",
        "attention.query_key_value": "self_attn.qkv_proj",
        "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
    ignorable = r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"  # masks, and what is computed anew

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.called(rope_theta="rotary_emb_base", rms_norm_eps="layer_norm_eps")
        config = config.defaults(layer_norm_eps=1e-5, attention_bias=True, rotary_pct=0.25)
        head_dim = config.need_int("hidden_size") // config.need_int("num_attention_heads")
        rotated = config.inner("rope_parameters").get("partial_rotary_factor", config.need_float("rotary_pct"))
        return decoder_spec(
            config,
            "neox",
            num_kv_heads=config.need_int("num_attention_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rotated),
            activation=read_activation(config, default="gelu"),
            mlp_bias=True,
            parallel_residual=bool(config.get("use_parallel_residual", True)),
        )

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        held = super().tensors_of(spec, name)
        ours = next(iter(held), "")
        if ".qkv_proj." not in ours:
            return held
        return {
            ours.replace("qkv_proj", part): TensorView(
                interleaved_order(spec.num_heads, spec.head_dim, 3, index), whole=3 * spec.hidden_size
            )
            for index, part in enumerate(cls.packed["qkv_proj"])
        }
