"""The other half of a decoder's layer."""

import torch
from torch import nn

from paceline.worker.layers.activation import activation, gated
from paceline.worker.layers.linear import FusedLinear, SummedLinear
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, shard: Shard, groups: Groups, **factory):
        super().__init__()
        self.gated = gated(spec.activation)
        self.gate_up_proj = FusedLinear(spec.hidden_size, (shard.mlp, shard.mlp), bias=spec.mlp_bias, **factory)
        self.down_proj = SummedLinear(shard.mlp, spec.hidden_size, groups, bias=spec.mlp_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor | None) -> torch.Tensor:
        """x, add: [tokens, hidden]. Returns the output plus ``add``, or without it the output as it is."""
        return self.down_proj(self.gated(self.gate_up_proj(x)), add=add)


class PlainMLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, spec: ModelSpec, shard: Shard, groups: Groups, **factory):
        super().__init__()
        self.activation = activation(spec.activation)
        self.up_proj = FusedLinear(spec.hidden_size, (shard.mlp,), bias=spec.mlp_bias, **factory)
        self.down_proj = SummedLinear(shard.mlp, spec.hidden_size, groups, bias=spec.mlp_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor | None) -> torch.Tensor:
        """As `GatedMLP.forward`."""
        return self.down_proj(self.activation(self.up_proj(x)), add=add)
