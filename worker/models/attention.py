"""Self-attention as decoders have it: projections, rotation, scale, window, soft cap; and where q and k are normalised.

What attends over the cache is the backend's (attention/). A family that has more takes one of these and overrides
``normed``.
"""

from typing import ClassVar

import torch
from torch import nn

from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.linear import FusedLinear, SummedLinear
from paceline.worker.layers.norm import HeadsRMSNorm, RMSNorm
from paceline.worker.layers.rotary import Turns, rotate
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard, Shards


class SelfAttention(nn.Module):
    """``layer`` counts from this stage's first: it is where the cache has the keys and values."""

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = shard.heads.size, shard.kv_heads.size, spec.head_dim
        number = shard.layers.start + layer  # in the whole model
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.window, self.softcap = spec.window_of(number), spec.attention_softcap
        self.is_rotated = number not in spec.unrotated_layers
        q, kv = shard.heads.times(spec.head_dim), shard.kv_heads.times(spec.head_dim)
        self.qkv_proj = FusedLinear(spec.hidden_size, (q, kv, kv), bias=spec.attention_bias, **factory)
        self.o_proj = SummedLinear(q, spec.hidden_size, groups, bias=spec.attention_out_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor | None, turns: Turns, attn: StepAttention) -> torch.Tensor:
        """x: [tokens, hidden] as the projections take it. Returns attention's output plus ``add``, fp32 [tokens,
        hidden], or without ``add`` the output as it is."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [tokens, q, k and v heads, dim]
        turned = self.num_heads + self.num_kv_heads
        qk = self.normed(qkv[:, :turned])
        if self.is_rotated:
            qk = rotate(qk, *turns.of(self.window))
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, turned:]
        out = attn(self.layer, q, k, v, scale=self.scale, window=self.window, softcap=self.softcap)
        return self.o_proj(out, add=add)

    def normed(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: [tokens, q and k heads, dim], before they are rotated."""
        return qk


class HeadNormedAttention(SelfAttention):
    """Every head of q and of k is normalised by itself, with one weight for all q heads and one for all k heads."""

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__(spec, shard, layer, groups, **factory)
        self.q_norm = self.norm_class(spec.head_dim, spec.norm_eps, **factory)
        self.k_norm = self.norm_class(spec.head_dim, spec.norm_eps, **factory)

    def normed(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk.float().split((self.num_heads, self.num_kv_heads), 1)
        return torch.cat((self.q_norm(q), self.k_norm(k)), 1)


class ProjectionNormedAttention(SelfAttention):
    """The whole q projection is normalised as one vector, and so is the whole k projection. Tensor ranks, which hold
    some of the heads, add up their squares."""

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__(spec, shard, layer, groups, **factory)
        place = groups.place
        # With more ranks than KV heads some hold the same, whose squares must count once.
        holders = Shards.of(spec, place.tp, place.pp).kv_heads.count(shard.kv_heads)
        self.q_norm = HeadsRMSNorm(shard.heads, spec.head_dim, spec.norm_eps, **factory)
        self.k_norm = HeadsRMSNorm(shard.kv_heads, spec.head_dim, spec.norm_eps, holders, **factory)
        self.groups = groups

    def normed(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk.float().split((self.num_heads, self.num_kv_heads), 1)
        shares = torch.stack((self.q_norm.share(q), self.k_norm.share(k)), 1)  # [tokens, 2]
        q_square, k_square = self.groups.sum(shares).unbind(1)
        return torch.cat((self.q_norm(q, q_square), self.k_norm(k, k_square)), 1)
