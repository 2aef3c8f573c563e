"""What clients ask beside generation: ids of a prompt, text of ids, what version runs. For both front ends; no I/O.

A prompt is checked by the table that generation uses, so that what is counted here is what would be computed there.
"""

from importlib.metadata import version as installed_version
from typing import Any

from paceline.proto.errors import InvalidRequest
from paceline.router import openai
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.service import Service

_PROMPT = ("model", "prompt", "messages")


def version() -> str:
    return installed_version("paceline")


async def tokenize(service: Service, body: dict[str, Any], config: RouterConfig) -> list[int]:
    """Ids as a generation would use them; ``add_special_tokens`` false leaves out the token that begins texts."""
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise InvalidRequest("send prompt or messages, not both", "prompt")
    model = service.model
    route = CHAT if body.get("messages") is not None else COMPLETIONS
    call = openai.parse(route, {name: body[name] for name in _PROMPT if name in body}, model.card, config)
    add = body.get("add_special_tokens")
    if add is not None and type(add) is not bool:
        raise InvalidRequest("add_special_tokens must be true or false", "add_special_tokens")
    if route == CHAT:
        if add:
            raise InvalidRequest("a chat template writes its own special tokens", "add_special_tokens")
        size = sum(len(message.content) for message in call.messages)
        return await model.tokenizer.off_loop(size, lambda: model.encode_chat(call))
    text = call.prompts[0]
    if len(call.prompts) != 1 or not isinstance(text, str):
        raise InvalidRequest("prompt must be one text", "prompt")
    return await model.tokenizer.off_loop(len(text), lambda: model.tokenizer.encode(text, add is not False))


async def detokenize(service: Service, body: dict[str, Any]) -> str:
    """``tokens`` as text, control tokens as they are written."""
    model = service.model
    openai.check_model(body.get("model"), model.card)
    ids = body.get("tokens")
    if type(ids) is not list:
        raise InvalidRequest("tokens must be a list of token ids", "tokens")
    openai.check_ids(ids, "tokens", model.card)
    return await model.tokenizer.off_loop(len(ids), lambda: model.tokenizer.decode(ids))
