"""Messages to prompt ids through the model's own chat template, so that user text can never become a control token.

The template is Jinja, run in a sandbox with what templates expect of transformers. Shapes of messages are
`messages.py`.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import msgspec

from paceline.proto.errors import InvalidRequest, StartupError
from paceline.router.messages import Message, texts_of
from paceline.router.tokenizer import Tokenizer

log = logging.getLogger("paceline.router")

MAX_REFUSAL = 500  # characters of a template's own message
# What a template gets whether a request wants it or not, beside the names of the card's control tokens.
TAKEN = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Chat:
    """A template bound to the tokenizer whose control tokens it writes. Safe to use from several threads."""

    def __init__(self, template: str, template_tokens: dict[str, str], tokenizer: Tokenizer):
        """Raises StartupError if the template is not valid Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise StartupError(f"the chat template cannot be used: {error}") from error
        self._has_developer = "developer" in template
        self._tokens = template_tokens
        self._tokenizer = tokenizer
        self._source = template
        specials = tokenizer.special_strings
        self._openings = frozenset(text[:cut] for text in specials for cut in range(1, len(text)))
        self._longest = max(map(len, specials), default=0)

    def encode(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Prompt ids that end where the assistant begins or, with ``continue_final``, with the last message's text.

        ``variables`` are more that the template gets. Raises InvalidRequest with the template's own refusal.
        """
        texts = list(texts_of(messages, variables))
        if not (self._tokenizer.always_guard or any(map(self._may_forge, texts))):
            text = self.render(messages, add_generation_prompt, continue_final, variables)
            return self._tokenizer.encode_template(text)
        sentinel = self._unused_character(texts)
        guarded = [
            Message(m.role, self._guard(m.content, sentinel), m.name and self._guard(m.name, sentinel))
            for m in messages
        ]
        more = {name: self._guard_within(value, sentinel) for name, value in variables.items()}
        return self._tokenizer.encode_guarded(
            self.render(guarded, add_generation_prompt, continue_final, more), sentinel
        )

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """The text whose ids are the prompt; what users wrote stands in it as they wrote it."""
        if not continue_final:
            return self._fill(messages, add_generation_prompt, variables)
        # Only the template knows what it writes after a message: a character that nobody used marks where it begins.
        mark = self._unused_character(list(texts_of(messages, variables)))
        *before, last = messages
        marked = msgspec.structs.replace(last, content=last.content + mark)
        text = self._fill([*before, marked], add_generation_prompt, variables)
        if text.count(mark) != 1:
            raise InvalidRequest(
                "the chat template does not write the last message as it is, so that it cannot be continued",
                "continue_final_message",
            )
        return text[: text.index(mark)]

    def _fill(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        given = {
            **variables,
            **self._tokens,
            "messages": [self._for_template(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(given)
        except jinja2.TemplateError as error:
            message = (error.message or "no reason given")[:MAX_REFUSAL]
            raise InvalidRequest(f"the chat template refuses these messages: {message}", "messages") from error
        except Exception as error:  # templates are code: any of Python's errors may come out
            log.info("the chat template failed with %s", type(error).__name__)
            raise InvalidRequest("the chat template cannot render these messages", "messages") from error

    def _for_template(self, message: Message) -> dict[str, str]:
        role = "system" if message.role == "developer" and not self._has_developer else message.role
        plain = {"role": role, "content": message.content}
        return plain if message.name is None else plain | {"name": message.name}

    def _may_forge(self, text: str) -> bool:
        """Whether it holds a control token, or ends like the beginning of one that the next text might complete."""
        return self._tokenizer.special_pattern.search(text) is not None or self._ends_open(text)

    def _ends_open(self, text: str) -> bool:
        return any(text[-length:] in self._openings for length in range(1, min(len(text), self._longest) + 1))

    def _guard(self, text: str, sentinel: str) -> str:
        for special in self._tokenizer.special_strings:
            text = text.replace(special, special[0] + sentinel + special[1:])
        return text + sentinel if self._ends_open(text) else text

    def _guard_within(self, value: Any, sentinel: str) -> Any:
        if isinstance(value, str):
            return self._guard(value, sentinel)
        if isinstance(value, list):
            return [self._guard_within(member, sentinel) for member in value]
        if isinstance(value, dict):
            return {self._guard(name, sentinel): self._guard_within(member, sentinel) for name, member in value.items()}
        return value

    def _unused_character(self, texts: list[str]) -> str:
        used = set(self._source).union(*texts)
        return next(chr(code) for code in range(0xE100, 0xF8FF) if chr(code) not in used)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
