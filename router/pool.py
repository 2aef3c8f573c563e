"""What replicas there are, and one Attach stream to each, for as long as each is listed.

It keeps links open to what its sources list. Where sets come from is `sources.py`, which replica gets a request
`policies.py`, what a request is `service.py`. All replicas of a pool serve one model: the first fingerprint seen wins,
others are refused.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection

import grpc.aio

from paceline.proto.errors import NoReplica, PacelineError
from paceline.proto.model import ModelCard
from paceline.proto.request import Request
from paceline.router.link import Link, Metadata, Ticket, attach, fetch_card, open_channel
from paceline.router.mailbox import Mailbox
from paceline.router.policies import Policy, least_loaded
from paceline.router.sources import (
    DRAINING,
    FIRST_PAUSE,
    READY,
    States,
    backoff,
    split_address,
    watch_controller,
    watch_name,
)

log = logging.getLogger("paceline.router")

CONNECT_TIMEOUT = 5.0  # seconds for the card, and again for the handshake


class Pool:
    """Owns channels and links. ``start`` before use, ``close`` after.

    The set is what a controller says, what a name resolves to, and what is fixed, together; it may be empty. A
    replica drains if any source says so. All replicas and the controller are shown the ``token``.
    """

    def __init__(
        self,
        *,
        controller: str | None = None,
        replicas: tuple[str, ...] = (),
        name: str | None = None,
        token: str | None = None,
        policy: Policy = least_loaded,
        on_card: Callable[[ModelCard], Awaitable[None]] | None = None,
    ):
        """``replicas`` are HOST:PORT, ``name`` is NAME:PORT. ``on_card`` is awaited once, with the first card, before
        any replica counts as ready. Raises StartupError for a name without a port."""
        self.card: ModelCard | None = None
        self.router_id = "router-" + secrets.token_hex(4)
        self._incarnation = secrets.token_hex(8)
        self._controller = controller
        self._name = name
        if name is not None:
            split_address(name)
        self._sets: dict[str, States] = {"fixed": dict.fromkeys(replicas, READY)}  # by source
        self._metadata: Metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._policy = policy
        self._on_card = on_card
        self._card_lock = asyncio.Lock()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by address
        self._links: dict[str, Link] = {}  # open ones, by address
        self._draining: frozenset[str] = frozenset()  # addresses
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Returns at once; links open in the background."""
        if self._controller is not None:
            tell = functools.partial(self._apply, "controller")
            watching = watch_controller(self._controller, self.router_id, self._metadata, tell)
            self._watchers.append(asyncio.create_task(watching))
        if self._name is not None:
            self._watchers.append(asyncio.create_task(watch_name(self._name, functools.partial(self._apply, "name"))))
        self._apply("fixed", self._sets["fixed"])

    async def close(self) -> None:
        """Breaks all links: what still runs is told ReplicaLost, and replicas abort it."""
        tasks = [*self._keepers.values(), *self._watchers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keepers.clear()

    @property
    def links(self) -> list[Link]:
        """All that are open, draining ones too."""
        return list(self._links.values())

    def ready(self) -> bool:
        return any(link.usable for link in self._links.values())

    async def wait_ready(self) -> None:
        while not self.ready():
            self._changed.clear()
            await self._changed.wait()

    @property
    def usable(self) -> list[Link]:
        """Those that take requests."""
        return [link for link in self._links.values() if link.usable]

    def submit(self, request: Request, mailbox: Mailbox, besides: Collection[Link] = ()) -> Ticket:
        """Picks a replica, not ``besides``, and sends the request there: see ``Link.submit``. Raises NoReplica.

        Replicas that are full, as far as this router knows, are left out unless all are.
        """
        usable = [link for link in self.usable if link not in besides]
        if not usable:
            raise NoReplica("no replica is ready", retry_after=1)
        roomy = [link for link in usable if link.has_room(request.params.n)]
        return self._policy(roomy or usable, request).submit(request, mailbox)

    def abort(self, ticket: Ticket) -> None:
        ticket.abort()

    def finish(self, ticket: Ticket, choice: int, num_ids: int) -> None:
        ticket.finish(choice, num_ids)

    # -- the set -------------------------------------------------------------------------------------------------------

    def _apply(self, source: str, states: States) -> None:
        """Makes the links fit all sources together: keepers for what serves or drains, none for others."""
        self._sets[source] = states
        every = [pair for states in self._sets.values() for pair in states.items()]
        listed = {address for address, state in every if address and state in (READY, DRAINING)}
        self._draining = frozenset(address for address, state in every if state == DRAINING)
        for address in self._keepers.keys() - listed:
            self._keepers.pop(address).cancel()
        for address in sorted(listed - self._keepers.keys()):
            self._keepers[address] = asyncio.create_task(self._keep(address))
        for address, link in self._links.items():
            link.draining = address in self._draining
        self._changed.set()

    # -- one link each -------------------------------------------------------------------------------------------------

    async def _keep(self, address: str) -> None:
        """Holds a link to the address, opening it again whenever it breaks. Ends by cancellation."""
        pause, told = FIRST_PAUSE, ""
        while True:
            try:
                async with open_channel(address) as channel:
                    link = await self._connect(channel, address)
                    pause, told = FIRST_PAUSE, ""
                    await self._hold(link)
            except (grpc.aio.AioRpcError, TimeoutError, PacelineError) as error:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no answer"
                if reason != told:  # one line per reason, not per attempt
                    log.warning("replica at %s: %s", address, reason)
                told = reason
            except Exception:
                log.exception("replica at %s: what it sent cannot be used", address)
            pause = await backoff(pause)

    async def _connect(self, channel: grpc.aio.Channel, address: str) -> Link:
        card = await fetch_card(channel, CONNECT_TIMEOUT, self._metadata)
        async with self._card_lock:
            if self.card is None:
                if self._on_card is not None:
                    await self._on_card(card)
                self.card = card
        if card.fingerprint != self.card.fingerprint:
            raise NoReplica(f"refused: it serves {card.fingerprint}, this pool {self.card.fingerprint}")
        return await attach(channel, address, card, self.router_id, self._incarnation, CONNECT_TIMEOUT, self._metadata)

    async def _hold(self, link: Link) -> None:
        link.draining = link.address in self._draining
        self._links[link.address] = link
        self._changed.set()
        log.info("replica %s at %s: attached", link.replica_id, link.address)
        try:
            await link.run()
        finally:
            self._links.pop(link.address, None)
            self._changed.set()
