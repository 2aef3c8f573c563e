"""Good fakes, shared by tests: a replica that speaks the real wire and says what a script tells it to."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from functools import cache

import grpc.aio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.proto import codec, replica_pb2, replica_pb2_grpc
from paceline.proto.errors import PacelineError
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.model import KVGroup, ModelCard
from paceline.proto.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Request,
    TokenDelta,
    TokenLogprobs,
    Usage,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog. hello world, hello there. what is the capital of France? "
    "The capital of France is Paris. one two three four five six seven eight nine ten."
)


@cache
def tiny_tokenizer_json() -> str:
    """Byte-level BPE of 320 ids at most: three control tokens (0-2), all bytes, a few merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    return tokenizer.to_str()


def tiny_card(**changes) -> ModelCard:
    spec = json.loads(tiny_tokenizer_json())
    card: dict = {
        "name": "tiny",
        "architecture": "llama",
        "fingerprint": "tiny-1",
        "max_model_len": 256,
        "vocab_size": len(spec["model"]["vocab"]),
        "kv_groups": (KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),),
        "eos_ids": (2,),
        "bos_id": 0,
        "chat_template": TEMPLATE,
        "template_tokens": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        "tokenizer_json": tiny_tokenizer_json(),
    }
    return ModelCard(**card | changes)


def encode(text: str) -> list[int]:
    return tokenizers.Tokenizer.from_str(tiny_tokenizer_json()).encode(text).ids


def prompt_logprobs_of(request: Request) -> list[TokenLogprobs]:
    """What FakeReplica tells of a prompt: an id's place times -1/64, which is exact on the wire. The best are the id
    itself and those after it, each 0.5 less."""
    num_tops = request.params.prompt_logprobs
    if num_tops is None:
        return []
    return [
        TokenLogprobs(
            -place / 64, [id + top for top in range(num_tops)], [-place / 64 - top / 2 for top in range(num_tops)]
        )
        for place, id in enumerate(request.prompt_ids)
        if place
    ]


@dataclasses.dataclass
class Running:
    request: Request
    scripts: list[list[int]]  # ids per choice, the eos among them
    sent: list[int]  # ids sent per choice
    open: set[int]
    prompt: list[TokenLogprobs]  # not sent yet


PROMPT_CHUNK = 4


