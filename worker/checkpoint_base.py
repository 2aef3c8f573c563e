"""The interface over model files of any kind: a spec, named tensors, a vocabulary, and what makes them this model.

Knows nothing of file formats (folder: checkpoint.py, GGUF: gguf.py), of ranks, devices or dtypes to compute in. Which
names a model must have is the loader's knowledge; here it is only said which ones the files hold.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.proto.errors import StartupError
from paceline.worker.models.spec import ModelSpec

SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 8


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to turn text into ids and back, and to know where an answer ends.

    ``tokenizer_json`` is read by the ``tokenizers`` library; its post-processor agrees with ``add_bos``: encoding with
    special tokens differs from encoding without by one leading BOS where ``add_bos`` is true, else by nothing.
    ``template_tokens`` are the strings that a chat template may name: bos_token, eos_token, ...
    """

    tokenizer_json: str
    chat_template: str | None = None
    template_tokens: dict[str, str] = {}
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()


class Checkpoint(ABC):
    """A model on disk. Tensors go by their Hugging Face names, weights are [out, in], q and k rows are in halves.

    ``stored_dtype`` is the dtype (float32, bfloat16, float16) in which ``get`` hands out most of the weights.
    ``generation_defaults`` holds those of temperature, top_k, top_p, min_p and repetition_penalty that the model's
    authors recommend. Opening reads headers and small files only; every flaw that they show raises ``StartupError``.
    """

    path: Path
    spec: ModelSpec
    vocabulary: Vocabulary
    stored_dtype: str
    generation_defaults: dict[str, float | int]

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors, without those that carry no weights of their own (rotary buffers, a tied head)."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises KeyError for a name that is not in ``names()``."""

    @abstractmethod
    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """The tensor, or ``[start, stop)`` of its first and second dimension; only that is read. A copy, on the CPU."""

    def kinds(self) -> dict[str, str]:
        """ggml's types of the tensors that the files hold quantized: Q4_0, Q8_0, ..."""
        return {}

    @abstractmethod
    def identity(self) -> bytes:
        """Equal for equal weights and config, cheaply: headers, sizes and samples of each file, not every byte."""


def checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """The spec, if a decoder of that shape can exist. Raises ``StartupError`` naming the numbers that do not fit."""
    sizes = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layers": spec.num_layers,
        "heads": spec.num_heads,
        "KV heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocabulary": spec.vocab_size,
        "positions": spec.max_position,
    }
    if wrong := [f"{value} {name}" for name, value in sizes.items() if value < 1]:
        raise StartupError(f"{path} describes a model with {', '.join(wrong)}; take the model as it was published.")
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise StartupError(
            f"{path} describes {spec.num_heads} heads of {spec.head_dim} values over {spec.num_kv_heads} KV heads; "
            "heads must share KV heads evenly and be of even size."
        )
    return spec


def samples(path: Path) -> Iterator[bytes]:
    """The size of a file and a few pieces spread evenly over it, the first and the last byte among them."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    last = max(size - SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(SAMPLES_PER_FILE):
            file.seek(last * i // (SAMPLES_PER_FILE - 1))
            yield file.read(SAMPLE_BYTES)


def bos_processor(token: str, token_id: int) -> dict[str, Any]:
    """The ``tokenizers`` post-processor that puts BOS before a text, as JSON."""
    bos, first, second = {"SpecialToken": {"id": token, "type_id": 0}}, "A", "B"
    return {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": first, "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": first, "type_id": 0}}, {"Sequence": {"id": second, "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def with_bos(tokenizer_json: str, bos: tuple[str, int] | None) -> str:
    """The tokenizer with a post-processor that adds this BOS (token, id), or, for None, nothing at all."""
    tokenizer = json.loads(tokenizer_json)
    tokenizer["post_processor"] = bos_processor(*bos) if bos else None
    return json.dumps(tokenizer, ensure_ascii=False)
