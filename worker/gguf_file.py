"""The container format GGUF, read: metadata, the tensor directory, rows and their values, in one file or in parts.

Knows no model and no tokenizer.

The format is described by ggml's docs/gguf.md; block sizes and dequantization are those of the ``gguf`` package. The
header is read here and not by ``gguf.GGUFReader``, which makes several numpy views per string (measured: 1.8 s for
SmolLM2's vocabulary against 0.1 s) and reports a truncated file with whatever numpy error comes first.
"""

import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import msgspec
import numpy as np
import torch
from gguf import Keys

from paceline.proto.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
FLOAT32, STRING, ARRAY = 6, 8, 9
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FOLDED_VALUES = 8192
# GGUF's value types as little-endian numpy dtypes.
SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class GGUFTensor(msgspec.Struct, frozen=True):
    """An entry of the directory. ``shape`` has the slowest dimension first; ``offset`` counts from the file's start."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An open file, memory mapped. Raises ``StartupError`` if it is not GGUF, too short, or of types nobody reads."""

    def __init__(self, path: Path):
        self.path = path
        if path.stat().st_size < 24:
            raise StartupError(f"{path} is {path.stat().st_size} bytes long, which is no GGUF file; download it again.")
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        reader = _HeaderReader(self.data, path)
        self.metadata, entries = reader.read()
        self.header_len = reader.at
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise StartupError(f"{path} has general.alignment {alignment}, which is damage; download it again.")
        start = -(-self.header_len // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in entries}
        self._check_complete()

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            known = gguf.GGMLQuantizationType(kind)
            block_len, block_bytes = gguf.GGML_QUANT_SIZES[known]
        except (ValueError, KeyError) as error:
            raise StartupError(
                f"Tensor {name} of {self.path} has ggml type {kind}, which is unknown here; "
                "use a file quantized to a current type such as Q8_0, Q4_K or BF16."
            ) from error
        row_len = shape[-1] if len(shape) > 1 else 1  # values that a row must hold in whole blocks
        if not shape or 0 in shape or row_len % block_len:
            raise StartupError(
                f"Tensor {name} of {self.path} has shape {list(shape)}, which {known.name} with its blocks of "
                f"{block_len} cannot hold; the file is damaged, download it again."
            )
        return GGUFTensor(name, known, shape, offset, math.prod(shape) // block_len * block_bytes)

    def _check_complete(self) -> None:
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > len(self.data):
            raise StartupError(
                f"{self.path} is truncated: its tensors end at byte {end:,} but the file has {len(self.data):,}; "
                "download it again."
            )
        for tensor in {tensor.kind: tensor for tensor in self.tensors.values()}.values():
            try:
                gguf.quants.dequantize(self.rows(tensor.name)[:1], tensor.kind)
            except NotImplementedError as error:
                raise StartupError(
                    f"Tensor {tensor.name} of {self.path} has type {tensor.kind.name}, which cannot be dequantized; "
                    "use a file quantized to a current type such as Q8_0, Q4_K or BF16."
                ) from error

    def rows(self, name: str) -> np.ndarray:
        """The bytes of a tensor, one row per entry of its first dimension: uint8 [shape[0], bytes]; no copy."""
        tensor = self.tensors[name]
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)


class Held(NamedTuple):
    """Where a tensor lies."""

    file: GGUFFile
    tensor: GGUFTensor


def open_parts(path: Path) -> list[GGUFFile]:
    """The file or, if it is part of a split one, all parts in order, whichever is named. Metadata is in the first.

    Raises ``StartupError`` where a part is missing or belongs elsewhere, and where there is no tensor at all.
    """
    file = GGUFFile(path)
    count = file.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1)
    files = [file] if count <= 1 else [GGUFFile(part) for part in _part_paths(path, count)]
    if not any(file.tensors for file in files):
        raise StartupError(f"{path} holds no tensors, only metadata; give the file with the weights.")
    if len(files) > 1:
        _check_parts(files)
    return files


