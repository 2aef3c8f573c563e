"""The parts that decoders share, and how they stand together. A model's file says only what differs.

Submodules carry the names of Hugging Face checkpoints, so that the loader finds them; where several tensors of a file
become one here, ``packed`` says which. Arguments are explicit: a layer gets this step's rotation and attention handed
in and keeps nothing. Which ids come next is the sampler's affair.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from paceline.proto.errors import StartupError
from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.embedding import Embedding, Head
from paceline.worker.layers.linear import FusedLinear, Linear
from paceline.worker.layers.norm import RMSNorm
from paceline.worker.layers.rotary import Rotary, rotate
from paceline.worker.models.spec import ModelSpec

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [tokens, 1, head_dim]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class SelfAttention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, **factory):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        sizes = tuple(heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
        self.qkv_proj = FusedLinear(spec.hidden_size, sizes, bias=spec.attention_bias, **factory)
        self.o_proj = Linear(sizes[0], spec.hidden_size, bias=spec.attention_out_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor, turn: Turn, attn: StepAttention) -> torch.Tensor:
        """x, add: [tokens, hidden]. Returns attention's output plus ``add``."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [tokens, q, k and v heads, dim]
        turned = self.num_heads + self.num_kv_heads
        qk = rotate(qkv[:, :turned], *turn)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, turned:]
        return self.o_proj(attn(self.layer, q, k, v, scale=self.scale), add=add)


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, **factory):
        super().__init__()
        wide = spec.intermediate_size
        if spec.activation not in ACTIVATIONS:
            raise StartupError(f"The activation {spec.activation!r} is not known; known are: {', '.join(ACTIVATIONS)}.")
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_up_proj = FusedLinear(spec.hidden_size, (wide, wide), bias=spec.mlp_bias, **factory)
        self.down_proj = Linear(wide, spec.hidden_size, bias=spec.mlp_bias, **factory)

    def forward(self, x: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation(gate) * up, add=add)


class DecoderLayer(nn.Module):
    """Pre-norm: each half reads a normalised copy and is added to the residual stream.

    The stream is fp32 whatever the weights are: with sixty additions in bf16 the two best logits of one prompt came out
    0.01 apart, with fp32 0.06, where they are 0.08 apart.
    """

    def __init__(self, spec: ModelSpec, layer: int, **factory):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.self_attn = SelfAttention(spec, layer, **factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.mlp = GatedMLP(spec, **factory)

    def forward(self, x: torch.Tensor, turn: Turn, attn: StepAttention) -> torch.Tensor:
        x = self.self_attn(self.input_layernorm(x), x, turn, attn)
        return self.mlp(self.post_attention_layernorm(x), x)


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec, layer_class: type[nn.Module], **factory):
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, **factory)
        self.layers = nn.ModuleList(layer_class(spec, layer, **factory) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.rotary = Rotary(spec, factory["dtype"])

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        x = self.embed_tokens(ids).float()
        turn = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, turn, attn)
        return x


class CausalLM(nn.Module):
    """A decoder and its head. Built on the meta device (no memory), then filled by the loader."""

    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    # name here -> names in the file, in the order of the fused rows
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        factory = {"device": torch.device("meta"), "dtype": dtype}
        self.spec = spec
        self.model = Decoder(spec, self.layer_class, **factory)
        tied_to = self.model.embed_tokens if spec.tie_embeddings else None
        self.lm_head = Head(spec.vocab_size, spec.hidden_size, tied_to, **factory)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        """ids, positions: [tokens]. Returns the last layer's output, not normalised: [tokens, hidden]."""
        return self.model(ids, positions, attn)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] fp32, only rows that need it. Returns fp32 [rows, vocab_size], padding included."""
        return self.lm_head(self.model.norm(hidden, torch.float32))
