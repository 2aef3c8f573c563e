"""What waits to be written to one router. The engine never waits for a router: news piles up here, merged, to a limit.

Knows frames and handles; no sockets and no engine.
"""

import asyncio
from collections import deque

from paceline.proto import codec
from paceline.proto.load import ReplicaLoad
from paceline.proto.replica_pb2 import AttachResponse, Heartbeat
from paceline.proto.request import TokenDelta

MAX_PENDING_IDS = 4_000_000  # about 16 MB: a router that is this far behind has failed


class Outbox:
    """One writer takes frames, in order; all methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._control: deque[AttachResponse] = deque()  # goes first: Accepted stands before the deltas it announces
        self._deltas: list[tuple[int, TokenDelta]] = []
        self._num_ids = 0
        self._load: ReplicaLoad | None = None
        self._wake = asyncio.Event()
        self.closed = False

    def control(self, frame: AttachResponse) -> None:
        self._control.append(frame)
        self._wake.set()

    def deltas(self, rows: list[tuple[int, TokenDelta]]) -> None:
        """Rows of one step as (handle, delta). A router that stopped reading loses its stream, not our memory."""
        self._deltas += rows
        self._num_ids += sum(len(delta.ids) for _, delta in rows)
        if self._num_ids > MAX_PENDING_IDS:
            self.close()
        self._wake.set()

    def heartbeat(self, load: ReplicaLoad) -> None:
        """Only the newest load is worth sending."""
        self._load = load
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def take(self) -> AttachResponse | None:
        """The next frame; None once closed."""
        while True:
            if self.closed:
                return None
            if self._control:
                return self._control.popleft()
            if self._deltas:
                rows, self._deltas, self._num_ids = self._deltas, [], 0
                return AttachResponse(deltas=codec.deltas_frame(rows))
            if self._load is not None:
                load, self._load = self._load, None
                return AttachResponse(heartbeat=Heartbeat(load=codec.load_message(load)))
            self._wake.clear()
            await self._wake.wait()
