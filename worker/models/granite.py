"""Granite 3 (dense): a Llama whose embeddings, attention scores, logits, and what each half of a layer adds, are scaled
by numbers of the config."""

import torch

from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.rotary import Turns
from paceline.worker.models.config import Config, decoder_spec
from paceline.worker.models.decoder import CausalLM, DecoderLayer
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


class GraniteLayer(DecoderLayer):
    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__(spec, shard, layer, groups, **factory)
        self.scale = spec.residual_scale

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        x = x.add(self.self_attn(self.input_layernorm(x), None, turns, attn), alpha=self.scale)
        return x.add(self.mlp(self.post_attention_layernorm(x), None), alpha=self.scale)


class Granite(CausalLM):
    layer_class = GraniteLayer

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        config = config.defaults(**dict.fromkeys(SCALES, 1.0))
        embedding, attention, residual, logits = map(config.need_float, SCALES)
        return decoder_spec(
            config,
            "granite",
            embedding_scale=embedding,
            attention_scale=attention,
            residual_scale=residual,
            logit_scale=1.0 / logits,
        )
