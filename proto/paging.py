"""How many KV blocks a sequence takes: arithmetic on which the engine and whoever sizes its pool must agree.

Layers come in groups of one window (worker/kv_groups.py says which), each group with a block table of its own, and all
tables take their blocks from one pool. A group that sees all keeps every block; one with a window keeps those that a
query to come still sees. A query at position p sees p - window + 1 .. p:

    blocks of 16, window 24, next query at 45    | 0 has left | 1, from 22 on | 2, with the query |
"""

from bisect import bisect_right

import msgspec


def plan_budget(max_num_batched_tokens: int, num_stages: int) -> int:
    """Tokens of one plan: stages that work at the same time share the budget of a step."""
    return -(-max_num_batched_tokens // num_stages)


class Paging(msgspec.Struct, frozen=True):
    """``windows``: by group, tokens that a query sees, itself included; 0 sees all. ``budget``: tokens that one plan
    computes of a sequence at most: the blocks of the first one's window and of the last one are held together."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    budget: int = 1

    def first_block(self, window: int, position: int) -> int:
        """Index of the first block that a query at ``position`` sees."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def most_blocks(self, window: int) -> int | None:
        """That a sequence of any length holds at once in a group with this window; None where there is no such end."""
        return -(-(window + self.budget - 2) // self.block_size) + 1 if window else None

    def num_blocks(self, length: int) -> int:
        """That a sequence of ``length`` tokens holds at once, at most, in all groups together."""
        whole = -(-length // self.block_size)
        return sum(min(whole, self.most_blocks(window) or whole) for window in self.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that a pool of ``num_blocks`` holds, ``limit`` at most."""
        counts = range(-(-limit // self.block_size) + 1)
        whole = bisect_right(counts, num_blocks, key=lambda count: self.num_blocks(count * self.block_size)) - 1
        return min(limit, whole * self.block_size)
