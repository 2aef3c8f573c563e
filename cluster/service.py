"""A replica's door: frames to calls of the host and back. Knows the wire and statuses; no ray, no torch, no scheduling.

Who asked for what, and the engine's thread, are host.py's; what waits to be written is outbox.py's.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine

import grpc.aio
import msgspec

from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.host import EngineHost
from paceline.cluster.outbox import Outbox
from paceline.cluster.routes import Caller
from paceline.proto import codec, hashing
from paceline.proto import replica_pb2 as pb
from paceline.proto.errors import InvalidRequest, Overloaded, PacelineError, ReplicaLost
from paceline.proto.grammar import MAX_GRAMMAR_BYTES
from paceline.proto.model import ModelCard
from paceline.proto.replica_pb2_grpc import ReplicaServiceServicer
from paceline.proto.request import Request

log = logging.getLogger("paceline.replica")

PROTOCOL = 1
HEARTBEAT = 1.0  # seconds
MAX_LOGPROBS = 128  # beside each id: for more a step would hold up all others


class ReplicaService(ReplicaServiceServicer):
    """``incarnation`` tells this life of a replica from others under its name."""

    def __init__(self, host: EngineHost, incarnation: str):
        self._host = host
        self._incarnation = incarnation

    async def Attach(self, frames: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext) -> None:
        name, card = self._host.name, self._host.card
        if card is None or self._host.state != "ready":
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"replica {name} is {self._host.state}")
            return
        first = await anext(aiter(frames), None)
        if first is None or first.WhichOneof("frame") != "hello" or not first.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be a hello that names a router")
            return
        if mismatch := _mismatch(first.hello, card):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        router_id = first.hello.router_id
        log.info("%s: router %s attached", name, router_id)
        caller = self._host.open(router_id)
        welcome = pb.Welcome(
            replica_id=name,
            incarnation=self._incarnation,
            protocol=PROTOCOL,
            fingerprint=card.fingerprint,
            ranks=map(codec.rank_message, self._host.ranks),
            start_seconds=self._host.start_seconds,
            **_limits(self._host.limits),
        )
        caller.outbox.control(pb.AttachResponse(welcome=welcome))
        await self._serve(
            caller,
            context,
            self._read(frames, caller),
            self._beat(caller.outbox),
            _write(caller.outbox, context),
        )
        log.info("%s: router %s left", name, router_id)

    async def _serve(self, caller: Caller, context: grpc.aio.ServicerContext, *work: Coroutine) -> None:
        """Until a part of the work ends, or the caller is too far behind; then what runs for the caller is aborted.

        A write may be stuck because nobody reads: the status then waits in gRPC for the reader, and only the status.
        """
        fell_behind = asyncio.create_task(caller.outbox.overflowed.wait())
        tasks = [fell_behind, *map(asyncio.create_task, work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            untold = bool(caller.engine_ids)  # how they end, because the engine is stuck
            self._host.close(caller)
        try:
            if fell_behind in done:
                raise Overloaded(f"{caller.name} does not read what it asked for")
            for task in done:
                task.result()
            if untold and self._host.state == "dead":
                raise ReplicaLost(f"replica {self._host.name} is dead")
        except PacelineError as error:
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)

    async def _read(self, frames: AsyncIterator[pb.AttachRequest], caller: Caller) -> None:
        """Until the router closes its side. Raises InvalidRequest for what no router of ours sends."""
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            if kind == "submit":
                self._submit(frame.submit, caller)
            elif kind == "cancel":
                self._host.cancel(caller, frame.cancel.handle)
            elif kind == "finish":
                self._host.finish(caller, frame.finish.handle, frame.finish.choice, frame.finish.num_ids)
            else:
                raise InvalidRequest(f"a frame of kind {kind} has no place here")

    def _submit(self, submission: pb.Submission, caller: Caller) -> None:
        handle, outbox = submission.handle, caller.outbox
        if handle in caller.engine_ids:
            raise InvalidRequest(f"handle {handle} is in use", "handle")

        def reply(error: PacelineError | None) -> None:
            if error is None:
                outbox.control(pb.AttachResponse(accepted=pb.Accepted(handle=handle)))
            else:
                outbox.control(pb.AttachResponse(rejected=pb.Rejected(handle=handle, error=codec.error_message(error))))

        self._host.submit(caller, handle, codec.request_of(submission), reply)

    async def _beat(self, outbox: Outbox) -> None:
        while True:
            outbox.heartbeat(self._host.load, self._host.draining)
            await asyncio.sleep(HEARTBEAT)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        caller = self._host.open("generate")
        await self._serve(caller, context, self._generate(codec.request_of(request.submission), caller, context))

    async def _generate(self, request: Request, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reply(error: PacelineError | None) -> None:
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        if self._host.card is not None:
            request = _admitted(request, self._host.card)
        self._host.submit(caller, 1, request, reply)
        await answer
        num_open = request.params.n
        while num_open and (frame := await caller.outbox.take()):
            if frame.WhichOneof("frame") == "deltas":
                num_open -= len(frame.deltas.endings)
                await context.write(pb.GenerateResponse(deltas=frame.deltas))
        if num_open:
            raise ReplicaLost(f"replica {self._host.name} is {self._host.state}")

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(num_known=sum(map(self._host.abort, request.request_ids)))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        card = self._host.card
        if card is None:
            message = f"replica {self._host.name} is {self._host.state}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, message)
            raise AssertionError("abort raises")
        return pb.GetModelResponse(card_json=codec.card_to_json(card))

    async def GetState(self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext) -> pb.GetStateResponse:
        return pb.GetStateResponse(
            replica_id=self._host.name,
            incarnation=self._incarnation,
            state=self._host.state,
            load=codec.load_message(self._host.load),
            stalled_seconds=self._host.stalled_seconds,
            ranks=map(codec.rank_message, self._host.ranks),
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        return pb.DrainResponse(num_ended=await self._host.drain(request.seconds))


async def _write(outbox: Outbox, context: grpc.aio.ServicerContext) -> None:
    while (frame := await outbox.take()) is not None:
        await context.write(frame)


def _limits(engine: EngineConfig | None) -> dict[str, int]:
    """What a router may know of the engine's limits."""
    if engine is None:
        return {}
    return {
        "max_num_seqs": engine.max_num_seqs,
        "max_waiting_requests": engine.max_waiting_requests,
        "max_waiting_tokens": engine.max_waiting_tokens,
    }


