"""Until when requests may wait: a heap of times and whose they are. Knows no sequences and no clock.

Times are unix seconds, as a `Request` carries them; what an expired one means is the scheduler's to say.
"""

import heapq
from collections.abc import Callable

from paceline.proto.errors import DeadlineError, FirstTokenTimeout, QueueTimeout, RequestTimeout
from paceline.proto.request import Request

LEAVES: tuple[type[DeadlineError], ...] = (QueueTimeout, FirstTokenTimeout, RequestTimeout)
FEW = 64  # entries that are not worth sweeping


class Deadlines:
    """Entries of requests that have ended stay until their time comes, or until they are the larger part."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, str]] = []  # time, arrival, which of LEAVES, request id
        self._next_sweep = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request, arrival: int, alive: Callable[[str], bool]) -> None:
        """``alive`` tells of a request whether it still runs or waits."""
        times = (request.queue_deadline, request.first_token_deadline, request.deadline)
        for kind, time in enumerate(times):
            if time is not None:
                heapq.heappush(self._heap, (time, arrival, kind, request.request_id))
        if len(self._heap) > self._next_sweep:
            self._heap = [entry for entry in self._heap if alive(entry[3])]
            heapq.heapify(self._heap)
            self._next_sweep = max(FEW, 2 * len(self._heap))

    def passed(self, now: float) -> list[tuple[str, int, type[DeadlineError]]]:
        """(request id, arrival, which time) of all that have passed since the last call, in order."""
        heap = self._heap
        if not heap or heap[0][0] > now:
            return []
        out = []
        while heap and heap[0][0] <= now:
            _, arrival, kind, request_id = heapq.heappop(heap)
            out.append((request_id, arrival, LEAVES[kind]))
        return out
