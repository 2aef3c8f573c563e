"""The longest known prefix of a sequence over all KV groups. Takes no blocks and decides nothing about who gets them.

To go on at position p, a group that sees all needs every block before p; one with a window those that the query at p
sees, and its table is empty before. So a prefix may still be good though its first local blocks are long overwritten,
and may be no good though its end is there:

    names            0  1  2  3  4  5
    sees all         x  x  x  x  x           4 blocks of prefix: at 5 the window would need 3 and 4
    sees 2 blocks    x     x  x     x        0 and 1 become null entries
"""

from collections.abc import Sequence

from paceline.cluster.engine.blocks import BlockPool
from paceline.proto.paging import Paging
from paceline.proto.step import NULL_BLOCK


def find_prefix(pool: BlockPool, names: Sequence[bytes], limit: int, paging: Paging) -> list[list[int]]:
    """By group, the blocks of the longest prefix that every group can go on from, ``limit`` blocks at most. The lists
    are of one length, with NULL_BLOCK where a window does not reach."""
    length = min(limit, len(names))
    found: dict[int, list[int]] = {}
    for group, window in enumerate(paging.windows):
        if not window:
            found[group] = pool.match(names, length, group)
            length = len(found[group])
    if len(found) < len(paging.windows):
        while (missing := _last_missing(pool, names, length, paging)) is not None:
            length = missing  # whatever is longer needs it, too, or has been tried
    for group, window in enumerate(paging.windows):
        if window:
            first = paging.first_block(window, length * paging.block_size)
            seen = [pool.find(name, group) or NULL_BLOCK for name in names[first:length]]
            found[group] = [NULL_BLOCK] * first + seen
    return [found[group][:length] for group in range(len(found))]


def _last_missing(pool: BlockPool, names: Sequence[bytes], length: int, paging: Paging) -> int | None:
    """Index of the last block that some window needs after ``length`` blocks, and that is not there."""
    missing = None
    for group, window in enumerate(paging.windows):
        if not window:
            continue
        for index in range(length - 1, paging.first_block(window, length * paging.block_size) - 1, -1):
            if pool.find(names[index], group) is None:
                missing = index if missing is None else max(missing, index)
                break
    return missing
