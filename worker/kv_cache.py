"""The paged KV cache of one rank: its tensors and block copies. Knows no sequences; how large it is, memory.py says.

Blocks are numbered by the engine's pool, 1 .. num_blocks; block 0 is the null block, which takes writes that nobody
will read. Which block belongs to whom, and to which group of layers, is the plan's affair: a block is the same piece of
every pair of tensors, and the layers of any group find room in it (kv_groups.py).
"""

from functools import partial

import torch

from paceline.proto.step import StepPlan
from paceline.worker import host_memory
from paceline.worker.kv_groups import kv_groups, locate, num_pairs
from paceline.worker.models.spec import ModelSpec
from paceline.worker.shards import Shard
from paceline.worker.table import column


class KVCache:
    """Of this rank's layers and heads. keys[pair], values[pair]: [num_blocks + 1, block_size, num_kv_heads, dim]; only
    the first dimension is a promise: how a block lies inside is the attention backend's affair.

    locations: by layer of this stage, from its first on, group and pair. windows: of each group that has layers here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_blocks + 1, block_size, shard.kv_heads.size, spec.head_dim)
        self.block_size = block_size
        groups = kv_groups(spec)
        self.locations = locate(groups, shard.layers.start, shard.layers.stop)
        self.windows = {group: groups[group].window for group in sorted({group for group, _ in self.locations})}
        # Zeros, not what memory held: masked entries still take part in products, where 0 * nan would be nan.
        make = partial(host_memory.zeros, shape, dtype)
        if device.type != "cpu":
            make = partial(torch.zeros, shape, dtype=dtype, device=device)
        self.keys = [make() for _ in range(num_pairs(self.locations))]
        self.values = [make() for _ in range(num_pairs(self.locations))]

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0] - 1

    def copy_blocks(self, plan: StepPlan) -> None:
        """The plan's copies, src over dst, whatever their group. All sources are read as they were before the first."""
        if not plan.copy_srcs:
            return
        device = self.keys[0].device
        srcs = torch.from_numpy(column(plan.copy_srcs)).to(device)
        dsts = torch.from_numpy(column(plan.copy_dsts)).to(device)
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, dsts, cache.index_select(0, srcs))


def bytes_per_token(spec: ModelSpec, shard: Shard, dtype: torch.dtype) -> int:
    """That this rank's part of a block holds for one token: of one group's layers, as many as the largest has here."""
    pairs = num_pairs(locate(kv_groups(spec), shard.layers.start, shard.layers.stop))
    return 2 * pairs * shard.kv_heads.size * spec.head_dim * dtype.itemsize
