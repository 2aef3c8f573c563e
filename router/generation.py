"""One call that runs: what comes back from replicas becomes text, choice by choice.

A prompt of which nothing has come yet moves to another replica when its own is lost or does not take it. It knows
tickets and ids; who may come in, and until when, is `service.py`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from paceline.proto.errors import PacelineError, ReplicaLost, SequenceFault, from_wire
from paceline.proto.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    Request,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from paceline.router import access
from paceline.router.detokenizer import Detokenizer, Prompt, TextDelta
from paceline.router.fields import CHAT
from paceline.router.link import Link, Ticket
from paceline.router.mailbox import Mailbox
from paceline.router.openai import Call
from paceline.router.pool import Pool

if TYPE_CHECKING:
    from paceline.router.service import Model

log = logging.getLogger("paceline.router")

ENDING_WAIT = 2.0  # seconds that usage waits for a replica's endings once all text has been sent


class Generation:
    """One call that runs: P prompts with n choices each. Choice ``index`` is prompt * n + choice.

    ``moves`` counts prompts that another replica took over.
    """

    def __init__(self, model: "Model", call: Call, requests: list[Request], pool: Pool, mailbox: Mailbox):
        self.call = call
        self.model = model
        self.num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.moves = 0
        self._requests = requests
        self._pool = pool
        self._mailbox = mailbox
        self._tickets: dict[Ticket, int] = {}  # ticket -> prompt; one for each, the newest
        self._tried: list[list[Link]] = [[] for _ in requests]  # replicas that lost or refused the prompt
        n = call.params.n
        stop_ids = frozenset((*model.card.eos_ids, *call.params.stop_ids))
        self._choices = [
            Choice(index, model, call, requests[index // n].prompt_ids, stop_ids) for index in range(n * len(requests))
        ]
        wants_prompt = call.echo or call.params.prompt_logprobs is not None
        self._untold = set(range(len(self._choices))) if wants_prompt else set()  # choices that owe their prompt
        self._prompts: list[Prompt | None] = [None] * len(requests)  # what choices show of them, once it is asked for
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]  # what has come of each prompt's
        self._num_telling = len(self._choices)  # choices whose text has not ended

    async def submit(self) -> None:
        """All prompts at once; returns when every one is accepted. Raises what the first refusal says."""
        for prompt in range(len(self._requests)):
            self._send(prompt)
        while waiting := [ticket for ticket in self._tickets if not _accepted(ticket)]:
            try:
                await waiting[0].accepted
            except PacelineError as error:
                if not self._move(waiting[0], error):
                    raise

    @property
    def num_generated(self) -> int:
        """Ids that came so far and count, all choices."""
        return sum(choice.num_used for choice in self._choices)

    def abort(self) -> None:
        """Idempotent; a generation that has ended has nothing to abort."""
        self._mailbox.close()
        for ticket in self._tickets:
            ticket.abort()

    def cut(self, error: PacelineError) -> None:
        """Ends it with this error, after what has come already."""
        self._mailbox.put(None, error)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Everything that has come since the last time, never empty, until each choice has ended.

        Raises PacelineError when a choice cannot go on: the others are then of no use to the client either.
        """
        while self._num_telling:
            told: list[TextDelta] = []
            failure: PacelineError | None = None
            for ticket, news in await self._mailbox.take():
                error = self._hear(ticket, news, told)
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
                        if ticket not in self._tickets or isinstance(news, PacelineError):
                            break
                        if news.finish_reason is not None:
                            self._choices[self._tickets[ticket] * n + news.choice].ending = news.usage
        cached = sum(choice.ending.num_cached for choice in self._choices[::n] if choice.ending)
        usage = Usage(self.num_prompt_tokens, cached, self.num_generated)
        access.used(usage)
        return usage

    def _hear(
        self, ticket: Ticket | None, news: TokenDelta | PacelineError, told: list[TextDelta]
    ) -> PacelineError | None:
        """Takes one piece of news in. Returns why the call cannot go on, if so."""
        if ticket is None:
            return news if isinstance(news, PacelineError) else None
        prompt = self._tickets.get(ticket)
        if prompt is None:  # of a replica that the prompt has left
            return None
        error, may_move = news, True
        if isinstance(news, TokenDelta):
            try:
                if news.prompt_logprobs:
                    self._prompt_logprobs[prompt] += news.prompt_logprobs
                self._tell(self._choices[prompt * self.call.params.n + news.choice], ticket, news, told)
                return None
            except PacelineError as raised:
                error, may_move = raised, news.finish_reason != FINISH_ABORT  # an operator's word holds everywhere
        assert isinstance(error, PacelineError)
        return None if may_move and self._move(ticket, error) else error

    def _tell(self, choice: "Choice", ticket: Ticket, news: TokenDelta, told: list[TextDelta]) -> None:
        was_telling = choice.telling
        delta = choice.take(news)
        if delta is not None:
            if delta.index in self._untold:
                prompt = self._prompt(delta.index // self.call.params.n)
                delta = msgspec.structs.replace(delta, prompt=prompt)
                self._untold.discard(delta.index)
            told.append(delta)
        if was_telling and not choice.telling:
            self._num_telling -= 1
            if news.finish_reason is None:
                ticket.finish(news.choice, choice.num_used)

    def _prompt(self, at: int) -> Prompt:
        """What its choices begin with. Raises SequenceFault if the replica did not tell all of it."""
        if (prompt := self._prompts[at]) is None:
            call, ids = self.call, self._requests[at].prompt_ids
            logprobs = self._prompt_logprobs[at] if call.params.prompt_logprobs is not None else None
            if logprobs is not None and len(logprobs) != len(ids) - 1:
                raise SequenceFault("the replica left out log probabilities of the prompt")
            prompt = self._prompts[at] = Prompt(ids=ids, text=self._echo(at) if call.echo else "", logprobs=logprobs)
        return prompt

    def _echo(self, at: int) -> str:
        """A prompt as it was sent; of one that was sent as ids, or cut to some of them, what they stand for."""
        sent = self.call.prompts[at]
        if isinstance(sent, str) and self.call.truncate is None:
            return sent
        return self.model.tokenizer.decode(self._requests[at].prompt_ids)

    def _send(self, prompt: int) -> Ticket:
        ticket = self._pool.submit(self._requests[prompt], self._mailbox, besides=self._tried[prompt])
        self._tickets[ticket] = prompt
        return ticket

    def _move(self, ticket: Ticket, error: PacelineError) -> bool:
        """Another replica, if there is one, gets a prompt of which nothing has come. A prompt that lost a replica may
        be why: it moves once. One that was only refused tries them all."""
        prompt, n = self._tickets[ticket], self.call.params.n
        if not error.movable or any(choice.num_seen for choice in self._choices[prompt * n : (prompt + 1) * n]):
            return False
        request = self._requests[prompt]
        if isinstance(error, ReplicaLost):
            if request.attempt:
                return False
            self._requests[prompt] = msgspec.structs.replace(request, attempt=request.attempt + 1)
        self._tried[prompt].append(ticket.link)
        self._prompts[prompt], self._prompt_logprobs[prompt] = None, []  # the new one tells all of them
        try:
            new = self._send(prompt)
        except PacelineError:
            return False  # nowhere to go; what happened first says more
        del self._tickets[ticket]
        ticket.abort()
        self.moves += 1
        log.info("request %s moves from %s to %s: %s", request.request_id, *_ids(ticket, new), error.code)
        new.accepted.add_done_callback(lambda answer: self._on_answer(new, answer))
        return True

    def _on_answer(self, ticket: Ticket, answer: asyncio.Future[None]) -> None:
        """Nobody may be waiting for the answer any more: a refusal is news."""
        if not answer.cancelled() and isinstance(error := answer.exception(), PacelineError):
            self._mailbox.put(ticket, error)


def _accepted(ticket: Ticket) -> bool:
    return ticket.accepted.done() and not ticket.accepted.cancelled() and ticket.accepted.exception() is None


def _ids(*tickets: Ticket) -> list[str]:
    return [ticket.link.replica_id for ticket in tickets]


class Choice:
    """One stream of ids becoming text. ``telling`` ends with its finish reason; ``ending`` is the replica's count.

    ``num_seen``: ids that have come, counting or not.
    """

    __slots__ = ("_detokenizer", "_hidden_ids", "_index", "_return_ids", "ending", "num_seen", "telling")

    def __init__(self, index: int, model: "Model", call: Call, prompt_ids: list[int], stop_ids: frozenset[int]):
        """``stop_ids``: those that end a choice, the model's own among them."""
        tokenizer = model.tokenizer
        # A reply is a text of its own; other answers go on from their prompt, unless that holds no text at all.
        replies = call.route == CHAT and not call.continue_final
        alone = replies or all(id in tokenizer.special_ids for id in prompt_ids)
        self._index = index
        self._detokenizer = Detokenizer(
            tokenizer.text_bytes if call.skip_special else tokenizer.written_bytes,
            call.stop,
            num_free=call.params.min_tokens,
            include_stop=call.include_stop,
            strip_space=alone and tokenizer.leading_space,
        )
        self._hidden_ids = frozenset() if call.include_stop else stop_ids  # not shown where they end the choice
        self.num_seen = 0
        self._return_ids = call.return_ids
        self.telling = True
        self.ending: Usage | None = None

    @property
    def num_used(self) -> int:
        """Generated ids that count: up to the one that completed a stop string."""
        return self._detokenizer.num_ids

    def take(self, news: TokenDelta) -> TextDelta | None:
        """None if there is nothing to tell. Raises ReplicaLost for a gap in the ids, and the replica's own error."""
        if self.telling and news.finish_reason == FINISH_ERROR:
            message = news.error or "the replica could not go on with this request"
            raise from_wire(news.error_code or SequenceFault.code, message)
        if self.telling and news.finish_reason == FINISH_ABORT:
            raise ReplicaLost("the replica gave this request up")
        if news.finish_reason is not None:
            self.ending = news.usage
        if not self.telling:
            return None
        ids, logprobs = self._fresh(news)
        reason = news.finish_reason
        if reason == FINISH_STOP and ids and ids[-1] in self._hidden_ids:
            text = self._detokenizer.push(ids[:-1])
            self._detokenizer.skip()
        else:
            text = self._detokenizer.push(ids)
        if self._detokenizer.stopped:
            reason = FINISH_STOP
            num_kept = len(ids) - (self.num_seen - self._detokenizer.num_ids)
            ids, logprobs = ids[:num_kept], logprobs and logprobs[:num_kept]
        elif reason is not None:
            text += self._detokenizer.flush()
        if reason is not None:
            self.telling = False
        elif not (text or logprobs or (self._return_ids and ids)):
            return None
        return TextDelta(index=self._index, text=text, ids=ids, logprobs=logprobs, finish_reason=reason)

    def _fresh(self, news: TokenDelta) -> tuple[list[int], list[TokenLogprobs] | None]:
        """The ids not seen yet. Ids that come again are dropped; missing ones mean a stream that cannot be trusted."""
        ids, logprobs = news.ids, news.logprobs
        ahead = news.offset - self.num_seen
        if ahead > 0:
            raise ReplicaLost("the replica skipped tokens of this request")
        if ahead < 0:
            ids, logprobs = ids[-ahead:], logprobs and logprobs[-ahead:]
        self.num_seen += len(ids)
        return ids, logprobs
