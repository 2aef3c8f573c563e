"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the ways to stretch it beyond the trained length.

Angles are computed once a step for the step's positions, in fp32, and shared by all layers; no table is kept. The
layout is the one of Hugging Face checkpoints: a head is two halves, and entry i turns with entry i + dim / 2. Of a head
whose entries are not all rotated the first ``dim`` are, and the rest goes through.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.kernels import elements
from paceline.worker.models.spec import ModelSpec, RopeScaling

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [tokens, 1, dim] in the model's dtype


@dataclass(frozen=True, slots=True)
class Turns:
    """One step's: ``wide`` of layers that see all, ``local`` of those with a window. Mostly they are the same."""

    wide: Turn
    local: Turn

    def of(self, window: int) -> Turn:
        return self.local if window else self.wide


class Rotary(nn.Module):
    """Positions to (cos, sin), with sin signed so that a turn is ``x * cos + roll(x) * sin``."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        self.dim = rotary_dim(spec)
        self.dtype = dtype
        self.spec = spec
        # Made on the host even where the model is built on the meta device: they are computed, not loaded.
        with torch.device("cpu"):
            self.frequencies, self.attention_factor = scaled_frequencies(spec)  # [dim / 2] fp32
            local = spec.local_rope_theta
            self.local_frequencies = None if local is None else base_frequencies(local, self.dim)
            half = torch.ones(self.dim // 2)
            self.sign = torch.cat((-half, half))

    def serve_up_to(self, length: int) -> None:
        """No sequence will be longer than so many tokens. Of two rows of factors it decides which: a sequence that
        changed over on its way would look back at keys that were turned otherwise."""
        scaling = self.spec.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            self.frequencies = longrope_frequencies(self.spec, scaling, length).to(self.frequencies.device)

    def forward(self, positions: torch.Tensor) -> Turns:
        """positions: [tokens]."""
        if self.frequencies.device != positions.device:
            self._move(positions.device)
        frequencies = self.frequencies
        if self.spec.rope_scaling is not None and self.spec.rope_scaling.kind == "dynamic":
            frequencies = dynamic_frequencies(self.spec, positions)  # [tokens, dim / 2]
        wide = self._turn(positions, frequencies, self.attention_factor)
        local = wide if self.local_frequencies is None else self._turn(positions, self.local_frequencies, 1.0)
        return Turns(wide, local)

    def _turn(self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> Turn:
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin() * self.sign
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)

    def _move(self, device: torch.device) -> None:
        self.frequencies, self.sign = self.frequencies.to(device), self.sign.to(device)
        if self.local_frequencies is not None:
            self.local_frequencies = self.local_frequencies.to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns x [tokens, heads, head_dim] by the angles of `Rotary`; queries and keys go in together. Where a kernel does
    it, it is done in place."""
    if elements.takes(x, cos.dtype) and x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.dtype == cos.dtype:
        return elements.rotate_(x, cos, sin)
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), -1)
    return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)


def rotary_dim(spec: ModelSpec) -> int:
    """Entries of a head that are rotated."""
    return spec.head_dim if spec.rotary_dim is None else spec.rotary_dim


def scaled_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """(frequencies [dim / 2], factor on cos and sin). Raises StartupError for a scaling that is not known."""
    scaling = spec.rope_scaling
    plain = base_frequencies(spec.rope_theta, rotary_dim(spec))
    if scaling is None or scaling.kind in ("default", "dynamic"):
        frequencies, attention_factor = plain, 1.0
    elif scaling.kind == "linear":
        frequencies, attention_factor = plain / scaling.factor, 1.0
    elif scaling.kind == "llama3":
        frequencies, attention_factor = _llama3(plain, scaling), 1.0
    elif scaling.kind == "yarn":
        frequencies, attention_factor = _yarn(plain, spec, scaling), _yarn_attention_factor(scaling)
    elif scaling.kind == "factors":
        frequencies, attention_factor = divided(plain, scaling.factors), 1.0
    elif scaling.kind == "longrope":
        frequencies = longrope_frequencies(spec, scaling, spec.max_position)
        attention_factor = _longrope_attention_factor(spec, scaling)
    else:
        raise StartupError(
            f"Rotary scaling {scaling.kind!r} is not known; linear, dynamic, llama3, yarn, factors and longrope are."
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
    dim = rotary_dim(spec)
    theta = spec.rope_theta * stretch ** (dim / (dim - 2))
    return base_frequencies(theta, dim)


def divided(plain: torch.Tensor, factors: tuple[float, ...] | None) -> torch.Tensor:
    """Raises StartupError unless there is one factor for each frequency."""
    if factors is None or len(factors) != len(plain):
        raise StartupError(
            f"Rotary scaling has {len(factors or ())} factors for {len(plain)} frequencies; take the model's config as "
            "it was published."
        )
    return plain / torch.tensor(factors, dtype=torch.float32)


def longrope_frequencies(spec: ModelSpec, scaling: RopeScaling, length: int) -> torch.Tensor:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): one row of divisors up to the trained length, another where
    sequences may be longer."""
    plain = base_frequencies(spec.rope_theta, rotary_dim(spec))
    trained = scaling.original_max_position or spec.max_position
    return divided(plain, scaling.long_factors if length > trained else scaling.short_factors)


def _longrope_attention_factor(spec: ModelSpec, scaling: RopeScaling) -> float:
    trained = scaling.original_max_position or spec.max_position
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(trained)) if scaling.factor > 1 else 1.0


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

    dim = rotary_dim(spec)

    def index_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), dim - 1)
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
