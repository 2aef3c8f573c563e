"""A model out of GGUF: a file, or the parts of one, read as the Hugging Face folder that it was made from.

ggml's tensor names and orders of rows become the folder's, by the tables of gguf_families.py. The spec comes from
gguf_config.py, the tokenizer from gguf_tokenizer.py, the container is gguf_file.py's. Quantized tensors are dequantized
to float32 when asked for, and only the rows and columns asked for; ``kinds`` says as what they were stored, for
quant/formats.py to find the same integers again.
"""

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import Keys

from paceline.worker.checkpoint_base import Checkpoint, samples
from paceline.worker.gguf_config import Metadata, make_spec
from paceline.worker.gguf_families import GGUFFamily
from paceline.worker.gguf_file import PLAIN_DTYPES, GGUFTensor, Held, decode, open_parts
from paceline.worker.gguf_tokenizer import read_vocabulary
from paceline.worker.models import model_class
from paceline.worker.tensor_view import halves_order

LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")
# Rotary factors are part of the spec; the rest can be computed.
BUFFERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)(\.weight)?")
GENERATION_KEYS = {
    "temperature": Keys.General.SAMPLING_TEMP,
    "top_k": Keys.General.SAMPLING_TOP_K,
    "top_p": Keys.General.SAMPLING_TOP_P,
    "min_p": Keys.General.SAMPLING_MIN_P,
    "repetition_penalty": Keys.General.SAMPLING_PENALTY_REPEAT,
}


class GGUFCheckpoint(Checkpoint):
    """See ``Checkpoint``. ``path`` may be any part of a split file.

    Raises ``StartupError`` for what cannot be read or is of no known architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = open_parts(path)
        meta = Metadata(self.files)
        self.family = meta.family
        self.spec = make_spec(meta)
        self.vocabulary = read_vocabulary(meta.values, path)
        self.generation_defaults = {
            name: meta.values[key] for name, key in GENERATION_KEYS.items() if key in meta.values
        }
        self.tensors = {
            folder_name(name, self.family): held for name, held in meta.tensors.items() if not BUFFERS.fullmatch(name)
        }
        tensors_of = model_class(self.spec).tensors_of
        # our name -> the folder's, and how it lies there
        self.views = {
            name: (source, view) for source in self.tensors for name, view in tensors_of(self.spec, source).items()
        }
        num_values: Counter[str] = Counter()
        for _, tensor in self.tensors.values():
            num_values[PLAIN_DTYPES.get(tensor.kind.name, "float32")] += math.prod(tensor.shape)
        self.stored_dtype = num_values.most_common(1)[0][0]

    def names(self) -> list[str]:
        return list(self.views)

    def shape(self, name: str) -> tuple[int, ...]:
        source, view = self.views[name]
        return view.shape(self._shape(source))

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        source, view = self.views[name]
        return view.get(partial(self._get, source), self._shape(source), rows, columns)

    def kinds(self) -> dict[str, str]:
        held = {name: self.tensors[source].tensor.kind.name for name, (source, _) in self.views.items()}
        return {name: kind for name, kind in held.items() if kind not in PLAIN_DTYPES}

    def _shape(self, source: str) -> tuple[int, ...]:
        shape = self.tensors[source].tensor.shape
        return shape[::-1] if self._is_turned(source) else shape

    def _get(self, source: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        """As the folder would give it."""
        held = self.tensors[source]
        if self._is_turned(source):
            return self._read(held, columns or slice(None), rows).T
        order = self._order(held.tensor)
        values = self._read(held, (rows or slice(None)) if order is None else order[rows or slice(None)], columns)
        return values - self.family.norm_offset if self.family.norm_offset and _is_norm(held.tensor) else values

    def _is_turned(self, source: str) -> bool:
        tensor = self.tensors[source].tensor
        return self.family.turned and len(tensor.shape) == 2 and tensor.name.startswith("blk.")

    def _order(self, tensor: GGUFTensor) -> np.ndarray | None:
        """For each row of the folder's tensor the file's; None: as they are. Rows are quantized one by one, so they may
        be picked before decoding."""
        spec, part = self.spec, tensor.name.rpartition(".")[0].rpartition(".")[2]
        if self.family.pairs and part in ("attn_q", "attn_k"):
            return halves_order(spec.num_heads if part == "attn_q" else spec.num_kv_heads, spec.head_dim)
        if self.family.qkv_in_turn and part == "attn_qkv":
            return np.arange(tensor.shape[0]).reshape(3, -1, spec.head_dim).swapaxes(0, 1).reshape(-1)
        return None

    def _read(self, held: Held, rows: slice | np.ndarray, columns: slice | None) -> torch.Tensor:
        """As the file has it."""
        file, tensor = held
        raw = file.rows(tensor.name)
        if columns is None:
            return decode(raw[rows], tensor.kind).reshape(-1, *tensor.shape[1:])
        # Whole blocks that cover the columns are decoded, and what is too much is cut off.
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        first, last = columns.start // block_len, -(-columns.stop // block_len)
        values = decode(raw[:, first * block_bytes : last * block_bytes][rows], tensor.kind)
        return values[:, columns.start - first * block_len : columns.stop - first * block_len]

    def identity(self) -> bytes:
        return b"".join(
            part for file in self.files for part in (bytes(file.data[: file.header_len]), *samples(file.path))
        )


def folder_name(name: str, family: GGUFFamily) -> str:
    """The Hugging Face name of a ggml tensor; an unknown one keeps its own, for the loader to refuse as surplus."""
    stem, _, suffix = name.rpartition(".")
    layer = None
    if match := LAYER_NAME.fullmatch(stem):
        layer, stem = match[1], "blk.{bid}." + match[2]
    known = family.names.get(stem)
    return name if known is None else f"{known.format(bid=layer)}.{suffix}"


def _is_norm(tensor: GGUFTensor) -> bool:
    return tensor.name.removesuffix(".weight").endswith("norm")
