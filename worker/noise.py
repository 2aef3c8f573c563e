"""Counter-based noise: the same numbers for the same (seed, choice, position, id), on every device and in every batch.

No generator and no state (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"). The words of a row are
mixed on the host with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014); ids are mixed in on the device with
wrapping int32 arithmetic, a multiplicative xor-shift hash with constants searched by Wellons ("lowbias32", revised).
"""

import numpy as np
import torch

_U64 = np.uint64


def row_keys(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two int32 words a row, [rows] each. seeds: uint64; position: where the drawn id will stand."""
    key = _mix64(seeds.astype(_U64))
    key = _mix64(key ^ choices.astype(_U64))
    key = _mix64(key ^ positions.astype(_U64))
    words = np.ascontiguousarray(key).view(np.int32).reshape(-1, 2)
    return words[:, 0], words[:, 1]


def log_exponential(first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log(E) with E exponential of mean 1, so that minus it is Gumbel noise. fp32, finite, within [-16.7, 2.9].

    first, second: [rows, 1] int32, from `row_keys`; ids: [n] or [rows, n] int32. Returns [rows, n].
    """
    x = ids * _signed(0x9E3779B1) + first
    x ^= (x >> 16) & 0xFFFF  # the mask makes int32's arithmetic shift a logical one
    x *= _signed(0x21F0AAAD)
    x ^= second
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x735A2D97)
    x ^= (x >> 15) & 0x1FFFF
    # 23 bits and a half: exact in fp32, and neither 0 nor 1.
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_()


def _mix64(x: np.ndarray) -> np.ndarray:
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
