"""Opens a model on disk: a Hugging Face folder (here) or a GGUF file (gguf.py), both behind ``Checkpoint``.

Safetensors only: other weight files may run code when they are read. The folder's small files are hf_files.py's.
"""

import json
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Checkpoint, samples
from paceline.worker.gguf import GGUFCheckpoint
from paceline.worker.hf_files import read_generation_defaults, read_json, read_spec, read_vocabulary
from paceline.worker.models import model_class
from paceline.worker.tensor_view import TensorView

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER_BYTES = 100_000_000


def open_checkpoint(path: Path) -> Checkpoint:
    """A folder or a .gguf file. Raises ``StartupError`` with one sentence for whatever is wrong with it."""
    if path.is_dir():
        return FolderCheckpoint(path)
    if not path.exists():
        raise StartupError(f"{path} does not exist; give a model folder or a .gguf file.")
    if path.suffix != ".gguf":
        raise StartupError(f"{path} is neither a model folder nor a .gguf file; give one of these.")
    return GGUFCheckpoint(path)


class FolderCheckpoint(Checkpoint):
    """See ``Checkpoint``. Files stay memory mapped while this lives."""

    def __init__(self, path: Path):
        self.path = path
        config_path = path / "config.json"
        if not config_path.exists() and any(path.glob("*.gguf")):
            raise StartupError(f"{path} is a folder of GGUF files; give one of the files instead.")
        config = read_json(config_path, needed_for="the model")
        generation = read_json(path / "generation_config.json")
        self.spec = read_spec(config, config_path)
        self.vocabulary = read_vocabulary(path, config, generation)
        self.generation_defaults = read_generation_defaults(generation)
        self.config = config
        self.files = {file: SafetensorsFile(file) for file in _weight_files(path)}
        tensors_of = model_class(self.spec).tensors_of
        # our name -> what holds it, the name there, and how it lies there
        self.holders: dict[str, tuple[SafetensorsFile, str, TensorView]] = {
            name: (file, held, view)
            for file in self.files.values()
            for held in file.entries
            for name, view in tensors_of(self.spec, held).items()
            if not (name == "lm_head.weight" and self.spec.tie_embeddings)  # sometimes stored all the same
        }
        num_values: Counter[str] = Counter()
        for name, (file, held, _) in self.holders.items():
            num_values[file.dtype(held)] += prod(self.shape(name))
        if not num_values:
            raise StartupError(f"The weight files of {path} hold no tensors; download them again.")
        self.stored_dtype = num_values.most_common(1)[0][0]

    def names(self) -> list[str]:
        return list(self.holders)

    def shape(self, name: str) -> tuple[int, ...]:
        file, held, view = self.holders[name]
        return view.shape(file.shape(held))

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        file, held, view = self.holders[name]
        return view.get(partial(file.get, held), file.shape(held), rows, columns)

    def identity(self) -> bytes:
        parts = [json.dumps(self.config, sort_keys=True).encode()]
        for path, file in sorted(self.files.items()):
            parts += [file.header, *samples(path)]
        return b"".join(parts)


class SafetensorsFile:
    """One memory-mapped file. ``entries`` maps names to dtype and shape as the header has them.

    The format is described in the README of huggingface/safetensors. The header is checked here too, so that a broken
    file gets a sentence that helps.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.header = file.read(length) if length <= MAX_HEADER_BYTES else b""
        try:
            entries: dict[str, dict[str, Any]] = json.loads(self.header)
            entries.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StartupError(f"{path} is not a safetensors file, or it is damaged; download it again.") from error
        size = path.stat().st_size
        if end > size:
            raise StartupError(
                f"{path} is truncated: its tensors end at byte {end:,} but the file has {size:,}; download it again."
            )
        self.entries = entries
        try:
            self.handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path} cannot be read as safetensors ({error}); download it again.") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def dtype(self, name: str) -> str:
        """Raises ``StartupError`` for one that no weights are computed from."""
        dtype = self.entries[name]["dtype"]
        if dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise StartupError(
                f"Tensor {name} of {self.path} has dtype {dtype}, which is not supported; supported: {supported}."
            )
        return DTYPES[dtype]

    def get(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        if not self.entries[name]["shape"]:  # a single number cannot be cut
            return self.handle.get_tensor(name)
        values = self.handle.get_slice(name)
        return values[rows or slice(None)] if columns is None else values[rows or slice(None), columns]


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names, all of them present."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing or not shards:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise StartupError(
                f"{folder} lacks {len(missing)} of the {len(shards)} weight files that {index.name} names ({names}); "
                "download them."
            )
        return [folder / shard for shard in shards]
    if single.exists():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise StartupError(
            f"{folder} has weights in PyTorch's pickle format only, which can run code when read; take a "
            "revision with model.safetensors, or a GGUF file."
        )
    raise StartupError(f"{folder} has no model.safetensors and no model.safetensors.index.json; download the weights.")
