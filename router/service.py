"""The one path of a request through the router, for every front end: ids, a replica, text, usage.

    call -> prompt ids -> context arithmetic -> submit -> accepted -> TextDeltas per choice -> usage

It knows no HTTP and no JSON. Shapes of requests are `openai.py`, of answers `shapes.py`; which replica is asked is the
pool's policy.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from paceline.proto import hashing
from paceline.proto.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NoReplica,
    PacelineError,
    ReplicaLost,
    SequenceFault,
)
from paceline.proto.model import ModelCard
from paceline.proto.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    Request,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from paceline.router.chat import Chat
from paceline.router.config import RouterConfig
from paceline.router.detokenizer import Detokenizer, TextDelta
from paceline.router.fields import CHAT
from paceline.router.link import Mailbox, Ticket
from paceline.router.openai import Call
from paceline.router.pool import Pool
from paceline.router.tokenizer import Tokenizer

log = logging.getLogger("paceline.router")

ENDING_WAIT = 2.0  # seconds that usage waits for a replica's endings once all text has been sent


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
        self.hash_root = hashing.root_of(card)

    def encode_chat(self, call: Call) -> list[int]:
        if self.chat is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        return self.chat.encode(call.messages)


class Service:
    """Needs a pool that was given ``load`` as its ``on_card``; owns nothing else."""

    def __init__(self, pool: Pool, config: RouterConfig):
        self._pool = pool
        self._config = config
        self._model: Model | None = None

    async def load(self, card: ModelCard) -> None:
        self._model = await asyncio.to_thread(Model, card, self._config.chat_template)

    @property
    def model(self) -> Model:
        """Raises NoReplica before the first card has come."""
        if self._model is None:
            raise NoReplica("no replica has said which model it serves", retry_after=1.0)
        return self._model

    @asynccontextmanager
    async def open(self, call: Call) -> "AsyncIterator[Generation]":
        """A generation that a replica has accepted. Leaving the block aborts what still runs, whatever the reason.

        Raises RequestError for what cannot be asked of this model, or what the replica answered.
        """
        model = self.model
        requests = await model.tokenizer.off_loop(_size(call), lambda: _requests(model, call))
        generation = Generation(model, call, requests)
        try:
            await generation.submit(self._pool)
            yield generation
        finally:
            generation.abort()


def _size(call: Call) -> int:
    """Characters and ids to work through."""
    return sum(map(len, call.prompts)) + sum(len(message.content) for message in call.messages)


def _requests(model: Model, call: Call) -> list[Request]:
    """One per prompt; pure, and in a thread if there is much to tokenize and to hash."""
    tokenizer, card = model.tokenizer, model.card
    if call.route == CHAT:
        prompts = [model.encode_chat(call)]
    else:
        prompts = [tokenizer.encode(p) if isinstance(p, str) else p for p in call.prompts]
    _check_context(prompts, call, card)
    # Not the client's request id: two calls may carry the same one.
    name = secrets.token_hex(12)
    return [
        Request(
            request_id=f"{name}-{at}",
            prompt_ids=ids,
            params=call.params,
            priority=call.priority,
            cache_root=model.hash_root,
            block_hashes=hashing.prompt_hashes(model.hash_root, ids, card.block_size),
        )
        for at, ids in enumerate(prompts)
    ]


class Generation:
    """One call that runs: P prompts with n choices each. Choice ``index`` is prompt * n + choice."""

    def __init__(self, model: Model, call: Call, requests: list[Request]):
        self.call = call
        self.model = model
        self.num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self._requests = requests
        self._mailbox = Mailbox()
        self._tickets: dict[Ticket, int] = {}  # ticket -> prompt
        n = call.params.n
        self._choices = [
            Choice(index, model, call, requests[index // n].prompt_ids) for index in range(n * len(requests))
        ]
        self._num_telling = len(self._choices)  # choices whose text has not ended

    async def submit(self, pool: Pool) -> None:
        """All prompts at once; returns when every one is accepted. Raises what the first refusal says."""
        for prompt, request in enumerate(self._requests):
            self._tickets[pool.submit(request, self._mailbox)] = prompt
        for ticket in self._tickets:
            await ticket.accepted

    def abort(self) -> None:
        """Idempotent; a generation that has ended has nothing to abort."""
        for ticket in self._tickets:
            ticket.abort()

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Everything that has come since the last time, never empty, until each choice has ended.

        Raises PacelineError when a choice cannot go on: the others are then of no use to the client either.
        """
        n = self.call.params.n
        while self._num_telling:
            told: list[TextDelta] = []
            failure: PacelineError | None = None
            for ticket, news in await self._mailbox.take():
                if isinstance(news, PacelineError):
                    failure = failure or news
                    continue
                try:
                    self._tell(self._choices[self._tickets[ticket] * n + news.choice], ticket, news, told)
                except PacelineError as error:
                    failure = failure or error
            if told:
                yield told
            if failure is not None:
                raise failure

    async def usage(self) -> Usage:
        """Prompt tokens once per prompt, generated ones of all choices. Call it after the last delta.

        A choice that ended here on a stop string is counted here; the cached share only its replica knows, so this
        waits a moment for its ending.
        """
        n = self.call.params.n
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_WAIT):
                while any(choice.ending is None for choice in self._choices[::n]):
                    for ticket, news in await self._mailbox.take():
                        if isinstance(news, PacelineError):
                            break
                        if news.finish_reason is not None:
                            self._choices[self._tickets[ticket] * n + news.choice].ending = news.usage
        cached = sum(choice.ending.num_cached for choice in self._choices[::n] if choice.ending)
        return Usage(self.num_prompt_tokens, cached, sum(choice.num_used for choice in self._choices))

    def _tell(self, choice: "Choice", ticket: Ticket, news: TokenDelta, told: list[TextDelta]) -> None:
        was_telling = choice.telling
        delta = choice.take(news)
        if delta is not None:
            told.append(delta)
        if was_telling and not choice.telling:
            self._num_telling -= 1
            if news.finish_reason is None:
                ticket.finish(news.choice, choice.num_used)


