"""Who has a seat, and who has blocks: gives both, and takes them back from the last in order when they run short.

The policy of who may come in, and what a step computes, is the scheduler's; what a block is, blocks.py's.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.draft import Draft
from paceline.cluster.engine.record import Counters
from paceline.cluster.engine.sequence import NEVER, NO_SLOT, Sequence
from paceline.cluster.engine.waiting import WaitingQueue


def _key(seq: Sequence) -> tuple:
    return seq.key


class Residents:
    """``running`` is sorted by key. A waiting sequence holds blocks only if it is a fork: it shares its parent's."""

    def __init__(self, num_seats: int, block_size: int, pool: BlockPool, waiting: WaitingQueue, counters: Counters):
        self.pool = pool
        self.running: list[Sequence] = []
        self._block_size = block_size
        self._waiting = waiting
        self._counters = counters
        self._num_seats = num_seats
        self._free_slots = list(range(num_seats - 1, -1, -1))
        self._releases: list[int] = []  # slots given up since the last plan
        self._holders: list[Sequence] = []  # waiting forks, sorted by key

    @property
    def num_free_seats(self) -> int:
        return len(self._free_slots)

    def take_releases(self) -> list[int]:
        releases, self._releases = self._releases, []
        return releases

    def fits(self, seq: Sequence, hit: list[int], promised: int) -> bool:
        """All ids known of a sequence find blocks, beside what running prompts were promised and some room to decode.

        With nobody running, forks that wait on shared blocks are stripped of them: they are the only holders left.
        """
        while True:
            idle_hits = sum(self.pool.refs[block] == 0 for block in hit)
            needed = -(-len(seq.token_ids) // self._block_size) - len(hit) - len(seq.block_ids)
            headroom = self.pool.num_blocks // 100 if self.running else 0
            if needed <= 0 or needed + headroom <= self.pool.num_free - idle_hits - promised:
                return True
            if self.running or not self._strip_holder(besides=seq):
                return False

    def seat(self, draft: Draft, seq: Sequence, hit: list[int]) -> None:
        """A waiting sequence begins to run, after the cached blocks ``hit``."""
        self._waiting.remove(seq)
        if seq.block_ids:
            self._holders.remove(seq)
        else:
            for block in hit:
                self.pool.acquire(block)
            seq.block_ids = hit
            seq.capacity = len(hit) * self._block_size
            seq.num_planned = seq.num_computed = seq.capacity
            seq.num_named = len(hit)
            self._account_start(seq)
        seq.next_name_at = (seq.num_named + 1) * self._block_size if seq.cacheable else NEVER
        seq.slot = self._free_slots.pop()
        insort(self.running, seq, key=_key)
        draft.seat(seq)

    def _account_start(self, seq: Sequence) -> None:
        counters, hit_len = self._counters, seq.num_planned
        if not seq.started:
            seq.started = True
            seq.num_cached = min(hit_len, seq.num_prompt)
            counters.prompt += seq.num_prompt
            counters.cached += seq.num_cached
        else:  # another one with the same ids may have got further meanwhile
            counters.recomputed += max(0, seq.num_lost - hit_len)

    def hold(self, child: Sequence, shared: list[int]) -> None:
        """A fork waits, and holds its parent's blocks meanwhile."""
        for block in shared:
            self.pool.acquire(block)
        child.block_ids = list(shared)
        child.capacity = len(shared) * self._block_size
        self._waiting.push(child)
        insort(self._holders, child, key=_key)

    def leave(self, seq: Sequence) -> None:
        """A sequence ends, wherever it is."""
        if seq.slot == NO_SLOT:
            self._waiting.remove(seq)
            if seq.block_ids:
                self._holders.remove(seq)
        self._vacate(seq)

    def make_room(self, draft: Draft, seq: Sequence, end: int) -> int:
        """Blocks for positions up to ``end``, preempting later sequences if needed; returns how far they reach."""
        pool, block_size = self.pool, self._block_size
        start = seq.num_planned
        if end <= seq.num_held:
            return end
        if start < seq.shared_end:
            index = start // block_size
            shared = seq.block_ids[index]
            if pool.refs[shared] > 1:
                if not pool.num_free and not self._reclaim(draft, seq):
                    return start
                if pool.refs[shared] > 1:  # the reclaimed one may have been the other holder
                    own = pool.allocate()
                    draft.copies.append((shared, own))
                    draft.put_block(seq, index, own)
                    pool.release((shared,))
                    seq.block_ids[index] = own
                    self._counters.copies += 1
            # Its parent may have filled and named it before the fork was known (depth 2): that content ends here.
            pool.unname(seq.block_ids[index])
            seq.shared_end = 0
        while seq.capacity < end:
            if not pool.num_free and not self._reclaim(draft, seq):
                break
            block = pool.allocate()
            draft.put_block(seq, len(seq.block_ids), block)
            seq.block_ids.append(block)
            seq.capacity += block_size
        return min(end, seq.capacity)

    def _reclaim(self, draft: Draft, seq: Sequence) -> bool:
        """Frees a block by taking those of the last in order; never of one before ``seq`` or in this plan."""
        while not self.pool.num_free:
            victim = next((s for s in reversed(self.running) if s is seq or s.planned_in != draft.step_id), seq)
            if self._holders and self._holders[-1].key > victim.key:
                self._strip_holder()
            elif victim is not seq:
                draft.preempted.append((victim.request_id, seq.request_id))
                self._preempt(victim)
            elif not self._strip_holder():
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._counters.preemptions += 1
        seq.num_lost = seq.num_planned
        self._vacate(seq)
        self._waiting.push(seq)

    def _strip_holder(self, besides: Sequence | None = None) -> bool:
        """The last waiting fork gives up the blocks it shares and becomes an ordinary sequence."""
        victim = next((s for s in reversed(self._holders) if s is not besides), None)
        if victim is None:
            return False
        self._counters.preemptions += 1
        victim.num_lost = victim.num_planned
        self._holders.remove(victim)
        self._vacate(victim)
        return True

    def _vacate(self, seq: Sequence) -> None:
        """Back to nothing: blocks, slot and cursors go, results in flight become old."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.capacity = seq.shared_end = seq.num_held = seq.num_named = 0
        seq.next_name_at = NEVER
        seq.num_planned = seq.num_computed = seq.num_pending = 0
        seq.epoch += 1
        if seq.slot != NO_SLOT:
            index = bisect_left(self.running, seq.key, key=_key)
            del self.running[index]
            self._releases.append(seq.slot)
            self._free_slots.append(seq.slot)
            seq.slot = NO_SLOT

    def check(self, waiting: list[Sequence], alive: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        self.pool.check(seq.block_ids for seq in alive)
        assert [s.key for s in self.running] == sorted(s.key for s in self.running), "running is out of order"
        assert sum(bool(s.block_ids) for s in waiting) == len(self._holders), "a waiting one holds blocks"
        slots = [s.slot for s in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._num_seats)), "a slot is lost"
