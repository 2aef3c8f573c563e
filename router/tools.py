"""What clients ask beside generation: ids of a prompt, text of ids, what version runs. For both front ends; no I/O.

A prompt is checked by the table that generation uses, so that what is counted here is what would be computed there.
"""

from importlib.metadata import version as installed_version
from typing import Any

from paceline.proto.errors import InvalidRequest
from paceline.proto.model import ModelCard
from paceline.router import openai
from paceline.router.checks import check_ids
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.keys import NOBODY, Key
from paceline.router.openai import Call
from paceline.router.service import Model


def version() -> str:
    return installed_version("paceline")


def one_prompt(body: dict[str, Any], card: ModelCard, config: RouterConfig, key: Key = NOBODY) -> Call:
    """A call of either route, by whether it has messages or a prompt. Raises what `openai.parse` raises."""
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise InvalidRequest("send prompt or messages, not both", "prompt")
    call = openai.parse(CHAT if body.get("messages") is not None else COMPLETIONS, body, card, config, key)
    if len(call.prompts) > 1:
        raise InvalidRequest("prompt must be one text or one list of token ids", "prompt")
    return call


async def tokenize(model: Model, call: Call) -> tuple[str, list[int]]:
    """The prompt as text and all its ids, as a generation would use them, however long it is."""
    return await model.tokenizer.off_loop(call.prompt_size, lambda: (model.text_of(call), model.encode(call)[0]))


async def detokenize(model: Model, body: dict[str, Any]) -> str:
    """``tokens`` as text, control tokens as they are written."""
    openai.check_model(body.get("model"), model.card)
    ids = body.get("tokens")
    if type(ids) is not list:
        raise InvalidRequest("tokens must be a list of token ids", "tokens")
    check_ids(ids, "tokens", model.card)
    return await model.tokenizer.off_loop(len(ids), lambda: model.tokenizer.decode(ids))