def _mismatch(hello: pb.Hello, card: ModelCard) -> str | None:
    """Why this router and this replica cannot work together."""
    if hello.protocol != PROTOCOL:
        return f"protocol {hello.protocol} is not {PROTOCOL}: run router and replica of one release"
    if hello.fingerprint not in ("", card.fingerprint):
        return f"this replica serves {card.fingerprint}, not {hello.fingerprint}"
    return None


def _admitted(request: Request, card: ModelCard) -> Request:
    """What a router does for a request: checks what would harm others, an id, and names for the prompt's blocks."""
    params = request.params
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("logit_bias", params.logit_bias),
        ("stop_ids", params.stop_ids),
    ):
        if max(ids, default=0) >= card.vocab_size:
            raise InvalidRequest(f"{name} must be below {card.vocab_size}, the size of the vocabulary", name)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if (count or 0) > MAX_LOGPROBS:
            raise InvalidRequest(f"{name} may ask for {MAX_LOGPROBS} of the likeliest at most", name)
    if len(params.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes", "grammar")
    if request.resume:
        raise InvalidRequest("only a router resumes a request", "resume")
    if not request.request_id:
        request = msgspec.structs.replace(request, request_id=f"generate-{secrets.token_hex(8)}")
    if request.cache_root:
        return request
    root = hashing.root_of(card)
    hashes = hashing.prompt_hashes(root, request.prompt_ids, card.block_size)
    return msgspec.structs.replace(request, cache_root=root, block_hashes=hashes)
