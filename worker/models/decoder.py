"""The parts that decoders share, and how they stand together. A model's file says only what differs.

Submodules carry the names of Hugging Face checkpoints, so that the loader finds them; where several tensors of a file
become one here, ``packed`` says which. Arguments are explicit: a layer gets this step's rotation and attention handed
in and keeps nothing. A rank of a gang has its `Shard`: part of every layer of its stage, and only the first stage
embeds, only the last has norm and head. Which ids come next is the sampler's affair.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from paceline.proto.errors import StartupError
from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.embedding import Embedding, Head
from paceline.worker.layers.linear import FusedLinear, SummedLinear
from paceline.worker.layers.norm import RMSNorm
from paceline.worker.layers.rotary import Rotary, rotate
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard, Shards

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [tokens, 1, head_dim]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class SelfAttention(nn.Module):
    """``layer`` counts from this stage's first: it is where the cache has the keys and values."""

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = shard.heads.size, shard.kv_heads.size, spec.head_dim
        self.scale = spec.head_dim**-0.5
        q, kv = shard.heads.times(spec.head_dim), shard.kv_heads.times(spec.head_dim)
        self.qkv_proj = FusedLinear(spec.hidden_size, (q, kv, kv), bias=spec.attention_bias, **factory)
        self.o_proj = SummedLinear(q, spec.hidden_size, groups, bias=spec.attention_out_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor, turn: Turn, attn: StepAttention) -> torch.Tensor:
        """x, add: [tokens, hidden]. Returns attention's output plus ``add``."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [tokens, q, k and v heads, dim]
        turned = self.num_heads + self.num_kv_heads
        qk = rotate(qkv[:, :turned], *turn)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, turned:]
        return self.o_proj(attn(self.layer, q, k, v, scale=self.scale), add=add)


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, shard: Shard, groups: Groups, **factory):
        super().__init__()
        if spec.activation not in ACTIVATIONS:
            raise StartupError(f"The activation {spec.activation!r} is not known; known are: {', '.join(ACTIVATIONS)}.")
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_up_proj = FusedLinear(spec.hidden_size, (shard.mlp, shard.mlp), bias=spec.mlp_bias, **factory)
        self.down_proj = SummedLinear(shard.mlp, spec.hidden_size, groups, bias=spec.mlp_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation(gate) * up, add=add)


class DecoderLayer(nn.Module):
    """Pre-norm: each half reads a normalised copy and is added to the residual stream.

    The stream is fp32 whatever the weights are: with sixty additions in bf16 the two best logits of one prompt came out
    0.01 apart, with fp32 0.06, where they are 0.08 apart.
    """

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.self_attn = SelfAttention(spec, shard, layer, groups, **factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.mlp = GatedMLP(spec, shard, groups, **factory)

    def forward(self, x: torch.Tensor, turn: Turn, attn: StepAttention) -> torch.Tensor:
        x = self.self_attn(self.input_layernorm(x), x, turn, attn)
        return self.mlp(self.post_attention_layernorm(x), x)


class Decoder(nn.Module):
    """This stage's layers, by their numbers in the whole model."""

    def __init__(self, spec: ModelSpec, shard: Shard, groups: Groups, layer_class: type[nn.Module], **factory):
        super().__init__()
        if groups.place.is_first_stage:
            self.embed_tokens = Embedding(shard.vocab, spec.hidden_size, groups, **factory)
        self.layers = nn.ModuleDict(
            {
                str(shard.layers.start + layer): layer_class(spec, shard, layer, groups, **factory)
                for layer in range(shard.layers.size)
            }
        )
        if groups.place.is_last_stage:
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.rotary = Rotary(spec, factory["dtype"])

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        turn = self.rotary(positions)
        for layer in self.layers.values():
            x = layer(x, turn, attn)
        return x


class CausalLM(nn.Module):
    """One rank's share of a decoder and its head. Built on the meta device (no memory), then filled by the loader.

    Without ``groups`` it is the whole model. Raises StartupError for sizes of groups that the model cannot be cut to.
    """

    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    # name here -> names in the file, in the order of the fused rows
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, groups: Groups | None = None):
        super().__init__()
        factory = {"device": torch.device("meta"), "dtype": dtype}
        groups = groups or Groups()
        place = groups.place
        self.spec, self.place = spec, place
        self.shard = shard = Shards.of(spec, place.tp, place.pp).of_rank(place.tp_rank, place.pp_rank)
        self.model = Decoder(spec, shard, groups, self.layer_class, **factory)
        if place.is_last_stage:
            # A tied head on another stage than the embedding has the same rows of the file once more.
            tied_to = self.model.embed_tokens if spec.tie_embeddings and place.is_first_stage else None
            self.lm_head = Head(shard.vocab, spec.hidden_size, groups, shard.vocab_sizes, tied_to, **factory)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens]. The residual stream at its beginning, fp32 [tokens, hidden]; of the first stage only."""
        return self.model.embed_tokens(ids).float()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        """x: fp32 [tokens, hidden], the stream before this stage's layers; positions: [tokens]. Returns it after them,
        not normalised."""
        return self.model(x, positions, attn)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden: [rows, hidden] fp32, only rows that need it; of the last stage only. Returns fp32 [rows, vocab_size],
        padding included, on its first tensor rank, and None on the others."""
        return self.lm_head(self.model.norm(hidden, torch.float32))
