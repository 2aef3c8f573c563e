"""How the parts of a decoder stand together. A model's file says only what differs.

What a family may say, most of it as an attribute of its class:

    CausalLM        spec_of         its reading of config.json, by `decoder_spec` (config.py)
                    layer_class     one of the four below, or its own ten lines
                    names           parts of tensor names: as its files have them -> as they are here
                    ignorable       tensors of its files that are no weights (a pattern)
                    tensors_of      where a file's tensor holds several of ours, or holds one otherwise
                    embed, logits   what comes before the first layer, and after the last
    DecoderLayer, PostNormLayer, SandwichLayer, ParallelLayer
                    attention_class SelfAttention, HeadNormedAttention, ProjectionNormedAttention (attention.py)
                    mlp_class       GatedMLP, PlainMLP (mlp.py)
                    norm_class      RMSNorm, OffsetRMSNorm, LayerNorm, BiaslessLayerNorm (layers/norm.py); the last norm
                                    is of this class too
    ModelSpec       numbers: windows, scales, soft caps, rotation (spec.py)

Submodules carry the names of Hugging Face's Llama, and so do checkpoints' tensors once ``tensors_of`` has seen them;
where several become one here, ``packed`` says which. Arguments are explicit: a layer gets this step's rotation and
attention handed in and keeps nothing. A rank of a gang has its `Shard`: part of every layer of its stage, and only the
first stage embeds, only the last has norm and head. Which ids come next is the sampler's affair.
"""

import re
from typing import ClassVar

import torch
from torch import nn

from paceline.worker.attention.base import StepAttention
from paceline.worker.layers.activation import soft_cap
from paceline.worker.layers.embedding import Embedding, Head
from paceline.worker.layers.norm import LayerNorm, RMSNorm
from paceline.worker.layers.rotary import Rotary, Turns
from paceline.worker.models.attention import SelfAttention
from paceline.worker.models.config import Config
from paceline.worker.models.mlp import GatedMLP, PlainMLP
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shard, Shards
from paceline.worker.tensor_view import TensorView


class DecoderLayer(nn.Module):
    """Pre-norm: each half reads a normalised copy and is added to the residual stream.

    The stream is fp32 whatever the weights are: with sixty additions in bf16 the two best logits of one prompt came out
    0.01 apart, with fp32 0.06, where they are 0.08 apart.
    """

    attention_class: ClassVar[type[SelfAttention]] = SelfAttention
    mlp_class: ClassVar[type[GatedMLP] | type[PlainMLP]] = GatedMLP
    norm_class: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__()
        self.self_attn = self.attention_class(spec, shard, layer, groups, **factory)
        self.mlp = self.mlp_class(spec, shard, groups, **factory)
        for name in self.norms:
            self.add_module(name, self.norm_class(spec.hidden_size, spec.norm_eps, **factory))

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        """x: fp32 [tokens, hidden], the stream. Returns it after this layer."""
        x = self.self_attn(self.input_layernorm(x), x, turns, attn)
        return self.mlp(self.post_attention_layernorm(x), x)


class PostNormLayer(DecoderLayer):
    """Each half reads the stream itself, and what it gives is normalised before it is added."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(self, spec: ModelSpec, shard: Shard, layer: int, groups: Groups, **factory):
        super().__init__(spec, shard, layer, groups, **factory)
        self.dtype = factory["dtype"]

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        out = self.self_attn(x.to(self.dtype), None, turns, attn)
        x = x + self.post_attention_layernorm(out.float(), torch.float32)
        out = self.mlp(x.to(self.dtype), None)
        return x + self.post_feedforward_layernorm(out.float(), torch.float32)


class SandwichLayer(DecoderLayer):
    """Norms on both sides of each half."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        out = self.self_attn(self.input_layernorm(x), None, turns, attn)
        x = x + self.post_attention_layernorm(out.float(), torch.float32)
        out = self.mlp(self.pre_feedforward_layernorm(x), None)
        return x + self.post_feedforward_layernorm(out.float(), torch.float32)


