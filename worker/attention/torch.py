"""The reference backend: plain torch on every device, and the oracle of all others.

Decode rows run together. Their blocks are gathered out of the cache and the query heads of one KV group take the place
of query positions, so keys and values are never repeated:

    q  [rows, kv_heads, group, dim]     k, v  [rows, kv_heads, context, dim]     mask  [rows, 1, 1, context]

Rows of very different context lengths would gather mostly padding, so they are cut into runs of like length first (the
batch has them sorted). Prefill chunks run one by one with their own causal mask, and in bf16 on a CPU in tiles of
queries: torch's own kernel multiplies bf16 there at a quarter of the speed of its matrix product.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.worker.batch import Batch

_SPREAD = 2  # a run's longest context has at most this many times the blocks of its shortest ...
_TILE = 128  # queries whose scores over a few thousand keys stay in a core's cache
_SHORT = 16  # ... or this many blocks: below, one more call costs more than the padding


@dataclass(frozen=True, slots=True)
class Decodes:
    """Some decode rows, tokens [start, stop), with one padded context length."""

    start: int
    stop: int
    blocks: torch.Tensor  # [rows * blocks_per_row] int64
    context_len: int  # the longest
    mask: torch.Tensor | None  # [rows, 1, 1, context_len] bool, True: look; None where all are equally long


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill row, tokens [start, stop). With no blocks it begins its sequence: its own k and v are its context."""

    start: int
    stop: int
    blocks: torch.Tensor | None  # [blocks] int64
    context_len: int
    mask: torch.Tensor | None  # [chunk_len, context_len] bool; None: plainly causal


@dataclass(frozen=True, slots=True)
class Metadata:
    write_to: torch.Tensor  # [tokens]
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]
    future: torch.Tensor  # [tile, tile], -inf above the diagonal


class TorchAttention:
    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"it computes in floating point, not {dtype}"

    def prepare(self, batch: Batch, block_size: int) -> Metadata:
        num_blocks = -(-batch.context_lens // block_size)
        runs = _runs(num_blocks[: batch.num_decodes])
        return Metadata(
            write_to=batch.write_to,
            decodes=tuple(_decodes(batch, num_blocks, start, stop) for start, stop in runs),
            chunks=tuple(_chunk(batch, num_blocks, row) for row in range(batch.num_decodes, len(batch.slots))),
            future=torch.full((_TILE, _TILE), float("-inf"), device=batch.ids.device).triu_(1),
        )

    def forward(self, q, k, v, keys, values, metadata: Metadata, *, scale: float) -> torch.Tensor:
        keys.view(-1, *keys.shape[2:]).index_copy_(0, metadata.write_to, k)
        values.view(-1, *values.shape[2:]).index_copy_(0, metadata.write_to, v)
        parts = [_attend_decodes(q[run.start : run.stop], keys, values, run, scale) for run in metadata.decodes]
        for chunk in metadata.chunks:
            own = slice(chunk.start, chunk.stop)
            if chunk.blocks is None:
                context_k, context_v = k[own], v[own]
            else:
                context_k = _gather(keys, chunk.blocks)[: chunk.context_len]
                context_v = _gather(values, chunk.blocks)[: chunk.context_len]
            if q.dtype == torch.bfloat16 and q.device.type == "cpu":
                parts.append(_attend_chunk_in_tiles(q[own], context_k, context_v, metadata.future, scale))
            else:
                parts.append(_attend_chunk(q[own], context_k, context_v, chunk.mask, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(num_blocks: np.ndarray) -> list[tuple[int, int]]:
    """Cuts ascending block counts into runs [start, stop) of like length."""
    runs, start = [], 0
    while start < len(num_blocks):
        limit = max(_SHORT, _SPREAD * int(num_blocks[start]))
        stop = int(np.searchsorted(num_blocks, limit, side="right"))
        runs.append((start, stop))
        start = stop
    return runs


def _decodes(batch: Batch, num_blocks: np.ndarray, start: int, stop: int) -> Decodes:
    device = batch.ids.device
    contexts = batch.context_lens[start:stop]
    longest = int(contexts[-1])
    blocks = batch.blocks[start:stop, : int(num_blocks[stop - 1])].astype(np.int64).ravel()
    mask = None
    if contexts[0] != longest:
        looks = np.arange(longest) < contexts[:, None]
        mask = torch.from_numpy(looks[:, None, None, :]).to(device, non_blocking=True)
    return Decodes(start, stop, torch.from_numpy(blocks).to(device, non_blocking=True), longest, mask)


def _chunk(batch: Batch, num_blocks: np.ndarray, row: int) -> Chunk:
    device = batch.ids.device
    start, stop = int(batch.first_tokens[row]), int(batch.first_tokens[row] + batch.lengths[row])
    context_len = int(batch.context_lens[row])
    if batch.starts[row] == 0:
        return Chunk(start, stop, None, context_len, None)
    blocks = torch.from_numpy(batch.blocks[row, : int(num_blocks[row])].astype(np.int64)).to(device, non_blocking=True)
    queries = torch.arange(int(batch.starts[row]), context_len, device=device)
    mask = torch.arange(context_len, device=device) <= queries[:, None]
    return Chunk(start, stop, blocks, context_len, mask)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The blocks' entries in order: [blocks * block_size, kv_heads, dim]."""
    return cache.index_select(0, blocks).flatten(0, 1)


def _attend_decodes(q, keys, values, run: Decodes, scale: float) -> torch.Tensor:
    rows, num_heads, dim = q.shape
    kv_heads = keys.shape[2]
    k = _gather(keys, run.blocks).view(rows, -1, kv_heads, dim)[:, : run.context_len].transpose(1, 2)
    v = _gather(values, run.blocks).view(rows, -1, kv_heads, dim)[:, : run.context_len].transpose(1, 2)
    q = q.reshape(rows, kv_heads, num_heads // kv_heads, dim)
    out = scaled_dot_product_attention(q, k, v, attn_mask=run.mask, scale=scale)  # [rows, kv_heads, group, dim]
    return out.reshape(rows, num_heads * dim)


def _attend_chunk(q, k, v, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """q [chunk, heads, dim], k and v [context, kv_heads, dim]. KV heads are the batch, shared by stride 0."""
    length, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    group = num_heads // kv_heads
    q = q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, chunk, dim]
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)  # [kv_heads, group, context, dim]
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(length, num_heads * dim)


def _attend_chunk_in_tiles(q, k, v, future: torch.Tensor, scale: float) -> torch.Tensor:
    """The same by two plain products per tile of queries, which look at nothing behind their own last position."""
    length, num_heads, dim = q.shape
    context_len, kv_heads, _ = k.shape
    group = num_heads // kv_heads
    q = (q * scale).view(length, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, chunk, dim]
    k = k.permute(1, 2, 0).contiguous()  # [kv_heads, dim, context]
    v = v.transpose(0, 1).contiguous()  # [kv_heads, context, dim]
    parts = []
    for first in range(0, length, _TILE):
        size = min(_TILE, length - first)
        seen = context_len - length + first + size
        scores = torch.bmm(q[:, :, first : first + size].reshape(kv_heads, group * size, dim), k[:, :, :seen])
        scores = scores.view(kv_heads, group, size, seen)
        scores[..., seen - size :] += future[:size, :size]
        weights = scores.softmax(-1).view(kv_heads, group * size, seen)
        parts.append(torch.bmm(weights, v[:, :seen]).view(kv_heads, group, size, dim))
    return torch.cat(parts, 2).permute(2, 0, 1, 3).reshape(length, num_heads * dim)
