"""The one path of a request through the router, for every front end: in through the gate, ids, a replica, and out.

    call -> gate -> prompt ids -> context arithmetic -> submit -> accepted -> Generation

It knows no HTTP and no JSON. Shapes of requests are `openai.py`, of answers `shapes.py`; what comes back is
`generation.py`; which replica is asked is the pool's policy.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from paceline.proto import hashing
from paceline.proto.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineError,
    Draining,
    InvalidRequest,
    NoReplica,
    Overloaded,
    PacelineError,
    RequestTimeout,
)
from paceline.proto.model import ModelCard
from paceline.proto.request import Request
from paceline.router import limits
from paceline.router.chat import Chat
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT
from paceline.router.generation import Generation
from paceline.router.limits import Deadlines, Gate
from paceline.router.mailbox import Mailbox
from paceline.router.openai import Call
from paceline.router.pool import Pool
from paceline.router.structured import Structures
from paceline.router.tokenizer import Tokenizer

END_SLACK = 1.0  # seconds by which a replica's own word on a deadline may be late
SHED = (Overloaded, NoReplica, Draining, DeadlineError, Cancelled)


class Model:
    """What the router keeps of the served model: made once from the card, off the event loop."""

    def __init__(self, card: ModelCard, chat_template: str | None = None):
        """``chat_template`` replaces the card's. Raises StartupError."""
        self.card = card
        self.tokenizer = Tokenizer(card)
        template = chat_template or card.chat_template
        self.chat = Chat(template, card.template_tokens, self.tokenizer) if template else None
        if self.chat:
            self.tokenizer.prepare_guard()
        self.structures = Structures(card)

    def encode(self, call: Call) -> list[list[int]]:
        """All ids of each prompt. Pure, and long for a long text."""
        if call.route == CHAT:
            turns = call.messages, call.add_generation_prompt, call.continue_final, call.template_kwargs
            return [self._chat.encode(*turns)]
        add = call.add_special_tokens
        return [self.tokenizer.encode(p, add) if isinstance(p, str) else p for p in call.prompts]

    def text_of(self, call: Call) -> str:
        """The first prompt: what was sent, or what the template makes of the messages."""
        if call.route == CHAT:
            turns = call.messages, call.add_generation_prompt, call.continue_final, call.template_kwargs
            return self._chat.render(*turns)
        prompt = call.prompts[0]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def cut(self, ids: list[int], call: Call) -> list[int]:
        """The last ids, as many as the call wants to keep; the token that begins texts stays their first."""
        keep = call.truncate
        if keep == -1:
            keep = self.card.max_model_len - (1 if call.params.max_tokens is None else call.params.max_tokens)
        if keep is None or keep < 1 or len(ids) <= keep:
            return ids
        if ids[0] == self.card.bos_id:
            return [ids[0], *ids[len(ids) - keep + 1 :]]
        return ids[-keep:]

    @property
    def _chat(self) -> Chat:
        if self.chat is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        return self.chat


