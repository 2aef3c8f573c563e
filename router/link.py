"""One Attach stream to one replica: submissions down, frames of deltas up, each row to the mailbox it belongs to.

It knows the wire and who waits for which handle. It does not choose replicas (`policies.py`), reconnect (`pool.py`),
or look into ids (`service.py`). A stream that broke is never resumed: whoever waits on it is told ReplicaLost.
"""

import asyncio
import itertools
import logging
from typing import Any

import grpc.aio

from paceline.proto import codec, replica_pb2, replica_pb2_grpc
from paceline.proto.errors import InternalError, PacelineError, ReplicaLost
from paceline.proto.load import ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.request import Request
from paceline.router.mailbox import Mailbox

log = logging.getLogger("paceline.router")

Metadata = tuple[tuple[str, str], ...]

PROTOCOL = 1
SILENCE = 5.0  # seconds without a frame, after which a replica counts as lost
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Replicas that share a host and come back on the same port must not inherit a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Ticket:
    """One submission on one link. Ends when each of its n choices has ended, by ``abort`` or with the link."""

    __slots__ = ("accepted", "handle", "link", "mailbox", "num_open", "request")

    def __init__(self, link: "Link", handle: int, request: Request, mailbox: Mailbox):
        self.link = link
        self.handle = handle
        self.request = request
        self.mailbox = mailbox
        self.num_open = request.params.n  # choices that have not ended; 0 once the ticket is closed
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Ends it in whatever state it is. Idempotent; nothing more is delivered."""
        self.link.abort(self)

    def finish(self, choice: int, num_ids: int) -> None:
        """Ends a choice as a success after ``num_ids`` ids: a stop string was seen. Its ending still arrives."""
        self.link.finish(self, choice, num_ids)


class Link:
    """An open Attach stream. Made by ``attach``; ``run`` reads until it breaks.

    ``in_flight`` counts choices that have not ended, ``capacity`` how many may run and wait there (None: no limit);
    ``load`` is the replica's last word about itself, ``ranks`` what each of its ranks holds, ``start_seconds`` how long
    each phase of its start took.
    """

    def __init__(self, address: str, call: Any, welcome: replica_pb2.Welcome, card: ModelCard):
        self.address = address
        self.replica_id = welcome.replica_id or address
        self.card = card
        limited = welcome.max_num_seqs and welcome.max_waiting_requests
        self.capacity = welcome.max_num_seqs + welcome.max_waiting_requests if limited else None
        self.ranks = tuple(map(codec.rank_of, welcome.ranks))
        self.start_seconds = dict(welcome.start_seconds)
        self.load = ReplicaLoad()
        self.in_flight = 0
        self.draining = False  # told by the source: running requests go on, new ones go elsewhere
        self.leaving = False  # told by the replica, for good: the same
        self._call = call
        self._closed = False
        self._handles = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._outbox: asyncio.Queue[replica_pb2.AttachRequest] = asyncio.Queue()

    @property
    def usable(self) -> bool:
        return not (self._closed or self.draining or self.leaving)

    def has_room(self, num_choices: int) -> bool:
        """As far as this router knows; others may use the replica, too."""
        return self.capacity is None or self.in_flight + num_choices <= self.capacity

    def submit(self, request: Request, mailbox: Mailbox) -> Ticket:
        """Sends the request. ``ticket.accepted`` resolves when the replica took it or raises why it did not; deltas
        go to ``mailbox``. Raises ReplicaLost if the stream has broken."""
        if self._closed:
            raise ReplicaLost("the replica is gone")
        ticket = Ticket(self, next(self._handles), request, mailbox)
        self._tickets[ticket.handle] = ticket
        self.in_flight += ticket.num_open
        self._outbox.put_nowait(replica_pb2.AttachRequest(submit=codec.submission_of(request, ticket.handle)))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        if self._forget(ticket) and not self._closed:
            self._outbox.put_nowait(replica_pb2.AttachRequest(cancel=replica_pb2.Cancel(handle=ticket.handle)))

    def finish(self, ticket: Ticket, choice: int, num_ids: int) -> None:
        if ticket.handle in self._tickets and not self._closed:
            finish = replica_pb2.Finish(handle=ticket.handle, choice=choice, num_ids=num_ids)
            self._outbox.put_nowait(replica_pb2.AttachRequest(finish=finish))

    async def run(self) -> None:
        """Reads frames until the stream ends or falls silent; then tells everyone who waits. Never raises but when
        cancelled."""
        writer = asyncio.create_task(self._write())
        try:
            async with asyncio.timeout(SILENCE) as silence:
                loop = asyncio.get_running_loop()
                async for frame in self._call:
                    silence.reschedule(loop.time() + SILENCE)
                    self._take(frame)
        except TimeoutError:
            log.warning("replica %s at %s: silent for %.0f s", self.replica_id, self.address, SILENCE)
        except grpc.aio.AioRpcError as error:
            log.warning("replica %s at %s: stream broke: %s", self.replica_id, self.address, error.code().name)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            log.warning("replica %s at %s: stream cancelled", self.replica_id, self.address)
        except Exception:
            log.exception("replica %s at %s: a frame cannot be read", self.replica_id, self.address)
        finally:
            writer.cancel()
            self._call.cancel()
            self._close()

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the stream is over; the reader sees it and closes

    def _take(self, frame: replica_pb2.AttachResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "deltas":
            self._deliver(frame.deltas)
        elif kind == "heartbeat":
            self.load = codec.load_of(frame.heartbeat.load)
            self.leaving = frame.heartbeat.draining
        elif kind == "accepted":
            if (ticket := self._tickets.get(frame.accepted.handle)) and not ticket.accepted.done():
                ticket.accepted.set_result(None)
        elif kind == "rejected" and (ticket := self._tickets.get(frame.rejected.handle)):
            self._fail(ticket, codec.error_of(frame.rejected.error))

    def _deliver(self, frame: replica_pb2.Deltas) -> None:
        tickets = self._tickets

        def request_id_of(handle: int) -> str:
            ticket = tickets.get(handle)
            return ticket.request.request_id if ticket else ""

        for handle, delta in codec.deltas_of(frame, request_id_of):
            ticket = tickets.get(handle)
            if ticket is None:  # aborted here while the frame was on its way
                continue
            if delta.finish_reason is not None:
                self.in_flight -= 1
                ticket.num_open -= 1
                if ticket.num_open <= 0:
                    del tickets[handle]
            ticket.mailbox.put(ticket, delta)

    def _fail(self, ticket: Ticket, error: PacelineError) -> None:
        """Before it was accepted the submitter hears it from the future, later from the mailbox."""
        if not self._forget(ticket):
            return
        if ticket.accepted.done():
            ticket.mailbox.put(ticket, error)
        else:
            ticket.accepted.set_exception(error)
            ticket.accepted.exception()  # seen, should the submitter be gone

    def _forget(self, ticket: Ticket) -> bool:
        if self._tickets.pop(ticket.handle, None) is None:
            return False
        self.in_flight -= ticket.num_open
        ticket.num_open = 0
        return True

    def _close(self) -> None:
        self._closed = True
        for ticket in list(self._tickets.values()):
            self._fail(ticket, ReplicaLost("the replica that served this request was lost"))


async def fetch_card(channel: grpc.aio.Channel, timeout: float, metadata: Metadata = ()) -> ModelCard:
    """Raises grpc.aio.AioRpcError."""
    stub = replica_pb2_grpc.ReplicaServiceStub(channel)
    answer = await stub.GetModel(replica_pb2.GetModelRequest(), timeout=timeout, metadata=metadata)
    return codec.card_from_json(answer.card_json)


async def attach(
    channel: grpc.aio.Channel,
    address: str,
    card: ModelCard,
    router_id: str,
    incarnation: str,
    timeout: float,
    metadata: Metadata = (),
) -> Link:
    """Opens the stream and shakes hands. Raises grpc.aio.AioRpcError, TimeoutError, or InternalError if the other
    side speaks another protocol."""
    call = replica_pb2_grpc.ReplicaServiceStub(channel).Attach(metadata=metadata)
    hello = replica_pb2.Hello(
        router_id=router_id, incarnation=incarnation, protocol=PROTOCOL, fingerprint=card.fingerprint
    )
    try:
        async with asyncio.timeout(timeout):
            await call.write(replica_pb2.AttachRequest(hello=hello))
            first = await anext(aiter(call), None)
    except BaseException:
        call.cancel()
        raise
    if first is None or first.WhichOneof("frame") != "welcome" or first.welcome.protocol != PROTOCOL:
        call.cancel()
        raise InternalError("the replica did not answer the hello in our protocol")
    return Link(address, call, first.welcome, card)


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
