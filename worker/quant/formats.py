"""Formats of weights narrower than the model's: what `--quantization` may name, and how a weight becomes one.

A weight [out, in] becomes integers of 4 or 8 bits, with a scale and maybe a minimum for each group of an output's
inputs, as ggml's files have them too. Numbers only: how they are multiplied is product.py's.

    int8   8 bits, a scale and a minimum per group of 32, which holds what 4 bits held; inputs at 16 bits, which is more
           than bfloat16 has
    w8a8   8 bits per group of 64; inputs at 8 bits, with a scale for each group of a row's inputs
    int4   4 bits, a scale and a minimum per group of 32, as Q4_1; inputs as for int8
    gguf   as the file: Q4_0, Q4_1 and Q8_0 keep their integers, others become int8
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.proto.errors import StartupError

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeight:
    """``values``: uint8 [out, in], below 2 ** bits. ``scales``, ``minimums``: fp16 [out, groups]; no minimums where
    ``format.zero`` stands for 0. In `BF16` the values are the weights."""

    format: "Format"
    values: torch.Tensor
    scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """fp32 [out, in]."""
        if self.scales is None:
            return self.values.float()
        out_size, num_groups = self.scales.shape
        values = self.values.view(out_size, num_groups, -1).float() - self.format.zero
        values *= self.scales.float().unsqueeze(2)
        if self.minimums is not None:
            values += self.minimums.float().unsqueeze(2)
        return values.view(self.values.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """``bits`` of a weight. ``group``: inputs that share a scale. ``input_bits``: of what is multiplied by it, 16 with
    a scale per row, or 8 with one per group."""

    bits: int
    group: int
    has_minimum: bool = False
    input_bits: int = 16

    @property
    def zero(self) -> int:
        """The value that stands for 0."""
        return 0 if self.has_minimum else 1 << (self.bits - 1)

    def why_not(self, device: torch.device, dtype: torch.dtype, in_size: int) -> str | None:
        """None where a weight of ``in_size`` inputs can have this format, else the reason as half a sentence."""
        if device.type != "cpu":
            return f"it is computed on a CPU only, and the device is {device.type}"
        if dtype not in DTYPES:
            return "it goes with --dtype bfloat16 or float32"
        if in_size % self.group:
            return f"a layer has {in_size} inputs on a rank, which are no multiple of {self.group}"
        return None

    def narrow(self, weight: torch.Tensor) -> NarrowWeight:
        """Of [out, in], in any float dtype. What has been in this format before comes out as it was: files of
        quantized weights lose nothing."""
        groups = weight.float().view(len(weight), -1, self.group)
        largest = (1 << self.bits) - 1
        if self.has_minimum:
            low = groups.amin(2)
            scales, minimums = ((groups.amax(2) - low) / largest).half(), low.half()
            values = groups - minimums.float().unsqueeze(2)
            return NarrowWeight(self, _integers(values, scales, 0, largest), scales, minimums)
        # The largest value of a group becomes an end of the range: of few integers the end that has one more.
        most = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        scales = (most / -self.zero if self.bits == 4 else most.abs() / (self.zero - 1)).half()
        return NarrowWeight(self, _integers(groups, scales, self.zero, largest), scales)


BF16 = Format(16, group=2)  # weights as they are, in pairs of inputs
KEPT = {
    "Q4_0": Format(4, group=32),
    "Q4_1": Format(4, group=32, has_minimum=True),
    "Q8_0": Format(8, group=32),
}
FORMATS = {
    "int8": Format(8, group=32, has_minimum=True),
    "w8a8": Format(8, group=64, has_minimum=True, input_bits=8),
    "int4": KEPT["Q4_1"],
}
NAMES = (*FORMATS, "gguf")


def find(name: str, kinds: Iterable[str] = ()) -> Format:
    """The format that ``--quantization`` names, for a weight made of tensors of these ggml types. Raises StartupError
    for a name that is not known."""
    if name == "gguf":
        kinds = set(kinds)
        return KEPT[kinds.pop()] if len(kinds) == 1 and kinds <= KEPT.keys() else FORMATS["int8"]
    if name not in FORMATS:
        raise StartupError(f"--quantization {name} is not known; {', '.join(NAMES)} are.")
    return FORMATS[name]


def _integers(groups: torch.Tensor, scales: torch.Tensor, zero: int, largest: int) -> torch.Tensor:
    """[out, groups, group] in units of scales [out, groups]: uint8 [out, in]. A group of equal values has no scale."""
    divisor = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(2)
    values = (groups / divisor).round_().add_(zero).clamp_(0, largest)
    return values.to(torch.uint8).view(len(groups), -1)
