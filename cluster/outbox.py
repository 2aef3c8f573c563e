"""What waits to be written to one router. The engine never waits for a router: news piles up here, merged, to a limit.

Knows frames and handles; no sockets and no engine.
"""

import asyncio
from collections import deque

from paceline.proto import codec
from paceline.proto.load import ReplicaLoad
from paceline.proto.replica_pb2 import AttachResponse, Heartbeat
from paceline.proto.request import TokenDelta

# Of objects that wait, as `_size` estimates them: some ten seconds of 256 streams at 100 steps a second.
MAX_PENDING_BYTES = 64 << 20


class Outbox:
    """One writer takes frames; all methods belong to the event loop's thread.

    ``overflowed`` is set once its reader is too far behind: nothing is kept from then on. ``end`` lets the writer
    take what is there and then stop.
    """

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        self._control: deque[AttachResponse] = deque()  # goes first: Accepted stands before the deltas it announces
        self._beat: Heartbeat | None = None  # goes second: it is small, and a backlog must not hide it
        self._deltas: list[tuple[int, TokenDelta]] = []
        self._num_bytes = 0
        self._max_bytes = MAX_PENDING_BYTES
        self._ended = False
        self._wake = asyncio.Event()

    def control(self, frame: AttachResponse) -> None:
        self._control.append(frame)
        self._wake.set()

    def deltas(self, rows: list[tuple[int, TokenDelta]]) -> None:
        """Rows of one step as (handle, delta). A router that stopped reading loses its stream, not our memory."""
        if self.overflowed.is_set():
            return
        self._deltas += rows
        self._num_bytes += sum(_size(delta) for _, delta in rows)
        if self._num_bytes > self._max_bytes:
            self._deltas = []
            self._control.clear()
            self.overflowed.set()
        self._wake.set()

    def heartbeat(self, load: ReplicaLoad, draining: bool = False) -> None:
        """Only the newest one is worth sending."""
        self._beat = Heartbeat(load=codec.load_message(load), draining=draining)
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    async def take(self) -> AttachResponse | None:
        """The next frame, all deltas that wait in one; None at the end."""
        while not self.overflowed.is_set():
            if self._control:
                return self._control.popleft()
            if self._beat is not None:
                beat, self._beat = self._beat, None
                return AttachResponse(heartbeat=beat)
            if self._deltas:
                rows, self._deltas, self._num_bytes = self._deltas, [], 0
                return AttachResponse(deltas=codec.deltas_frame(rows))
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        return None


def _size(delta: TokenDelta) -> int:
    """About what a delta holds in memory, in bytes."""
    size = 200 + 8 * len(delta.ids)
    for told in (delta.logprobs, delta.prompt_logprobs):
        if told:
            size += sum(200 + 48 * len(token.top_ids) for token in told)
    return size
