"""The reference backend: plain torch on every device, and the oracle of all others.

Decode rows run together. Their blocks are gathered out of the cache and the query heads of one KV group take the place
of query positions, so keys and values are never repeated:

    q  [rows, kv_heads, group, dim]     k, v  [rows, kv_heads, context, dim]     mask  [rows, 1, 1, context]

Rows of very different context lengths would gather mostly padding, so they are cut into runs of like length first (the
batch has them sorted). Prefill chunks run one by one with their own causal mask.

Where queries have a window only the blocks that it reaches are gathered, and a context begins with the first of them.
torch's own kernel does all but two things, which plain products do: soft caps and sinks. In bf16 on a CPU chunks are
plain products too, in tiles of queries: the kernel multiplies bf16 there at a quarter of the speed of a matrix product.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.worker.batch import Batch
from paceline.worker.layers.activation import soft_cap

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
    mask: torch.Tensor | None  # [rows, 1, 1, context_len] bool, True: look; None where all look at all


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill row, tokens [start, stop). With no blocks it begins its sequence: its own k and v are its context."""

    start: int
    stop: int
    blocks: torch.Tensor | None  # [blocks] int64
    skipped: int  # entries of the first block that no query sees
    context_len: int  # from the first entry that any query sees
    mask: torch.Tensor | None  # [chunk_len, context_len] bool; None: plainly causal


@dataclass(frozen=True, slots=True)
class Metadata:
    write_to: torch.Tensor  # [tokens]
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]
    future: torch.Tensor  # [tile, tile], -inf above the diagonal


