"""The pool of KV blocks: who holds which, what a full one is called, which one is taken next. No tensors, no requests.

Every block is in exactly one of three states:

    referenced   some sequences read or write it (refs > 0)
    cached       nobody holds it, but it has a name and may be found again
    free         nobody holds it and it means nothing

Cached and free blocks share one list, taken from the front: nameless ones lie in front, then the named ones in the
order in which they were let go (least recently used first). Block 0 is the null block and never leaves.

Blocks of all KV groups are of one kind; a name is found only in the group that it was given in.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

Name = tuple[int, bytes]  # group, name of the content


class BlockPool:
    """Ids 1..num_blocks. ``free_ids`` fixes the order in which fresh blocks are handed out (tests scatter it)."""

    def __init__(self, num_blocks: int, free_ids: Iterable[int] | None = None):
        self.num_blocks = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self._names: list[Name | None] = [None] * (num_blocks + 1)
        self._by_name: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # by group
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(free_ids or range(1, num_blocks + 1))
        if len(self._free) != num_blocks or min(self._free) < 1 or max(self._free) > num_blocks:
            raise ValueError("free_ids must be a permutation of 1..num_blocks")

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can give, cached ones included."""
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A block for one holder; what it was called is forgotten. The caller has seen num_free > 0."""
        block, _ = self._free.popitem(last=False)
        self.unname(block)
        self.refs[block] = 1
        return block

    def match(self, names: Sequence[bytes], limit: int, group: int = 0) -> list[int]:
        """Blocks that hold the longest known run of ``names`` from the first on, at most ``limit``. Takes none."""
        found, by_name = [], self._by_name[group]
        for name in names[:limit]:
            block = by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, name: bytes, group: int = 0) -> int | None:
        """The block of that name, or None. Takes none."""
        return self._by_name[group].get(name)

    def acquire(self, block: int) -> None:
        """One holder more."""
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each, the last first: the tail of a sequence is the first to be taken again."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, name: bytes, group: int = 0) -> None:
        """From now on ``match`` finds this full block. The first block of a name keeps it."""
        by_name = self._by_name[group]
        if name not in by_name:
            by_name[name] = block
            self._names[block] = group, name

    def unname(self, block: int) -> None:
        """The block will be written: nobody may find what it held."""
        key = self._names[block]
        if key is not None:
            group, name = key
            del self._by_name[group][name]
            self._names[block] = None

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """free + cached + referenced = total, and every reference is somebody's. Raises AssertionError."""
        expected = Counter(block for blocks in holders for block in blocks)
        assert not expected[0], "a sequence holds the null block"
        assert 0 not in self._free, "the null block is free"
        for block in range(1, self.num_blocks + 1):
            refs = self.refs[block]
            assert refs == expected[block], f"block {block} has {refs} references, {expected[block]} holders"
            assert (refs == 0) == (block in self._free), f"block {block} with {refs} references is misfiled"
        for group, by_name in self._by_name.items():
            for name, block in by_name.items():
                assert self._names[block] == (group, name), f"block {block} is filed under another name"
        num_names = sum(key is not None for key in self._names)
        assert num_names == sum(map(len, self._by_name.values())), "a name without a file"
