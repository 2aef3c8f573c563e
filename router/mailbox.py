"""Where the news of one generation waits for whoever passes it on: bounded, so that a client that does not read costs
its own stream and not our memory. Knows no sockets: a reader that is stuck simply does not come to take.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.proto.errors import PacelineError
from paceline.proto.request import TokenDelta

if TYPE_CHECKING:
    from paceline.router.link import Ticket

HARD = 16  # times the limits: however short the time was, more is not kept
TOKEN_BYTES = 200  # about what a token takes on the wire to the client, in its envelope
LOGPROB_BYTES = 60  # and each logprob beside it


class Mailbox:
    """News in order, for one reader; the sender never waits. News without a ticket is about all of them.

    A reader that leaves more than ``max_tokens`` or ``max_bytes`` lying for ``patience`` seconds is slow:
    ``on_slow`` is called once, and nothing is kept from then on.
    """

    def __init__(
        self,
        max_tokens: int = 1024,
        max_bytes: int = 256 * 1024,
        patience: float = 30.0,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        self._news: list[tuple[Ticket | None, TokenDelta | PacelineError]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._max_tokens, self._max_bytes, self._patience = max_tokens, max_bytes, patience
        self._on_slow = on_slow
        self._num_tokens = self._num_bytes = 0  # of news that nobody has taken
        self._behind: asyncio.TimerHandle | None = None  # runs while the reader leaves too much
        self._closed = False

    def put(self, ticket: "Ticket | None", news: TokenDelta | PacelineError) -> None:
        if self._closed:
            return
        self._news.append((ticket, news))
        if isinstance(news, TokenDelta):
            self._num_tokens += len(news.ids)
            self._num_bytes += _size(news)
            if self._too_much():
                self._watch()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> "list[tuple[Ticket | None, TokenDelta | PacelineError]]":
        """Everything that has come; waits until there is something."""
        if self._behind is not None and not self._too_much():
            self._behind.cancel()
            self._behind = None
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        self._num_tokens = self._num_bytes = 0
        return news

    def close(self) -> None:
        """Nothing that comes is kept any more."""
        self._closed = True
        self._news.clear()
        if self._behind is not None:
            self._behind.cancel()
            self._behind = None

    def _too_much(self, times: int = 1) -> bool:
        return self._num_tokens > times * self._max_tokens or self._num_bytes > times * self._max_bytes

    def _watch(self) -> None:
        if self._too_much(HARD):
            self._slow()
        elif self._behind is None:
            self._behind = asyncio.get_running_loop().call_later(self._patience, self._slow)

    def _slow(self) -> None:
        self.close()
        self._on_slow()


def _size(news: TokenDelta) -> int:
    size = TOKEN_BYTES * len(news.ids)
    if news.logprobs:
        size += LOGPROB_BYTES * sum(1 + len(token.top_ids) for token in news.logprobs)
    return size