class Scores(NamedTuple):
    """What becomes of q and k before the softmax. ``sinks``: [num_heads]."""

    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None

    @property
    def are_plain(self) -> bool:
        return not self.softcap and self.sinks is None

    def softmax(self, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """scores: [..., kv_heads, group, queries, context], scaled, capped and masked. A sink is one more score in each
        row that nothing is read for."""
        if self.sinks is None:
            return scores.softmax(-1).to(dtype)
        kv_heads, group, queries, _ = scores.shape[-4:]
        sinks = self.sinks.view(kv_heads, group, 1, 1).expand(*scores.shape[:-4], -1, -1, queries, -1)
        return torch.cat((scores.float(), sinks.float()), -1).softmax(-1)[..., :-1].to(dtype)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """In fp32 where there is a cap."""
        return soft_cap(scores.float(), self.softcap) if self.softcap else scores


class TorchAttention:
    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"it computes in floating point, not {dtype}"

    def prepare(self, batch: Batch, block_size: int, group: int = 0, window: int = 0) -> Metadata:
        # Of each row's last query; a longer chunk's first one looks further back.
        first_blocks, num_blocks = _reach(batch.context_lens, block_size, window)
        runs = _runs(num_blocks[: batch.num_decodes])
        spans = (batch.blocks[group], first_blocks, num_blocks)
        chunks = range(batch.num_decodes, len(batch.slots))
        return Metadata(
            write_to=batch.write_to[group],
            decodes=tuple(_decodes(batch, *spans, block_size, window, start, stop) for start, stop in runs),
            chunks=tuple(_chunk(batch, batch.blocks[group], block_size, window, row) for row in chunks),
            future=torch.full((_TILE, _TILE), float("-inf"), device=batch.ids.device).triu_(1),
        )

    def forward(
        self, q, k, v, keys, values, metadata: Metadata, *, scale: float, window=0, softcap=0.0, sinks=None
    ) -> torch.Tensor:
        keys.view(-1, *keys.shape[2:]).index_copy_(0, metadata.write_to, k)
        values.view(-1, *values.shape[2:]).index_copy_(0, metadata.write_to, v)
        scores = Scores(scale, window, softcap, sinks)
        parts = [_attend_decodes(q[run.start : run.stop], keys, values, run, scores) for run in metadata.decodes]
        tiled = not scores.are_plain or (q.dtype == torch.bfloat16 and q.device.type == "cpu")
        for chunk in metadata.chunks:
            own = slice(chunk.start, chunk.stop)
            if chunk.blocks is None:
                context_k, context_v = k[own], v[own]
            else:
                seen = slice(chunk.skipped, chunk.skipped + chunk.context_len)
                context_k, context_v = _gather(keys, chunk.blocks)[seen], _gather(values, chunk.blocks)[seen]
            if tiled:
                parts.append(_attend_chunk_in_tiles(q[own], context_k, context_v, metadata.future, scores))
            else:
                parts.append(_attend_chunk(q[own], context_k, context_v, chunk.mask, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reach(context_lens: np.ndarray, block_size: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(first block that the last query of each row sees, how many it sees), both [rows]."""
    ends = -(-context_lens // block_size)
    firsts = np.maximum(context_lens - window, 0) // block_size if window else np.zeros_like(ends)
    return firsts, ends - firsts


def _runs(num_blocks: np.ndarray) -> list[tuple[int, int]]:
    """Cuts block counts into runs [start, stop) of like length. They ascend, but for one block more or less where a
    window begins."""
    runs, start = [], 0
    ascending = np.maximum.accumulate(num_blocks)
    while start < len(num_blocks):
        limit = max(_SHORT, _SPREAD * int(num_blocks[start]))
        stop = int(np.searchsorted(ascending, limit, side="right"))
        runs.append((start, stop))
        start = stop
    return runs


def _decodes(
    batch: Batch,
    table: np.ndarray,
    first_blocks: np.ndarray,
    num_blocks: np.ndarray,
    block_size: int,
    window: int,
    start: int,
    stop: int,
) -> Decodes:
    device = batch.ids.device
    firsts, width = first_blocks[start:stop], int(num_blocks[start:stop].max())
    ends = batch.context_lens[start:stop] - firsts * block_size  # of contexts that begin with their first block
    longest = int(ends.max())
    if window:
        # A row with fewer blocks than the widest reads its last one again, unseen.
        columns = np.minimum(firsts[:, None] + np.arange(width), (firsts + num_blocks[start:stop] - 1)[:, None])
        blocks = np.take_along_axis(table[start:stop], columns, 1)
    else:
        blocks = table[start:stop, :width]
    mask = None
    if window or ends[0] != longest:
        positions = np.arange(longest)
        looks = positions < ends[:, None]
        if window:
            looks &= positions >= (ends - window)[:, None]
        if not looks.all():
            mask = torch.from_numpy(looks[:, None, None, :]).to(device, non_blocking=True)
    gathered = torch.from_numpy(blocks.astype(np.int64).ravel()).to(device, non_blocking=True)
    return Decodes(start, stop, gathered, longest, mask)


def _chunk(batch: Batch, table: np.ndarray, block_size: int, window: int, row: int) -> Chunk:
    device = batch.ids.device
    start, stop = int(batch.first_tokens[row]), int(batch.first_tokens[row] + batch.lengths[row])
    first_query, end = int(batch.starts[row]), int(batch.context_lens[row])
    first_seen = max(first_query - window + 1, 0) if window else 0
    context_len = end - first_seen
    mask = None
    if first_query or (window and window < context_len):
        queries = torch.arange(first_query, end, device=device)[:, None]
        positions = torch.arange(first_seen, end, device=device)
        mask = positions <= queries
        if window:
            mask &= positions > queries - window
    if first_query == 0:
        return Chunk(start, stop, None, 0, context_len, mask)
    first_block = first_seen // block_size
    blocks = table[row, first_block : -(-end // block_size)].astype(np.int64)
    skipped = first_seen - first_block * block_size
    return Chunk(start, stop, torch.from_numpy(blocks).to(device, non_blocking=True), skipped, context_len, mask)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The blocks' entries in order: [blocks * block_size, kv_heads, dim]."""
    return cache.index_select(0, blocks).flatten(0, 1)


def _attend_decodes(q, keys, values, run: Decodes, scores: Scores) -> torch.Tensor:
    rows, num_heads, dim = q.shape
    kv_heads = keys.shape[2]
    k = _gather(keys, run.blocks).view(rows, -1, kv_heads, dim)[:, : run.context_len].transpose(1, 2)
    v = _gather(values, run.blocks).view(rows, -1, kv_heads, dim)[:, : run.context_len].transpose(1, 2)
    q = q.reshape(rows, kv_heads, num_heads // kv_heads, dim)
    if scores.are_plain:
        out = scaled_dot_product_attention(q, k, v, attn_mask=run.mask, scale=scores.scale)
    else:
        weights = scores.capped(torch.matmul(q * scores.scale, k.transpose(2, 3)))  # [rows, kv_heads, group, context]
        if run.mask is not None:
            weights = weights.masked_fill(~run.mask, float("-inf"))
        out = torch.matmul(scores.softmax(weights.unsqueeze(3), q.dtype).squeeze(3), v)
    return out.reshape(rows, num_heads * dim)  # from [rows, kv_heads, group, dim]


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


def _attend_chunk_in_tiles(q, k, v, future: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The same by two plain products per tile of queries, which look at nothing behind their own last position, and at
    nothing before the window of their first."""
    length, num_heads, dim = q.shape
    context_len, kv_heads, _ = k.shape
    group = num_heads // kv_heads
    q = (q * scores.scale).view(length, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, chunk, dim]
    k = k.permute(1, 2, 0).contiguous()  # [kv_heads, dim, context]
    v = v.transpose(0, 1).contiguous()  # [kv_heads, context, dim]
    parts = []
    for first in range(0, length, _TILE):
        size = min(_TILE, length - first)
        seen = context_len - length + first + size
        begin = seen - size - scores.window + 1 if scores.window else 0  # of the first query's window
        keys = slice(max(begin, 0), seen)
        weights = torch.bmm(q[:, :, first : first + size].reshape(kv_heads, group * size, dim), k[:, :, keys])
        weights = scores.capped(weights).view(kv_heads, group, size, -1)
        weights[..., -size:] += future[:size, :size]
        if scores.window and size + min(begin, 0) > 0:
            # Query i does not see the i keys before its window; where that begins before the context, the later
            # queries do not see as many fewer.
            late = size + min(begin, 0)
            weights[..., size - late :, :late] += future[:late, :late].T
        weights = scores.softmax(weights, q.dtype).view(kv_heads, group * size, -1)
        parts.append(torch.bmm(weights, v[:, keys]).view(kv_heads, group, size, dim))
    return torch.cat(parts, 2).permute(2, 0, 1, 3).reshape(length, num_heads * dim)