class Choice:
    """One stream of ids becoming text. ``telling`` ends with its finish reason; ``ending`` is the replica's count."""

    __slots__ = ("_detokenizer", "_index", "_num_seen", "ending", "telling")

    def __init__(self, index: int, model: Model, call: Call, prompt_ids: list[int]):
        tokenizer = model.tokenizer
        # A chat reply is a text of its own; a completion goes on from its prompt, unless that holds no text at all.
        alone = call.route == CHAT or all(id in tokenizer.special_ids for id in prompt_ids)
        self._index = index
        self._detokenizer = Detokenizer(tokenizer.text_bytes, call.stop, alone and tokenizer.leading_space)
        self._num_seen = 0
        self.telling = True
        self.ending: Usage | None = None

    @property
    def num_used(self) -> int:
        """Generated ids that count: up to the one that completed a stop string."""
        return self._detokenizer.num_ids

    def take(self, news: TokenDelta) -> TextDelta | None:
        """None if there is nothing to tell. Raises ReplicaLost for a gap in the ids, and the replica's own error."""
        if news.finish_reason is not None:
            self.ending = news.usage
        if not self.telling:
            return None
        if news.finish_reason == FINISH_ERROR:
            raise SequenceFault(news.error or "the replica could not go on with this request")
        if news.finish_reason == FINISH_ABORT:
            raise ReplicaLost("the replica gave this request up")
        ids, logprobs = self._fresh(news)
        text = self._detokenizer.push(ids)
        reason = news.finish_reason
        if self._detokenizer.stopped:
            reason = FINISH_STOP
            num_kept = len(ids) - (self._num_seen - self._detokenizer.num_ids)
            ids, logprobs = ids[:num_kept], logprobs and logprobs[:num_kept]
        elif reason is not None:
            text += self._detokenizer.flush()
        if reason is not None:
            self.telling = False
        elif not text and not logprobs:
            return None
        return TextDelta(index=self._index, text=text, ids=ids, logprobs=logprobs, finish_reason=reason)

    def _fresh(self, news: TokenDelta) -> tuple[list[int], list[TokenLogprobs] | None]:
        """The ids not seen yet. Ids that come again are dropped; missing ones mean a stream that cannot be trusted."""
        ids, logprobs = news.ids, news.logprobs
        ahead = news.offset - self._num_seen
        if ahead > 0:
            raise ReplicaLost("the replica skipped tokens of this request")
        if ahead < 0:
            ids, logprobs = ids[-ahead:], logprobs and logprobs[-ahead:]
        self._num_seen += len(ids)
        return ids, logprobs


def _check_context(prompts: list[list[int]], call: Call, card: ModelCard) -> None:
    """Refuses, never truncates: each prompt must leave room for max_tokens, or for one token if that is not given."""
    limit, asked = card.max_model_len, call.params.max_tokens
    for ids in prompts:
        num = len(ids)
        if num == 0:
            raise InvalidRequest("the prompt holds no tokens", "prompt")
        if num >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {num} tokens; the context of {limit} tokens leaves no room to answer",
                "messages" if call.route == CHAT else "prompt",
            )
        if asked is not None and num + asked > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num} tokens and max_tokens asks for {asked}; the context is {limit} tokens",
                "max_tokens",
            )
