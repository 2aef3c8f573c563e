"""Messages of `paceline.inference.v1` to and from what the router speaks inside. Pure: no I/O, no decisions.

A `GenerationSpec` becomes the object that the same request would be over HTTP and goes through `openai.parse`: one
table of fields, and therefore one set of rules, defaults and errors for both front ends.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from paceline.proto import inference_pb2 as pb
from paceline.proto.errors import InvalidRequest, PayloadTooLarge
from paceline.proto.model import ModelCard
from paceline.proto.request import FINISH_LENGTH, FINISH_STOP, TokenLogprobs, Usage
from paceline.router import openai
from paceline.router.config import RouterConfig
from paceline.router.detokenizer import TextDelta
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.keys import NOBODY, Key
from paceline.router.openai import Call
from paceline.router.shapes import floor
from paceline.router.tokenizer import Tokenizer

_REASONS = {FINISH_STOP: pb.FINISH_REASON_STOP, FINISH_LENGTH: pb.FINISH_REASON_LENGTH}


def call_of(spec: pb.GenerationSpec, card: ModelCard, config: RouterConfig, key: Key = NOBODY) -> Call:
    """Raises what `openai.parse` raises, and PayloadTooLarge for ids without end."""
    check_num_ids(spec.token_ids.ids, "prompt", config)
    route, body = prompt_of(spec)
    for field, value in spec.sampling.ListFields():  # those that are set; their names are HTTP's
        if field.name == "logit_bias":
            body["logit_bias"] = {str(id): amount for id, amount in value.items()}
        else:
            body[field.name] = list(value) if field.is_repeated else value
    for field, value in spec.output.ListFields():
        if field.name == "token_ids":
            body["return_token_ids"] = value
        elif field.name == "logprobs":
            body |= {"logprobs": True, "top_logprobs": value} if route == CHAT else {"logprobs": value}
        elif field.name != "text":
            body[field.name] = value
    for name in ("priority", "truncate_prompt_tokens"):
        if spec.HasField(name):
            body[name] = getattr(spec, name)
    if spec.cache_salt:
        body["cache_salt"] = spec.cache_salt
    if kind := spec.format.WhichOneof("kind"):
        value = list(spec.format.choice.texts) if kind == "choice" else getattr(spec.format, kind)
        body["structured_outputs"] = {"json" if kind == "json_schema" else kind: value}
    return openai.parse(route, body, card, config, key)


def check_num_ids(ids: Sequence[int], name: str, config: RouterConfig) -> None:
    """Before they become a list, which holds up every thread."""
    if len(ids) > config.max_body_values:
        raise PayloadTooLarge(f"{name} may hold at most {config.max_body_values} token ids", name)


def prompt_of(spec: pb.GenerationSpec | pb.TokenizeRequest) -> tuple[str, dict[str, Any]]:
    """The route that serves this kind of prompt, and an object with what says how its ids are made."""
    body: dict[str, Any] = {"model": spec.model} if spec.model else {}
    if spec.HasField("add_special_tokens"):
        body["add_special_tokens"] = spec.add_special_tokens
    kind = spec.WhichOneof("prompt")
    if kind == "messages":
        return CHAT, body | _messages_of(spec.messages)
    if kind == "text":
        body["prompt"] = spec.text
    elif kind == "token_ids":
        assert isinstance(spec, pb.GenerationSpec)
        body["prompt"] = list(spec.token_ids.ids)
    return COMPLETIONS, body


def _messages_of(chat: pb.ChatMessages) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{field.name: value for field, value in m.ListFields()} for m in chat.messages]}
    for name in ("add_generation_prompt", "continue_final_message"):
        if chat.HasField(name):
            body[name] = getattr(chat, name)
    if chat.template_kwargs:
        try:
            body["chat_template_kwargs"] = orjson.loads(chat.template_kwargs)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest("chat_template_kwargs is not valid JSON", "chat_template_kwargs") from error
    return body


class Shape:
    """The answer to one call. Pieces for a stream, or the whole of all that was collected."""

    def __init__(self, spec: pb.GenerationSpec, call: Call, tokenizer: Tokenizer, num_prompt_tokens: int):
        self.prompt = pb.PromptInfo(model=call.model, num_tokens=num_prompt_tokens)  # whole once a choice has begun
        self._text = spec.output.text or not spec.output.HasField("text")
        self._ids = call.return_ids
        self._tokenizer = tokenizer
        self._whole = [pb.Choice(index=index) for index in range(call.num_choices)]
        self._texts: list[list[str]] = [[] for _ in self._whole]

    def pieces(self, batch: Sequence[TextDelta]) -> list[pb.Choice]:
        return [self._piece(delta) for delta in batch]

    def collect(self, batch: Sequence[TextDelta]) -> None:
        """For an answer that is sent whole."""
        for piece in self.pieces(batch):
            self._texts[piece.index].append(piece.text)
            self._whole[piece.index].MergeFrom(piece)  # lists grow; the text is joined once, at the end

    def whole(self, usage: Usage) -> pb.GenerateResponse:
        for choice, texts in zip(self._whole, self._texts, strict=True):
            choice.text = "".join(texts)
        return pb.GenerateResponse(prompt=self.prompt, choices=self._whole, usage=usage_of(usage))

    def _piece(self, delta: TextDelta) -> pb.Choice:
        text = delta.text
        if delta.prompt is not None:
            text = delta.prompt.text + text
            if delta.prompt.logprobs and not self.prompt.logprobs:
                self.prompt.logprobs.extend(self._logprobs(delta.prompt.ids[1:], delta.prompt.logprobs))
        return pb.Choice(
            index=delta.index,
            text=text if self._text else "",
            token_ids=delta.ids if self._ids else (),
            logprobs=self._logprobs(delta.ids, delta.logprobs) if delta.logprobs else (),
            finish=pb.FinishInfo(reason=_REASONS[delta.finish_reason]) if delta.finish_reason else None,
        )

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
        return [
            pb.TokenLogprobs(
                token=self._token(id, entry.logprob),
                top=[self._token(*top) for top in zip(entry.top_ids, entry.top_logprobs, strict=True)],
            )
            for id, entry in zip(ids, logprobs, strict=True)
        ]

    def _token(self, id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(id=id, logprob=floor(logprob), piece=self._tokenizer.token_bytes(id))


def usage_of(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.num_prompt,
        completion_tokens=usage.num_generated,
        cached_prompt_tokens=usage.num_cached,
    )