def _part_paths(path: Path, count: int) -> list[Path]:
    match = PART.fullmatch(path.name)
    if not match or int(match[3]) != count:
        raise StartupError(
            f"{path} is one of {count} parts, which are found by their names; call them NAME-00001-of-{count:05}.gguf "
            "and so on again, or merge them with llama-gguf-split --merge."
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = ", ..." if len(missing) > 3 else ""
        raise StartupError(
            f"{path.parent} lacks {len(missing)} of the {count} parts of this model ({', '.join(missing[:3])}{more}); "
            "download them."
        )
    return paths


def _check_parts(files: list[GGUFFile]) -> None:
    """All of one split, no tensor twice and none left out."""
    names = [name for file in files for name in file.tensors]
    total = files[0].metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(names))
    for number, file in enumerate(files):
        own = (file.metadata.get(Keys.Split.LLM_KV_SPLIT_NO), file.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT))
        if own != (number, len(files)):
            raise StartupError(f"{file.path} is not part {number + 1} of {len(files)}; download it again.")
    if len(names) != total or len(set(names)) != total:
        raise StartupError(
            f"The parts of {files[0].path} hold {len(set(names))} tensors and should hold {total}; download them again."
        )


def decode(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """uint8 [rows, bytes] -> [rows, values per row] in the plain dtype stored, or float32 where quantized."""
    if kind.name in PLAIN_DTYPES:  # a copy: the map is read-only
        return torch.from_numpy(np.array(raw, order="C")).view(getattr(torch, PLAIN_DTYPES[kind.name]))
    # The package works on 16 rows at a time. Blocks know no rows, so short rows are joined until 16 of them fill the
    # cache: measured twice as fast on SmolLM2.
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, row_len = raw.shape[0], raw.shape[1] // block_bytes * block_len
    power = max(FOLDED_VALUES // row_len, 1).bit_length() - 1
    fold = math.gcd(num_rows, 1 << power)
    values = gguf.quants.dequantize(raw.reshape(num_rows // fold, -1), kind)
    return torch.from_numpy(values).reshape(num_rows, row_len)


class _HeaderReader:
    """A cursor over the header. ``at`` ends behind the tensor directory."""

    def __init__(self, data: np.ndarray, path: Path):
        self.view = memoryview(data)  # type: ignore[arg-type]  # numpy arrays are buffers
        self.path = path
        self.at = 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Metadata, and per tensor its name, shape (slowest first), type number and offset into the data part."""
        if self._take(4) != MAGIC:
            raise StartupError(f"{self.path} does not begin like a GGUF file; give a .gguf file or a model folder.")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise StartupError(
                f"{self.path} is GGUF version {version}; versions 2 and 3, little-endian, are read. "
                "Convert the model again with a current llama.cpp."
            )
        try:
            num_tensors, num_keys = self._unpack("<QQ")
            metadata = {}
            for _ in range(num_keys):
                key = self._string()
                metadata[key] = self._value(*self._unpack("<I"))
            return metadata, [self._entry() for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise StartupError(f"The header of {self.path} is cut short or damaged; download it again.") from error

    def _take(self, num_bytes: int) -> bytes:
        if self.at + num_bytes > len(self.view):
            raise struct.error("past the end")
        self.at += num_bytes
        return bytes(self.view[self.at - num_bytes : self.at])

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self.view, self.at)
        self.at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        return self._take(*self._unpack("<Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, length = self._unpack("<IQ")
            if item in SCALARS:
                return self._scalars(item, length)
            return [self._value(item) for _ in range(length)]
        value = self._scalars(kind, 1)[0]
        return float(str(np.float32(value))) if kind == FLOAT32 else value  # 1e-05, not 9.999999747378752e-06

    def _scalars(self, kind: int, length: int) -> list[Any]:
        if kind not in SCALARS:
            raise struct.error(f"value type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._take(length * dtype.itemsize), dtype).tolist()

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        dims = self._unpack(f"<{min(num_dims, 8)}Q")
        kind, offset = self._unpack("<IQ")
        return name, dims[::-1], kind, offset
