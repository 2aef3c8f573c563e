"""What replicas there are, and one Attach stream to each, for as long as each is listed.

It knows where the set comes from and keeps links open. Which of them gets a request is `policies.py`; what a request
is, `service.py`. All replicas of a pool serve one model: the first fingerprint seen wins, others are refused.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping

import grpc.aio

from paceline.proto import cluster_pb2, cluster_pb2_grpc
from paceline.proto.errors import NoReplica, PacelineError
from paceline.proto.model import ModelCard
from paceline.proto.request import Request
from paceline.router.link import Link, Mailbox, Ticket, attach, fetch_card, open_channel
from paceline.router.policies import Policy, least_loaded

log = logging.getLogger("paceline.router")

CONNECT_TIMEOUT = 5.0  # seconds for the card, and again for the handshake
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds between attempts, doubled each time


class Pool:
    """Owns channels and links. ``start`` before use, ``close`` after.

    The set is given by a controller, or fixed. A controller that dies changes nothing: the last set stays and the
    watch is opened again for ever.
    """

    def __init__(
        self,
        *,
        controller: str | None = None,
        replicas: tuple[str, ...] = (),
        policy: Policy = least_loaded,
        on_card: Callable[[ModelCard], Awaitable[None]] | None = None,
    ):
        """``on_card`` is awaited once, with the first card, before any replica counts as ready."""
        self.card: ModelCard | None = None
        self.router_id = "router-" + secrets.token_hex(4)
        self._incarnation = secrets.token_hex(8)
        self._controller = controller
        self._fixed = replicas
        self._policy = policy
        self._on_card = on_card
        self._card_lock = asyncio.Lock()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by address
        self._links: dict[str, Link] = {}  # open ones, by address
        self._draining: frozenset[str] = frozenset()  # addresses
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Returns at once; links open in the background."""
        if self._controller is not None:
            self._watcher = asyncio.create_task(self._watch(self._controller))
        else:
            self._apply(dict.fromkeys(self._fixed, cluster_pb2.REPLICA_STATE_READY))

    async def close(self) -> None:
        """Breaks all links: what still runs is told ReplicaLost, and replicas abort it."""
        tasks = [*self._keepers.values(), *([self._watcher] if self._watcher else [])]
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

    def submit(self, request: Request, mailbox: Mailbox) -> Ticket:
        """Picks a replica and sends the request there: see ``Link.submit``. Raises NoReplica."""
        usable = [link for link in self._links.values() if link.usable]
        if not usable:
            raise NoReplica("no replica is ready", retry_after=1.0)
        return self._policy(usable, request).submit(request, mailbox)

    def abort(self, ticket: Ticket) -> None:
        ticket.abort()

    def finish(self, ticket: Ticket, choice: int, num_ids: int) -> None:
        ticket.finish(choice, num_ids)

    # -- where the set comes from --------------------------------------------------------------------------------------

    async def _watch(self, controller: str) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                async with open_channel(controller) as channel:
                    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                    request = cluster_pb2.WatchReplicasRequest(router_id=self.router_id)
                    async for answer in stub.WatchReplicas(request):
                        pause = FIRST_PAUSE
                        self._apply({replica.address: replica.state for replica in answer.replicas})
                log.warning("the controller at %s ended the watch; the last set stays", controller)
            except grpc.aio.AioRpcError as error:
                log.warning("controller at %s: %s; the last set stays", controller, error.code().name)
            except Exception:
                log.exception("what the controller at %s sent cannot be used", controller)
            pause = await _pause(pause)

    def _apply(self, states: Mapping[str, int]) -> None:
        """Makes the links fit the set: keepers for all that serve or drain, none for others."""
        listed = {
            address
            for address, state in states.items()
            if address and state in (cluster_pb2.REPLICA_STATE_READY, cluster_pb2.REPLICA_STATE_DRAINING)
        }
        self._draining = frozenset(a for a in listed if states[a] == cluster_pb2.REPLICA_STATE_DRAINING)
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
            pause = await _pause(pause)

    async def _connect(self, channel: grpc.aio.Channel, address: str) -> Link:
        card = await fetch_card(channel, CONNECT_TIMEOUT)
        async with self._card_lock:
            if self.card is None:
                if self._on_card is not None:
                    await self._on_card(card)
                self.card = card
        if card.fingerprint != self.card.fingerprint:
            raise NoReplica(f"refused: it serves {card.fingerprint}, this pool {self.card.fingerprint}")
        return await attach(channel, address, card, self.router_id, self._incarnation, CONNECT_TIMEOUT)

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


async def _pause(seconds: float) -> float:
    """Sleeps about so long, and says how long the next pause is. Spread, so that routers do not knock in step."""
    await asyncio.sleep(seconds * random.uniform(0.7, 1.3))
    return min(seconds * 2, LONGEST_PAUSE)
