"""Who has a seat, and who has blocks: gives both, and takes them back from the last in order when they run short.

The policy of who may come in, and what a step computes, is the scheduler's; what a block is, blocks.py's; what a KV
group's window means in blocks, paging.py's. A sequence has as many table entries in every group; those that have left a
group's window are null.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.draft import Draft
from paceline.cluster.engine.prefix import find_prefix
from paceline.cluster.engine.record import Counters
from paceline.cluster.engine.sequence import NEVER, NO_SLOT, Sequence
from paceline.cluster.engine.waiting import WaitingQueue
from paceline.proto.paging import Paging
from paceline.proto.step import NULL_BLOCK


def _key(seq: Sequence) -> tuple:
    return seq.key


class Residents:
    """``running`` is sorted by key. A waiting sequence holds blocks only if it is a fork: it shares its parent's."""

    def __init__(self, num_seats: int, paging: Paging, pool: BlockPool, waiting: WaitingQueue, counters: Counters):
        self.pool = pool
        self.running: list[Sequence] = []
        self._paging = paging
        self._block_size = paging.block_size
        self._num_groups = len(paging.windows)
        self._windowed = [(group, window) for group, window in enumerate(paging.windows) if window]
        self._most_blocks = [paging.most_blocks(window) for window in paging.windows]
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

    def find_prefix(self, seq: Sequence) -> list[list[int]]:
        """By group, cached blocks that a waiting sequence may begin after: never all of its ids, and none that come
        before a prompt id whose logprobs are still to be told, for a cached position has no logits."""
        limit = (min(len(seq.token_ids), seq.untold) - 1) // self._block_size
        if not self._windowed and self._num_groups == 1:
            return [self.pool.match(seq.hashes, limit)]
        return find_prefix(self.pool, seq.hashes, limit, self._paging)

    def fits(self, seq: Sequence, hit: list[list[int]], promised: int) -> bool:
        """All ids known of a sequence find blocks, beside what running prompts were promised and some room to decode.

        With nobody running, forks that wait on shared blocks are stripped of them: they are the only holders left.
        """
        held = len(hit[0]) if hit else seq.capacity // self._block_size
        new = -(-len(seq.token_ids) // self._block_size) - held  # in each group
        if new <= 0:
            return True
        while True:
            needed = 0
            for block_ids, most in zip(hit, self._most_blocks, strict=True):
                idle = sum(block != NULL_BLOCK and self.pool.refs[block] == 0 for block in block_ids)
                needed += new + idle if most is None else min(new + idle, most)
            headroom = self.pool.num_blocks // 100 if self.running else 0
            if needed + headroom <= self.pool.num_free - promised:
                return True
            if self.running or not self._strip_holder(besides=seq):
                return False

    def promise(self, seq: Sequence) -> int:
        """Blocks that a running sequence will take for its known ids, beside those that it holds."""
        new = -(-len(seq.token_ids) // self._block_size) - seq.capacity // self._block_size
        if new <= 0:
            return 0
        if not self._windowed:
            return new * self._num_groups
        promised = 0
        for block_ids, most in zip(seq.block_ids, self._most_blocks, strict=True):
            held = len(block_ids) - block_ids.count(NULL_BLOCK)
            promised += new if most is None else min(new, max(0, most - held))
        return promised

    def seat(self, draft: Draft, seq: Sequence, hit: list[list[int]]) -> None:
        """A waiting sequence begins to run, after the cached blocks ``hit``, by group."""
        self._waiting.remove(seq)
        if seq.block_ids:
            self._holders.remove(seq)
        else:
            self._acquire(hit)
            seq.block_ids = hit
            seq.num_named = len(hit[0])
            seq.capacity = seq.num_named * self._block_size
            seq.num_planned = seq.num_computed = seq.capacity
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

    def hold(self, child: Sequence, parent: Sequence, num_blocks: int) -> None:
        """A fork waits, and meanwhile holds its parent's first blocks, so many in each group."""
        child.block_ids = [block_ids[:num_blocks] for block_ids in parent.block_ids]
        self._acquire(child.block_ids)
        child.capacity = num_blocks * self._block_size
        self._waiting.push(child)
        insort(self._holders, child, key=_key)

    def _acquire(self, block_ids: list[list[int]]) -> None:
        for group in block_ids:
            for block in group:
                if block != NULL_BLOCK:
                    self.pool.acquire(block)

    def leave(self, seq: Sequence) -> None:
        """A sequence ends, wherever it is."""
        if seq.slot == NO_SLOT:
            self._waiting.remove(seq)
            if seq.block_ids:
                self._holders.remove(seq)
        self._vacate(seq)

    def name(self, seq: Sequence, end: int) -> None:
        """Blocks up to index ``end`` are full, or will be by the plan that is made, and can be found from now on. Those
        that have left a window before anybody knew their name stay without one."""
        for index in range(seq.num_named, end):
            for group, block_ids in enumerate(seq.block_ids):
                if block_ids[index] != NULL_BLOCK:
                    self.pool.name(block_ids[index], seq.hashes[index], group)
        seq.num_named = end
        seq.next_name_at = (end + 1) * self._block_size

    def make_room(self, draft: Draft, seq: Sequence, end: int) -> int:
        """Blocks for positions up to ``end`` in every group, preempting later sequences if needed; returns how far they
        reach."""
        pool, start = self.pool, seq.num_planned
        if end <= seq.num_held:
            return end
        if self._windowed:
            self.drop_passed(seq)
        if start < seq.shared_end and not self._make_own(draft, seq, start // self._block_size):
            return start
        while seq.capacity < end:
            if pool.num_free < self._num_groups and not self._reclaim(draft, seq, self._num_groups):
                break
            for group, block_ids in enumerate(seq.block_ids):
                block = pool.allocate()
                draft.put_block(seq, group, len(block_ids), block)
                block_ids.append(block)
            seq.capacity += self._block_size
        return min(end, seq.capacity)

    def drop_passed(self, seq: Sequence) -> None:
        """Lets go of blocks that no query from ``num_planned`` on sees: of the sequence, or of a fork yet to come, that
        begins with the prompt's last token.

        Plans that read them come before any plan that is made from now on, but for the one that is being made: call it
        before the sequence's row is put there, or when no more blocks are given away in it. Ranks are told nothing: the
        entries of their tables stay, and are not read.
        """
        position = min(seq.num_planned, seq.num_prompt - 1) if seq.num_to_fork else seq.num_planned
        for group, window in self._windowed:
            block_ids, passed = seq.block_ids[group], []
            index = self._paging.first_block(window, position) - 1
            while index >= 0 and block_ids[index] != NULL_BLOCK:
                passed.append(block_ids[index])
                block_ids[index] = NULL_BLOCK
                index -= 1
            if passed:
                self.pool.release(passed[::-1])

    def _make_own(self, draft: Draft, seq: Sequence, index: int) -> bool:
        """Block ``index`` will be written: where others hold it too, a copy takes its place. False: no room."""
        pool = self.pool
        while sum(pool.refs[block_ids[index]] > 1 for block_ids in seq.block_ids) > pool.num_free:
            if not self._take_back(draft, seq):  # perhaps from the other holder
                return False
        for group, block_ids in enumerate(seq.block_ids):
            shared = block_ids[index]
            if pool.refs[shared] > 1:
                own = pool.allocate()
                draft.copies.append((group, shared, own))
                draft.put_block(seq, group, index, own)
                pool.release((shared,))
                block_ids[index] = own
                self._counters.copies += 1
            # Its parent may have filled and named it before the fork was known (depth 2): that content ends here.
            pool.unname(block_ids[index])
        seq.shared_end = 0
        return True

    def _reclaim(self, draft: Draft, seq: Sequence, count: int) -> bool:
        """So many blocks become free, if taking back can do it."""
        while self.pool.num_free < count:
            if not self._take_back(draft, seq):
                return False
        return True

    def _take_back(self, draft: Draft, seq: Sequence) -> bool:
        """The blocks of the last in order go back; never of one before ``seq`` or in this plan. They may be shared."""
        victim = next((s for s in reversed(self.running) if s is seq or s.planned_in != draft.step_id), seq)
        if self._holders and self._holders[-1].key > victim.key:
            return self._strip_holder()
        if victim is seq:
            return self._strip_holder()
        draft.preempted.append((victim.request_id, seq.request_id))
        self._preempt(victim)
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
        # The tail is the first to be taken again: in all groups, as a prefix needs them together.
        self.pool.release([block for entries in zip(*seq.block_ids, strict=True) for block in entries if block])
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
        alive = list(alive)
        self.pool.check([block for block in group if block] for seq in alive for group in seq.block_ids)
        for seq in alive:
            for group, window in zip(seq.block_ids, self._paging.windows, strict=bool(seq.block_ids)):
                assert len(group) * self._block_size == seq.capacity, f"{seq} has groups of unlike lengths"
                seen = group[self._paging.first_block(window, seq.num_planned) :]
                assert NULL_BLOCK not in seen, f"{seq} lacks a block that it sees"
        assert [s.key for s in self.running] == sorted(s.key for s in self.running), "running is out of order"
        assert sum(bool(s.block_ids) for s in waiting) == len(self._holders), "a waiting one holds blocks"
        slots = [s.slot for s in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._num_seats)), "a slot is lost"
