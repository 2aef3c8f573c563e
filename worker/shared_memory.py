"""Sums, gathers and shares among ranks on one CPU host, through memory that they all map. Knows no layers and no plans.

    counters   one a rank, each on its own cache line
    turn 0     rank 0's part | rank 1's part | ...        BUFFER bytes each
    turn 1     rank 0's part | rank 1's part | ...

Operations are numbered. In operation n a rank writes its part into turn n % 2, raises its counter to n and, if it has
anything to read, waits for the others' counters. A counter at n says two things: part n is written, and everything
before n has been read. So turn n % 2, which operation n - 2 had used, is free once all counters have reached n - 1.

The memory has no name (memfd): ranks open it through the process that made it, so whatever dies, nothing is left. Plain
loads and stores keep this order on x86-64 only (a copy that goes round the caches ends with a fence); elsewhere
`can_map` says no, and gloo does the work.
"""

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

BUFFER = 1 << 20  # bytes of one part; larger tensors go in pieces
LINE = 64  # bytes of a cache line
HEAD = 4096  # bytes before the parts: counters, and the maker's token at the end
TOKEN_AT = HEAD - LINE

# The others are microseconds away while a step runs, so a rank looks again and again at first. It never yields its
# core: a busy neighbour would keep it for a whole time slice, while who sleeps is woken at once. Measured on two cores,
# two ranks, a small product and its sum: 60 to 140 µs either way; beside two busy neighbours 150 to 290 µs, and 1,600
# with yields.
SPINS = 1000  # looks; about 50 µs
NAP = 0.00005  # seconds
LONGEST_NAP = 0.001
ASK_EVERY = 0.25  # seconds of waiting between two looks at whether anybody still wants the result

StillWanted = Callable[[], None]


def can_map() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def make(num_ranks: int, token: bytes) -> int:
    """A file descriptor of new memory, to be kept open until every rank has mapped it. Raises OSError."""
    fd = os.memfd_create("paceline-ranks")
    os.ftruncate(fd, _size(num_ranks))
    os.pwrite(fd, token, TOKEN_AT)
    return fd


def open_of(pid: int, fd: int, token: bytes) -> int:
    """The memory that process ``pid`` made. Raises OSError where it cannot be had, as from another container."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    if os.pread(opened, len(token), TOKEN_AT) != token:
        os.close(opened)
        raise OSError(f"process {pid} is another one here")
    return opened


def _size(num_ranks: int) -> int:
    return HEAD + 2 * num_ranks * BUFFER


class SharedMemory:
    """One rank's side. All ranks call the same operations in the same order; tensors are on the CPU."""

    def __init__(self, fd: int, rank: int, num_ranks: int, still_wanted: StillWanted):
        """Maps ``fd``, which may be closed then. ``still_wanted`` is called while a wait lasts; it raises to end it."""
        self.rank, self.num_ranks = rank, num_ranks
        self._still_wanted = still_wanted
        memory = mmap.mmap(fd, _size(num_ranks))
        self._counters = memoryview(memory).cast("q")
        self._parts = torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD).view(2, num_ranks, BUFFER)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._turn = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In place where ``x`` is contiguous. Added in fp32 and in the order of ranks: all get the same bits."""
        x = x.contiguous()
        flat = x.view(-1)
        room = BUFFER // x.element_size()
        for start in range(0, len(flat), room):
            piece = flat[start : start + room]
            parts = self._begin(x.dtype)[:, : len(piece)]
            parts[self.rank].copy_(piece)
            self._arrive()
            self._wait(self.num_ranks)
            _add_up(parts, piece)
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """[rows, sizes[rank]] of each as [rows, sum(sizes)] on rank 0; None on the others, who do not wait for it."""
        out = x.new_empty(len(x), sum(sizes)) if self.rank == 0 else None
        widest, room = max(sizes), BUFFER // x.element_size()
        width = min(widest, room)
        height = room // width
        for top in range(0, len(x), height):
            for left in range(0, widest, width):
                piece = x[top : top + height, left : left + width]
                parts = self._begin(x.dtype)
                _shaped(parts[self.rank], piece.shape).copy_(piece)
                self._arrive()
                if out is None:
                    continue
                self._wait(self.num_ranks)
                for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
                    first = end - size
                    to = out[top : top + height, min(first + left, end) : min(first + left + width, end)]
                    to.copy_(_shaped(part, to.shape))
        return out

    def share(self, x: torch.Tensor | None, num: int) -> torch.Tensor:
        """[num] int64 of rank 0, who alone has ``x`` and does not wait, on every rank."""
        out = torch.empty(num, dtype=torch.int64) if x is None else x
        room = BUFFER // out.element_size()
        for start in range(0, num, room):
            piece = out[start : start + room]
            part = self._begin(out.dtype)[0, : len(piece)]
            if x is None:
                self._arrive()
                self._wait(1)
                piece.copy_(part)
            else:
                part.copy_(piece)
                self._arrive()
        return out

    def _begin(self, dtype: torch.dtype) -> torch.Tensor:
        """The next operation's parts, [num_ranks, entries], once nobody reads them any more."""
        self._wait(self.num_ranks)
        self._turn += 1
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = self._parts.view(dtype)
        return views[self._turn % 2]

    def _arrive(self) -> None:
        self._counters[self.rank * LINE // 8] = self._turn

    def _wait(self, num_ranks: int) -> None:
        """Until the first ``num_ranks`` have arrived at this operation."""
        counters, turn = self._counters, self._turn
        for at in range(0, num_ranks * LINE // 8, LINE // 8):
            spins = SPINS
            while counters[at] < turn:
                spins -= 1
                if not spins:
                    self._nap(at)
                    break

    def _nap(self, at: int) -> None:
        """Until counter ``at`` is there. Naps get longer as the wait does."""
        began = asked = now = time.monotonic()
        while self._counters[at] < self._turn:
            time.sleep(min(max((now - began) / 8, NAP), LONGEST_NAP))
            now = time.monotonic()
            if now - asked > ASK_EVERY:
                self._still_wanted()
                asked = now


def _add_up(parts: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == torch.float32:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def _shaped(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return part[: shape[0] * shape[1]].view(shape)