class FakeReplica(replica_pb2_grpc.ReplicaServiceServicer):
    """ReplicaService on a free port. Each step it sends one frame with the next id of every choice that runs.

    ``script``: ids of a choice, by (request, choice); they end with "stop" at an eos id and start again from the first
    if they run out. Options: ``delay`` seconds per step; ``stall_at`` / ``die_at`` / ``duplicate_at`` / ``skip_at`` /
    ``fail_at`` (with ``fail_code``): what happens when any choice is to send its id of that number; ``reject``: the
    answer to every submission; ``max_num_seqs`` / ``max_waiting_requests``: what it says it takes; ``bounded``: the
    context ends a choice, too; ``silent``: no
    heartbeats; ``hold``: nothing is accepted until ``release`` is called; ``short_prompt``: of the prompt's log
    probabilities the last one is left out.

    Log probabilities of the prompt come in chunks of ``PROMPT_CHUNK``, a step each. No end and no stop id ends a choice
    before ``min_tokens``.
    """

    def __init__(
        self,
        *,
        text: str = "Hello world.",
        script: Callable[[Request, int], Sequence[int]] | None = None,
        card: ModelCard | None = None,
        replica_id: str = "fake-0",
        delay: float = 0.0,
        num_cached: int = 0,
        reject: PacelineError | None = None,
        stall_at: int | None = None,
        die_at: int | None = None,
        duplicate_at: int | None = None,
        skip_at: int | None = None,
        fail_at: int | None = None,
        fail_code: str | None = None,
        silent: bool = False,
        hold: bool = False,
        load: ReplicaLoad | None = None,
        ranks: tuple[RankMemory, ...] = (),
        per_frame: int = 1,
        max_num_seqs: int = 0,
        max_waiting_requests: int = 0,
        short_prompt: bool = False,
        bounded: bool = False,
    ):
        self.card = card or tiny_card()
        ids = [*encode(text), self.card.eos_ids[0]]
        self.script = script or (lambda request, choice: ids)
        self.replica_id, self.delay, self.num_cached, self.reject = replica_id, delay, num_cached, reject
        self.stall_at, self.die_at, self.fail_at = stall_at, die_at, fail_at
        self.fail_code = fail_code
        self.duplicate_at, self.skip_at = duplicate_at, skip_at
        self.silent, self.per_frame, self.short_prompt = silent, per_frame, short_prompt
        self.max_num_seqs, self.max_waiting_requests = max_num_seqs, max_waiting_requests
        self.bounded = bounded
        self.load = load or ReplicaLoad(blocks_total=100)
        self.ranks = ranks
        self.submissions: list[Request] = []
        self.cancels: list[int] = []
        self.finishes: list[tuple[int, int, int]] = []
        self.hellos: list[replica_pb2.Hello] = []
        self.running: dict[int, Running] = {}
        self.address = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._released = asyncio.Event()
        if not hold:
            self._released.set()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 28), ("grpc.so_reuseport", 0)])
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """At once: open streams break."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def __aenter__(self) -> "FakeReplica":
        await self.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.stop()

    def release(self) -> None:
        self._released.set()

    # -- the service ---------------------------------------------------------------------------------------------------

    async def GetModel(self, request, context):
        return replica_pb2.GetModelResponse(card_json=codec.card_to_json(self.card))

    async def GetState(self, request, context):
        return replica_pb2.GetStateResponse(replica_id=self.replica_id, load=codec.load_message(self.load))

    async def Abort(self, request, context):
        return replica_pb2.AbortResponse()

    async def Generate(self, request, context):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake only attaches")

    async def Attach(self, frames, context):
        self.hellos.append((await anext(aiter(frames))).hello)
        welcome = replica_pb2.Welcome(
            replica_id=self.replica_id,
            protocol=1,
            fingerprint=self.card.fingerprint,
            ranks=map(codec.rank_message, self.ranks),
            max_num_seqs=self.max_num_seqs,
            max_waiting_requests=self.max_waiting_requests,
        )
        await context.write(replica_pb2.AttachResponse(welcome=welcome))
        work = asyncio.Event()
        lock = asyncio.Lock()
        tasks = [
            asyncio.create_task(self._beat(context, lock)),
            asyncio.create_task(self._step_forever(context, lock, work)),
        ]
        try:
            async for frame in frames:
                await self._hear(frame, context, lock, work)
        finally:
            for task in tasks:
                task.cancel()
            self.running.clear()

    async def _hear(self, frame, context, lock, work) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "cancel":
            self.cancels.append(frame.cancel.handle)
            self.running.pop(frame.cancel.handle, None)
        elif kind == "finish":
            self.finishes.append((frame.finish.handle, frame.finish.choice, frame.finish.num_ids))
            await self._finish(frame.finish, context, lock)
        elif kind == "submit":
            request, handle = codec.request_of(frame.submit), frame.submit.handle
            self.submissions.append(request)
            self._tasks.append(asyncio.create_task(self._admit(request, handle, context, lock, work)))

    async def _admit(self, request, handle, context, lock, work) -> None:
        await self._released.wait()
        if handle in self.cancels:
            return
        if self.reject is not None:
            rejected = replica_pb2.Rejected(handle=handle, error=codec.error_message(self.reject))
            await self._write(context, lock, replica_pb2.AttachResponse(rejected=rejected))
            return
        n = request.params.n
        scripts = [list(self.script(request, choice)) for choice in range(n)]
        prompt = prompt_logprobs_of(request)
        self.running[handle] = Running(
            request, scripts, [0] * n, set(range(n)), prompt[: -1 if self.short_prompt else None]
        )
        accepted = replica_pb2.Accepted(handle=handle)
        await self._write(context, lock, replica_pb2.AttachResponse(accepted=accepted))
        work.set()

    async def _finish(self, finish, context, lock) -> None:
        running = self.running.get(finish.handle)
        if running and finish.choice in running.open:
            delta = TokenDelta(
                request_id=running.request.request_id,
                choice=finish.choice,
                offset=finish.num_ids,
                ids=[],
                finish_reason=FINISH_STOP,
                usage=Usage(len(running.request.prompt_ids), self.num_cached, finish.num_ids),
            )
            self._close(finish.handle, running, finish.choice)
            await self._write(context, lock, self._frame([(finish.handle, delta)]))

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _step_forever(self, context, lock, work) -> None:
        while True:
            if not self.running:
                work.clear()
                await work.wait()
            await asyncio.sleep(self.delay)
            rows: list[tuple[int, TokenDelta]] = []
            for handle, running in list(self.running.items()):
                for choice in sorted(running.open):
                    delta = await self._next(handle, running, choice)
                    if delta is not None:
                        rows.append((handle, delta))
            if rows:
                await self._write(context, lock, self._frame(rows))

    def _room(self, request: Request) -> float:
        """How many ids a choice may have."""
        context = self.card.max_model_len - len(request.prompt_ids) if self.bounded else math.inf
        return context if request.params.max_tokens is None else min(context, request.params.max_tokens)

    async def _next(self, handle: int, running: Running, choice: int) -> TokenDelta | None:
        at, params = running.sent[choice], running.request.params
        prompt_logprobs = None
        if running.prompt:
            if choice:
                return None
            prompt_logprobs, running.prompt = running.prompt[:PROMPT_CHUNK], running.prompt[PROMPT_CHUNK:]
            if running.prompt:
                return TokenDelta(
                    request_id=running.request.request_id,
                    choice=0,
                    offset=0,
                    ids=[],
                    prompt_logprobs=prompt_logprobs,
                )
        if at == self.die_at:
            await self.stop()
        if at == self.stall_at:
            return None
        script = running.scripts[choice]
        ids, reason = [], FINISH_LENGTH if params.max_tokens == 0 else None
        while len(ids) < self.per_frame and reason is None:
            id = script[(at + len(ids)) % len(script)]
            ids.append(id)
            if at + len(ids) >= self._room(running.request):
                reason = FINISH_LENGTH
            ends = id in params.stop_ids or (id in self.card.eos_ids and not params.ignore_eos)
            if ends and at + len(ids) > params.min_tokens:
                reason = FINISH_STOP
        if at == self.fail_at:
            ids, reason = [], FINISH_ERROR
        running.sent[choice] += len(ids)
        usage = Usage(len(running.request.prompt_ids), self.num_cached, running.sent[choice]) if reason else None
        if reason:
            self._close(handle, running, choice)
        logprobs = None
        if params.logprobs is not None:
            tops = list(range(params.logprobs))
            logprobs = [TokenLogprobs(-0.5, tops, [-0.5 - top for top in tops]) for _ in ids]
        offset = at + (1 if at == self.skip_at else -1 if at == self.duplicate_at and at else 0)
        if offset < at:
            ids = [script[at - 1], *ids]
            logprobs = logprobs and [logprobs[0], *logprobs]
        return TokenDelta(
            request_id=running.request.request_id,
            choice=choice,
            offset=offset,
            ids=ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            usage=usage,
            error="a row failed" if reason == FINISH_ERROR else None,
            error_code=self.fail_code if reason == FINISH_ERROR else None,
        )

    def _close(self, handle: int, running: Running, choice: int) -> None:
        running.open.discard(choice)
        if not running.open:
            self.running.pop(handle, None)

    def _frame(self, rows: list[tuple[int, TokenDelta]]) -> replica_pb2.AttachResponse:
        return replica_pb2.AttachResponse(deltas=codec.deltas_frame(rows))

    async def _beat(self, context, lock) -> None:
        while not self.silent:
            heartbeat = replica_pb2.Heartbeat(load=codec.load_message(self.load))
            await self._write(context, lock, replica_pb2.AttachResponse(heartbeat=heartbeat))
            await asyncio.sleep(0.2)

    async def _write(self, context, lock, frame) -> None:
        async with lock:
            await context.write(frame)
