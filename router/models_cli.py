"""What `paceline models` and `paceline fits` print: lines of text or JSON. They are handed what worker/ found out."""

import json
from collections.abc import Sequence
from typing import Any

from paceline.proto.units import size_text

HEADINGS = ("family", "Hugging Face architecture", "GGUF", "windows", "-tp", "-pp")
# The last line of the table: it stands for all that has no family.
FALLBACK = ("fallback", "any other decoder, by transformers", "-", "yes", "by its plan", "-")
FALLBACK_NOTE = (
    "fallback: transformers computes the layers, over the paged cache. It needs pip install 'paceline[transformers]'."
)


def models_text(models: Sequence[Any]) -> str:
    """``models``: rows of worker/supported.py."""
    rows = [HEADINGS]
    for model in models:
        windows = "yes" if model.windows else "-"
        rows.append((model.name, ", ".join(model.architectures), ", ".join(model.gguf) or "-", windows, "yes", "yes"))
    rows.append(FALLBACK)
    return "\n".join([*_aligned(rows), "", FALLBACK_NOTE])


def fit_json(fit: Any) -> str:
    """``fit``: of worker/fits.py. Sizes in bytes, lengths in tokens; lists go by rank."""
    memory = fit.memory
    suggestion = fit.suggestion
    return json.dumps(
        {
            "gpu": fit.gpu,
            "tensor_parallel_size": fit.tp,
            "pipeline_parallel_size": fit.pp,
            "fits": fit.is_whole,
            "weight_bytes": [need.weights for need in fit.needs],
            "kv_bytes_per_token": [need.token for need in fit.needs],
            "num_kv_blocks": memory.num_kv_blocks if memory else 0,
            "block_size": fit.block_size,
            "max_model_len": memory.max_model_len if memory else 0,
            "wanted_len": fit.wanted_len,
            "full_length_requests": memory.full_length_requests if memory else 0,
            "reason": fit.reason,
            "suggestion": suggestion
            and {"tensor_parallel_size": suggestion[0], "pipeline_parallel_size": suggestion[1]},
        }
    )


def fit_text(fit: Any) -> str:
    """A few lines. Where ranks differ, the largest is told."""
    ranks = fit.tp * fit.pp
    where = f"{_gpu(fit.gpu)}{f' x {ranks} ({_flags(fit.tp, fit.pp)})' if ranks > 1 else ''}"
    each = " a rank" if ranks > 1 else ""
    rows = [
        ("weights", f"{size_text(max(need.weights for need in fit.needs))}{each}"),
        ("KV", f"{max(need.token for need in fit.needs):,} bytes a token{each}"),
    ]
    memory = fit.memory
    if memory is None:
        verdict = "does not fit"
    else:
        rows.append(("pool", f"{memory.num_kv_blocks:,} blocks of {memory.block_size} tokens"))
        rows.append(("requests", f"{memory.full_length_requests:,} of {memory.max_model_len:,} tokens at once"))
        verdict = "fits" if fit.is_whole else f"fits only requests of up to {memory.max_model_len:,} tokens"
    lines = [f"{where}: {verdict}", *(f"  {line}" for line in _aligned(rows))]
    if fit.reason:
        lines.append(f"  {fit.reason}")
    if fit.suggestion:
        lines.append(f"  {fit.wanted_len:,} tokens fit with {_flags(*fit.suggestion)}")
    return "\n".join(lines)


def _gpu(gpu: str) -> str:
    return gpu if gpu[:1].isalpha() else f"{gpu} GiB"


def _flags(tp: int, pp: int) -> str:
    sizes = (("--tensor-parallel-size", tp), ("--pipeline-parallel-size", pp))
    return " ".join(f"{flag} {size}" for flag, size in sizes if size > 1)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