class ParallelLayer(DecoderLayer):
    """Both halves read the same normalised copy."""

    norms = ("input_layernorm",)

    def forward(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        normed = self.input_layernorm(x)
        return self.mlp(normed, self.self_attn(normed, x, turns, attn))


class Decoder(nn.Module):
    """This stage's layers, by their numbers in the whole model."""

    def __init__(self, spec: ModelSpec, shard: Shard, groups: Groups, layer_class: type[DecoderLayer], **factory):
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
            self.norm = layer_class.norm_class(spec.hidden_size, spec.norm_eps, **factory)
        self.rotary = Rotary(spec, factory["dtype"])

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        return self.through(x, self.rotary(positions), attn)

    def through(self, x: torch.Tensor, turns: Turns, attn: StepAttention) -> torch.Tensor:
        """x: fp32 [tokens, hidden], before this stage's layers. Returns it after them."""
        for layer in self.layers.values():
            x = layer(x, turns, attn)
        return x


class CausalLM(nn.Module):
    """One rank's share of a decoder and its head. Built on the meta device (no memory), then filled by the loader.

    Without ``groups`` it is the whole model. Raises StartupError for sizes of groups that the model cannot be cut to.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    # name here -> names of its parts, in the order of the fused rows
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    names: ClassVar[dict[str, str]] = {}  # dotted parts, replaced in this order: "transformer.h" -> "model.layers"
    ignorable: ClassVar[str] = r".*\.rotary_emb\.inv_freq"  # computed anew

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, groups: Groups | None = None):
        super().__init__()
        factory = {"device": torch.device("meta"), "dtype": dtype}
        groups = groups or Groups()
        place = groups.place
        self.spec, self.place = spec, place
        # Rounded as the weights are: so it was when the model was trained (Gemma's 55.43 was 55.5).
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self.shard = shard = Shards.of(spec, place.tp, place.pp).of_rank(place.tp_rank, place.pp_rank)
        self.model = Decoder(spec, shard, groups, self.layer_class, **factory)
        if place.is_last_stage:
            # A tied head on another stage than the embedding has the same rows of the file once more.
            tied_to = self.model.embed_tokens if spec.tie_embeddings and place.is_first_stage else None
            self.lm_head = Head(shard.vocab, spec.hidden_size, groups, shard.vocab_sizes, tied_to, **factory)

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        """Raises StartupError, naming the field, for what this family does not have."""
        raise NotImplementedError

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        """Those of ours that a Hugging Face file's tensor holds, by their names here. None of what is no weight; a name
        that is not known stays as it is, for the loader to refuse."""
        return {} if re.fullmatch(cls.ignorable, name) else {cls.renamed(name): TensorView()}

    @classmethod
    def renamed(cls, name: str) -> str:
        name = f".{name}."
        for theirs, ours in cls.names.items():
            name = name.replace(f".{theirs}.", f".{ours}.")
        return name[1:-1]

    def serve_up_to(self, length: int) -> None:
        """No sequence will be longer than so many tokens."""
        self.model.rotary.serve_up_to(length)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids, positions: [tokens]. The stream at its beginning, fp32 [tokens, hidden]; of the first stage only."""
        x = self.model.embed_tokens(ids).float()
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        """x: fp32 [tokens, hidden], the stream before this stage's layers; positions: [tokens]. Returns it after them,
        not normalised."""
        return self.model(x, positions, attn)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden: [rows, hidden] fp32, only rows that need it; of the last stage only. Returns fp32 [rows, vocab_size],
        padding included, on its first tensor rank, and None on the others."""
        logits = self.lm_head(self.model.norm(hidden, torch.float32))
        if logits is None:
            return None
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        return soft_cap(logits, self.spec.logit_softcap) if self.spec.logit_softcap else logits
