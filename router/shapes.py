"""Answers as OpenAI clients expect them: whole objects, stream events, errors. Bytes out; no I/O, no decisions.

Streams: per choice first a chunk with the role (chat) or the prompt (echo), then text with `finish_reason` null, then
an empty chunk with the reason; last, if asked for, one chunk with usage and no choices. All carry one id and one
`created`.
"""

import math
from collections.abc import Sequence
from typing import Any

import orjson

from paceline.proto.errors import PacelineError
from paceline.proto.request import TokenLogprobs, Usage
from paceline.router.detokenizer import Detokenizer, Prompt, TextDelta
from paceline.router.fields import CHAT
from paceline.router.mailbox import LOGPROB_BYTES
from paceline.router.openai import Call
from paceline.router.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not
MAX_MESSAGE = 2000  # characters of an error's text
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: readers of event streams pass over it
_ERROR_TYPES = {404: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error"}


class Shape:
    """The answer to one call. ``response_id`` and ``created`` (unix seconds) are the same in every chunk."""

    def __init__(self, call: Call, tokenizer: Tokenizer, response_id: str, created: int):
        self._call = call
        self._chat = call.route == CHAT
        self._ids = call.return_ids
        self._id, self._created = response_id, created
        self._choices = [_Choice(call, tokenizer) for _ in range(call.num_choices)]
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = b'"usage":null,' if call.include_usage else b""
        head = self._head(kind)[:-1] + b"," + usage + b'"choices":[{"index":'
        field = b',"delta":{"content":' if self._chat else b',"text":'
        self._heads = [b"data: " + head + str(index).encode() for index in range(call.num_choices)]
        self._text_heads = [head + field for head in self._heads]
        self._text_tail = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def opening(self) -> bytes:
        """The chunks that come before any text."""
        if not self._chat:
            return b""
        tail = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return b"".join([head + tail for head in self._heads])

    def events(self, batch: Sequence[TextDelta]) -> bytes:
        return b"".join([self.event(delta) for delta in batch])

    def event(self, delta: TextDelta) -> bytes:
        """What one delta is on the wire: a chunk with the prompt, one of text, one with the reason, all or none."""
        out = self._echo(delta.index, delta.prompt) if delta.prompt is not None and self._call.echo else b""
        if delta.text or delta.logprobs or (self._ids and delta.ids):
            if delta.logprobs is None and not self._ids:
                out += self._text_heads[delta.index] + orjson.dumps(delta.text) + self._text_tail
            else:
                logprobs = self._choices[delta.index].logprobs(delta.ids, delta.logprobs) if delta.logprobs else None
                out += self._chunk(delta.index, delta.text, logprobs, delta.ids)
        if delta.finish_reason is not None:
            empty = b',"delta":{}' if self._chat else b',"text":""'
            reason = orjson.dumps(delta.finish_reason)
            out += self._heads[delta.index] + empty + b',"logprobs":null,"finish_reason":' + reason + b"}]}\n\n"
        return out

    def _echo(self, index: int, prompt: Prompt) -> bytes:
        return self._chunk(index, prompt.text, self._choices[index].echo(prompt), [])

    def _chunk(self, index: int, text: str, logprobs: dict[str, list[Any]] | None, ids: list[int]) -> bytes:
        out = self._text_heads[index] + orjson.dumps(text)
        out += (b"}" if self._chat else b"") + b',"logprobs":' + orjson.dumps(logprobs)
        if self._ids:
            out += b',"token_ids":' + orjson.dumps(ids)
        return out + b',"finish_reason":null}]}\n\n'

    def usage_event(self, usage: Usage) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: " + self._head(kind)[:-1] + b',"choices":[],"usage":' + orjson.dumps(usage_of(usage)) + b"}\n\n"

    def collect(self, delta: TextDelta) -> None:
        """For an answer that is sent whole."""
        self._choices[delta.index].collect(delta)

    @property
    def size(self) -> int:
        """About how many characters of log probabilities `whole` has to write."""
        return sum(choice.size for choice in self._choices)

    def whole(self, usage: Usage) -> bytes:
        choices = [choice.whole(index) for index, choice in enumerate(self._choices)]
        head = self._head("chat.completion" if self._chat else "text_completion")
        tail = b""
        if self._call.list_prompt_logprobs:
            n = self._call.params.n
            prompts = [orjson.Fragment(orjson.dumps(choice.prompt_logprobs())) for choice in self._choices[::n]]
            if self._chat:
                tail = b',"prompt_logprobs":' + orjson.dumps(prompts[0])
            else:
                choices = [choice | {"prompt_logprobs": prompts[at // n]} for at, choice in enumerate(choices)]
        usage_json = orjson.dumps(usage_of(usage))
        return head[:-1] + b',"choices":' + orjson.dumps(choices) + b',"usage":' + usage_json + tail + b"}"

    def _head(self, kind: str) -> bytes:
        return orjson.dumps({"id": self._id, "object": kind, "created": self._created, "model": self._call.model})


class _Choice:
    """Gathers one choice and shapes its logprobs."""

    def __init__(self, call: Call, tokenizer: Tokenizer):
        self._chat = call.route == CHAT
        self._echoes = call.echo
        self._tells_logprobs = call.params.logprobs is not None
        self._tells_ids = call.return_ids
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason: str | None = None
        self._prompt: Prompt | None = None
        # For text_offset.
        self._meter = Detokenizer(tokenizer.text_bytes if call.skip_special else tokenizer.written_bytes)
        self._offset = 0

    def collect(self, delta: TextDelta) -> None:
        if delta.prompt is not None:
            self._prompt = delta.prompt
            self._texts.append(delta.prompt.text)
        self._texts.append(delta.text)
        self._ids += delta.ids
        self._logprobs += delta.logprobs or ()
        self._reason = delta.finish_reason or self._reason

    @property
    def size(self) -> int:
        return _size(self._logprobs) + (_size_of_prompt(self._prompt) if self._prompt else 0)

    def whole(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts)
        if self._chat:
            body: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            body = {"text": text}
        ids = {"token_ids": self._ids} if self._tells_ids else {}
        return {"index": index, **body, "logprobs": self._all_logprobs(), **ids, "finish_reason": self._reason}

    def _all_logprobs(self) -> dict[str, list[Any]] | None:
        echoed = self.echo(self._prompt) if self._prompt is not None and self._echoes else None
        if not self._logprobs:
            return echoed
        told = self.logprobs(self._ids, self._logprobs)
        return {name: echoed[name] + values for name, values in told.items()} if echoed else told

    def logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        if self._chat:
            return {"content": [self._chat_token(id, entry) for id, entry in zip(ids, logprobs, strict=True)]}
        offsets = []
        for id in ids:
            offsets.append(self._offset)
            self._offset += len(self._meter.push([id]))
        return self._lists(ids, logprobs, offsets)

    def echo(self, prompt: Prompt) -> dict[str, list[Any]] | None:
        """The prompt's tokens, of which the first has no log probability; None if the client wants none."""
        offsets = self._offsets_in(prompt)
        self._offset = len(prompt.text)
        return self._lists(prompt.ids, [None, *(prompt.logprobs or ())], offsets) if self._tells_logprobs else None

    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """One entry per token of the prompt, the first null, as vLLM shows them."""
        if self._prompt is None or self._prompt.logprobs is None:
            return []
        return [None, *map(self._ranked, self._prompt.ids[1:], self._prompt.logprobs)]

    def _offsets_in(self, prompt: Prompt) -> list[int]:
        """Where in the prompt's text each token begins. A control token that is not written there takes no room."""
        tokenizer, text, at, offsets = self._tokenizer, prompt.text, 0, []
        meter = Detokenizer(tokenizer.text_bytes, strip_space=tokenizer.leading_space)
        for id in prompt.ids:
            offsets.append(min(at, len(text)))
            written = tokenizer.token_bytes(id).decode("utf-8", "replace") if id in tokenizer.special_ids else ""
            at += len(written) if written and text.startswith(written, at) else len(meter.push([id]))
        return offsets

    def _lists(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, list[Any]]:
        return {
            "tokens": [*map(self._name, ids)],
            "token_logprobs": [entry and floor(entry.logprob) for entry in logprobs],
            "top_logprobs": [entry and self._tops(id, entry) for id, entry in zip(ids, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _tops(self, id: int, entry: TokenLogprobs) -> dict[str, float]:
        tops = {self._name(top): floor(value) for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True)}
        return tops | {self._name(id): floor(entry.logprob)}

    def _ranked(self, id: int, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        own = {str(id): self._rank(id, entry.logprob, None)}
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return own | {str(top): self._rank(top, value, rank) for rank, (top, value) in enumerate(tops, 1)}

    def _rank(self, id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(id).decode("utf-8", "replace")
        return {"logprob": floor(logprob), "rank": rank, "decoded_token": piece}

    def _chat_token(self, id: int, entry: TokenLogprobs) -> dict[str, Any]:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return self._token(id, entry.logprob) | {"top_logprobs": [self._token(top, value) for top, value in tops]}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": floor(logprob), "bytes": list(raw)}

    def _name(self, id: int) -> str:
        """A key of its own for each token, also for parts of a character."""
        raw = self._tokenizer.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def size_of(batch: Sequence[TextDelta]) -> int:
    """About how many characters of the prompts' log probabilities these deltas are."""
    return sum(_size_of_prompt(delta.prompt) for delta in batch if delta.prompt is not None)


def _size_of_prompt(prompt: Prompt) -> int:
    return _size(prompt.logprobs or ())


def _size(logprobs: Sequence[TokenLogprobs]) -> int:
    return LOGPROB_BYTES * len(logprobs) * (1 + len(logprobs[0].top_ids)) if logprobs else 0


def floor(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message[:MAX_MESSAGE], "type": kind, "param": param and param[:200], "code": code}
    return orjson.dumps({"error": error})


def error_of(error: PacelineError) -> bytes:
    return error_body(error.http_status, error.code, error.message, error.param)


def models_body(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "paceline", "max_model_len": max_model_len}
