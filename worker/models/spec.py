"""The shape of a model as its layers need it, whatever file it was read from. Numbers only: no tensors, no torch."""

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the trained length.

    ``kind`` is linear, dynamic, llama3, yarn, factors or longrope. ``factors`` (with that kind only) are divisors, one
    per rotary frequency, slowest frequency last: GGUF files carry Llama 3.1's scaling in this form, worked out already,
    and inv_freq / factors equals llama3's result. longrope has two such rows: ``short_factors`` where no sequence is
    longer than ``original_max_position``, else ``long_factors``.
    """

    kind: str
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; on cos and sin
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    factors: tuple[float, ...] | None = None  # factors
    short_factors: tuple[float, ...] | None = None  # longrope
    long_factors: tuple[float, ...] | None = None  # longrope


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder. ``vocab_size`` is the number of rows of the embedding; the tokenizer may name fewer."""

    architecture: str  # the registry's name: "llama"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    # by layer, tokens that a query sees, itself included; 0: all. Empty where every layer sees all
    windows: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None  # leading entries of a head that are rotated; None: all
    local_rope_theta: float | None = None  # of layers with a window, which then know no scaling; None: as the others
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each half of a layer adds
    parallel_residual: bool = False  # GPT-NeoX: both halves of a layer read the stream as it came in
    logit_scale: float = 1.0

    config: str = ""  # of the fallback alone: config.json, from which transformers builds its modules

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0