class Service:
    """Needs a pool that was given ``load`` as its ``on_card``; owns the gate.

    ``on_shed`` is told the code of every error that was not the request's own fault, ``on_move`` that a replica was
    lost and a prompt went to another.
    """

    def __init__(
        self,
        pool: Pool,
        config: RouterConfig,
        on_shed: Callable[[str], None] = lambda code: None,
        on_move: Callable[[int], None] = lambda num: None,
    ):
        self.gate = Gate()
        self._pool = pool
        self._config = config
        self._on_shed, self._on_move = on_shed, on_move
        self._model: Model | None = None
        self._open: set[Generation] = set()
        self._left = asyncio.Event()

    async def load(self, card: ModelCard) -> None:
        self._model = await asyncio.to_thread(Model, card, self._config.chat_template)

    @property
    def model(self) -> Model:
        """Raises NoReplica before the first card has come."""
        if self._model is None:
            raise NoReplica("no replica has said which model it serves", retry_after=1)
        return self._model

    def check(self) -> None:
        """Raises what even the smallest request would be refused with now: a body need not be read for that."""
        if error := self.gate.refusal(1, self._pool.usable):
            self._on_shed(error.code)
            raise error

    async def drain(self, seconds: float) -> bool:
        """Lets nobody in any more; waits until all have left, or so long. False: some are still inside."""
        self.gate.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.gate.num_open:
                    self._left.clear()
                    await self._left.wait()
        return not self.gate.num_open

    def cut(self, error: PacelineError) -> None:
        """Ends everything that is open with this error."""
        for generation in self._open:
            generation.cut(error)

    async def render(self, call: Call) -> tuple[str, list[int]]:
        """The first prompt of a call, as text and as the ids of which a generation would compute it.

        Raises what `open` raises for what cannot be asked of this model.
        """
        model = self.model
        await _with_grammar(model, call)
        return await model.tokenizer.off_loop(call.prompt_size, lambda: _rendered(model, call))

    @asynccontextmanager
    async def open(self, call: Call, deadlines: Deadlines | None = None) -> AsyncIterator[Generation]:
        """A generation that a replica has accepted. Leaving the block aborts what still runs, whatever the reason.

        Without ``deadlines`` the server's own hold. Raises RequestError for what cannot be asked of this model, what
        the gate or the replica answered, DeadlineError, or Cancelled for a client that does not read.
        """
        if deadlines is None:
            deadlines = limits.deadlines(self._config, time.time())
        try:
            inside = self.gate.admit(call.num_choices, self._pool.usable)
            try:
                async with self._running(call, deadlines) as generation:
                    yield generation
            finally:
                inside.leave()
                self._left.set()
        except SHED as error:
            self._on_shed(error.code)
            raise

    @asynccontextmanager
    async def _running(self, call: Call, deadlines: Deadlines) -> AsyncIterator[Generation]:
        """Ends by the clock too, in whatever state: a task that is stuck in a write cannot look at it.

        Once a replica has the request it is the replica that keeps the times; this one only makes sure of the last.
        """
        model, loop, config = self.model, asyncio.get_running_loop(), self._config
        offset = loop.time() - time.time()
        late: PacelineError | None
        until, late = deadlines.first() or (None, None)

        def too_slow() -> None:
            nonlocal late
            late = Cancelled("the client does not read what it asked for")
            if not clock.expired():
                clock.reschedule(loop.time())

        generation: Generation | None = None
        try:
            async with asyncio.timeout_at(until and until + offset) as clock:
                call = await _with_grammar(model, call)
                requests = await model.tokenizer.off_loop(call.prompt_size, lambda: _requests(model, call, deadlines))
                mailbox = Mailbox(
                    config.max_unread_tokens, config.max_unread_bytes, config.slow_reader_seconds, too_slow
                )
                generation = Generation(model, call, requests, self._pool, mailbox)
                self._open.add(generation)
                await generation.submit()
                late = RequestTimeout("the request took too long")
                clock.reschedule(deadlines.end and deadlines.end + offset + END_SLACK)
                yield generation
        except TimeoutError:
            if not clock.expired() or late is None:
                raise
            raise late from None
        finally:
            if generation is not None:
                self._open.discard(generation)
                generation.abort()
                if generation.moves:
                    self._on_move(generation.moves)


async def _with_grammar(model: Model, call: Call) -> Call:
    """The call with its structure compiled. Raises InvalidRequest for one that makes no grammar."""
    if call.structure is None:
        return call
    grammar = await model.structures.compile(call.structure)
    return msgspec.structs.replace(call, params=msgspec.structs.replace(call.params, grammar=grammar))


def _rendered(model: Model, call: Call) -> tuple[str, list[int]]:
    whole = model.encode(call)[0]
    ids = model.cut(whole, call)
    _check_context([ids], call, model.card)
    return (model.text_of(call) if len(ids) == len(whole) else model.tokenizer.decode(ids)), ids


def _requests(model: Model, call: Call, deadlines: Deadlines) -> list[Request]:
    """One per prompt; pure, and in a thread if there is much to tokenize and to hash."""
    card = model.card
    prompts = [model.cut(ids, call) for ids in model.encode(call)]
    _check_context(prompts, call, card)
    root = hashing.root_of(card, salts=call.salts)
    # Not the client's request id: two calls may carry the same one.
    name = secrets.token_hex(12)
    return [
        Request(
            request_id=f"{name}-{at}",
            prompt_ids=ids,
            params=call.params,
            tenant=call.tenant,
            priority=call.priority,
            queue_deadline=deadlines.queue,
            first_token_deadline=deadlines.first_token,
            deadline=deadlines.end,
            cache_root=root,
            block_hashes=hashing.prompt_hashes(root, ids, card.block_size),
        )
        for at, ids in enumerate(prompts)
    ]


def _check_context(prompts: list[list[int]], call: Call, card: ModelCard) -> None:
    """Each prompt must leave room for max_tokens, or for min_tokens and one token at least if that is not given."""
    limit, most, least = card.max_model_len, call.params.max_tokens, call.params.min_tokens
    for ids in prompts:
        num = len(ids)
        if num == 0:
            raise InvalidRequest("the prompt holds no tokens", "prompt")
        if num + (1 if most is None else min(1, most)) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num} tokens; the context of {limit} tokens leaves no room to answer",
                "messages" if call.route == CHAT else "prompt",
            )
        name, asked = ("min_tokens", least) if most is None else ("max_tokens", most)
        if num + asked > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num} tokens and {name} asks for {asked}; the context is {limit} tokens", name
            )
