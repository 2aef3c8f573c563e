"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the ways to stretch it beyond the trained length.

Angles are computed once a step for the step's positions, in fp32, and shared by all layers; no table is kept. The
layout is the one of Hugging Face checkpoints: a head is two halves, and entry i turns with entry i + dim / 2.
"""

import math

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.models.spec import ModelSpec, RopeScaling


class Rotary(nn.Module):
    """Positions to (cos, sin), with sin signed so that a turn is ``x * cos + roll(x) * sin``."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        self.dim = spec.head_dim
        self.dtype = dtype
        self.spec = spec
        # Made on the host even where the model is built on the meta device: they are computed, not loaded.
        with torch.device("cpu"):
            self.frequencies, self.attention_factor = scaled_frequencies(spec)  # [dim / 2] fp32
            half = torch.ones(self.dim // 2)
            self.sign = torch.cat((-half, half))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [tokens]. Returns cos and signed sin, [tokens, 1, dim], in the model's dtype."""
        if self.frequencies.device != positions.device:
            self.frequencies, self.sign = self.frequencies.to(positions.device), self.sign.to(positions.device)
        frequencies = self.frequencies
        if self.spec.rope_scaling is not None and self.spec.rope_scaling.kind == "dynamic":
            frequencies = dynamic_frequencies(self.spec, positions)  # [tokens, dim / 2]
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin() * self.sign
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns x [tokens, heads, dim] by the angles of `Rotary`; queries and keys go in together."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def scaled_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """(frequencies [dim / 2], factor on cos and sin). Raises StartupError for a scaling that is not known."""
    scaling = spec.rope_scaling
    plain = base_frequencies(spec.rope_theta, spec.head_dim)
    if scaling is None or scaling.kind in ("default", "dynamic"):
        frequencies, attention_factor = plain, 1.0
    elif scaling.kind == "linear":
        frequencies, attention_factor = plain / scaling.factor, 1.0
    elif scaling.kind == "llama3":
        frequencies, attention_factor = _llama3(plain, scaling), 1.0
    elif scaling.kind == "yarn":
        frequencies, attention_factor = _yarn(plain, spec, scaling), _yarn_attention_factor(scaling)
    elif scaling.kind == "factors":
        frequencies, attention_factor = plain / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    else:
        raise StartupError(
            f"Rotary scaling {scaling.kind!r} is not known; linear, dynamic, llama3, yarn and factors are."
        )
    return frequencies, attention_factor


def base_frequencies(theta: float | torch.Tensor, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if isinstance(theta, torch.Tensor):
        return theta[:, None] ** -exponents.to(theta.device)
    return theta**-exponents


def dynamic_frequencies(spec: ModelSpec, positions: torch.Tensor) -> torch.Tensor:
    """NTK-aware scaling that grows with the length (bloc97 and emozilla, 2023): [tokens, dim / 2].

    Each position takes the base that a sequence ending there would have: what token-by-token generation does, and the
    one reading under which chunks, batches and replicas agree.
    """
    scaling = spec.rope_scaling
    assert scaling is not None
    trained = scaling.original_max_position or spec.max_position
    length = (positions.float() + 1).clamp(min=trained)
    stretch = scaling.factor * length / trained - (scaling.factor - 1)
    theta = spec.rope_theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
    return base_frequencies(theta, spec.head_dim)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wave lengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    trained = scaling.original_max_position or 8192
    turns = trained * plain / (2 * math.pi)  # over the trained length
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: torch.Tensor, spec: ModelSpec, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): as llama3, blended over the dimension's index."""
    trained = scaling.original_max_position or spec.max_position

    def index_of(turns: float) -> float:
        return spec.head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), spec.head_dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / scaling.factor * (1 - keep) + plain * keep


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
