"""Who asked for what: the way back for news of each request. Knows ids and outboxes; no engine, no wire.

Belongs to the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.cluster.outbox import Outbox
from paceline.proto.errors import PacelineError
from paceline.proto.request import FINISH_ERROR, TokenDelta

log = logging.getLogger("paceline.replica")

Reply = Callable[[PacelineError | None], None]


@dataclass(slots=True, eq=False)
class Caller:
    """Who asks: a router's stream, or a single call. What runs for it ends with it."""

    name: str  # attempts of a request are fenced among callers of one name
    outbox: Outbox = field(default_factory=Outbox)
    engine_ids: dict[int, str] = field(default_factory=dict)  # of what runs, by the caller's handle


@dataclass(slots=True, eq=False)
class Route:
    """Where the news of one request goes."""

    caller: Caller
    handle: int
    request_id: str  # the caller's
    attempt: int
    num_open: int  # choices that have not ended
    reply: Reply | None  # not called yet


class Routes:
    """Of everything that has not ended, by the id that the engine knows. Iterates over a copy of the ids."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._newest: dict[tuple[str, str], str] = {}  # (caller's name, request id) -> engine id of the latest attempt
        self._emptied = asyncio.Event()  # one was dropped and none is left

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._routes))

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, engine_id: str) -> Route:
        return self._routes[engine_id]

    def newest(self, caller: Caller, request_id: str) -> str | None:
        """The latest attempt at a request, if it runs, among callers of one name."""
        return self._newest.get((caller.name, request_id))

    def of_request(self, request_id: str) -> list[str]:
        return [engine_id for engine_id, route in self._routes.items() if route.request_id == request_id]

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return sum(route.num_open for route in self._routes.values())

    def add(self, engine_id: str, route: Route) -> None:
        self._routes[engine_id] = route
        self._newest[route.caller.name, route.request_id] = engine_id
        route.caller.engine_ids[route.handle] = engine_id

    def drop(self, engine_id: str) -> None:
        """Nothing more is delivered."""
        route = self._routes.pop(engine_id)
        if not self._routes:
            self._emptied.set()
        del route.caller.engine_ids[route.handle]
        newest = (route.caller.name, route.request_id)
        if self._newest.get(newest) == engine_id:
            del self._newest[newest]

    def answer(self, engine_id: str, error: PacelineError | None) -> None:
        """The engine took the request, or why it did not."""
        route = self._routes.get(engine_id)
        if route is None or route.reply is None:  # cancelled meanwhile, or answered
            return
        reply, route.reply = route.reply, None
        if error is not None:
            self.drop(engine_id)
        reply(error)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """News of one step, to each caller's outbox."""
        rows: dict[Caller, list[tuple[int, TokenDelta]]] = {}
        for delta in deltas:
            route = self._routes.get(delta.request_id)
            if route is None:  # cancelled meanwhile
                continue
            rows.setdefault(route.caller, []).append((route.handle, delta))
            if delta.finish_reason is not None:
                route.num_open -= 1
                if delta.finish_reason == FINISH_ERROR:
                    log.error("%s choice %d: %s", route.request_id, delta.choice, delta.error)
                if not route.num_open:
                    self.drop(delta.request_id)
        for caller, its_rows in rows.items():
            caller.outbox.deltas(its_rows)

    async def emptied(self, seconds: float) -> bool:
        """Whether nothing is left, within so long."""
        try:
            async with asyncio.timeout(seconds):
                while self._routes:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            pass
        return not self._routes
