"""Every field of the OpenAI surface that paceline knows, and what happens to it: the table behind validation and docs.

Three classes: supported (checked against kind and range), known but unsupported (refused by name unless its value asks
for nothing), and unknown (whatever is not in the table: ignored, and named in `X-Paceline-Ignored-Fields`).
"""

from typing import Any

import msgspec

COMPLETIONS, CHAT = "completions", "chat"
BOTH = (COMPLETIONS, CHAT)


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """``kind``: number, integer, boolean, string, or the name of a special check; ``unsupported`` has ``neutral``
    values beside null, which are accepted. ``above`` makes ``low`` exclusive. ``limit`` names the config value that
    is the upper bound."""

    name: str
    kind: str
    routes: tuple[str, ...] = BOTH
    low: float | None = None
    high: float | None = None
    above: bool = False
    limit: str | None = None
    neutral: tuple[Any, ...] = ()

    @property
    def supported(self) -> bool:
        return self.kind != "unsupported"


def _supported(name: str, kind: str, **more: Any) -> Field:
    return Field(name=name, kind=kind, **more)


def _unsupported(name: str, *neutral: Any, routes: tuple[str, ...] = BOTH) -> Field:
    return Field(name=name, kind="unsupported", neutral=neutral, routes=routes)


_INT32 = 2**31 - 1

FIELDS: tuple[Field, ...] = (
    _supported("model", "string"),
    _supported("prompt", "prompt", routes=(COMPLETIONS,)),
    _supported("messages", "messages", routes=(CHAT,)),
    _supported("max_tokens", "integer", low=1),
    _supported("max_completion_tokens", "integer", low=1, routes=(CHAT,)),
    _supported("temperature", "number", low=0, high=2),
    _supported("top_p", "number", low=0, above=True, high=1),
    _supported("top_k", "integer", low=-1, high=_INT32),
    _supported("min_p", "number", low=0, high=1),
    _supported("presence_penalty", "number", low=-2, high=2),
    _supported("frequency_penalty", "number", low=-2, high=2),
    _supported("repetition_penalty", "number", low=0, above=True),
    _supported("logit_bias", "logit_bias"),
    _supported("seed", "integer", low=-(2**63), high=2**64 - 1),
    _supported("n", "integer", low=1, limit="max_n"),
    _supported("best_of", "integer", low=1, limit="max_n"),
    _supported("stop", "stop"),
    _supported("stop_token_ids", "stop_ids"),
    _supported("ignore_eos", "boolean"),
    _supported("logprobs", "integer", low=0, limit="max_logprobs", routes=(COMPLETIONS,)),
    _supported("logprobs", "boolean", routes=(CHAT,)),
    _supported("top_logprobs", "integer", low=0, limit="max_logprobs", routes=(CHAT,)),
    _supported("stream", "boolean"),
    _supported("stream_options", "stream_options"),
    _supported("user", "string"),
    _supported("return_token_ids", "boolean"),
    _supported("priority", "integer", low=-_INT32 - 1, high=_INT32),
    # Known from OpenAI.
    _unsupported("echo", False, routes=(COMPLETIONS,)),
    _unsupported("suffix", "", routes=(COMPLETIONS,)),
    _unsupported("tools", [], routes=(CHAT,)),
    _unsupported("tool_choice", "none", "auto", routes=(CHAT,)),
    _unsupported("parallel_tool_calls", True, False, routes=(CHAT,)),  # says nothing without tools
    _unsupported("functions", [], routes=(CHAT,)),
    _unsupported("function_call", "none", "auto", routes=(CHAT,)),
    _unsupported("response_format", {"type": "text"}),
    _unsupported("modalities", ["text"], [], routes=(CHAT,)),
    _unsupported("audio", routes=(CHAT,)),
    _unsupported("prediction", routes=(CHAT,)),
    _unsupported("web_search_options", routes=(CHAT,)),
    _unsupported("reasoning_effort", "none", routes=(CHAT,)),
    # Known from vLLM and SGLang.
    _unsupported("min_tokens", 0),
    _unsupported("prompt_logprobs"),
    _unsupported("guided_json"),
    _unsupported("guided_regex"),
    _unsupported("guided_choice", []),
    _unsupported("guided_grammar"),
    _unsupported("guided_decoding_backend"),
    _unsupported("guided_whitespace_pattern"),
    _unsupported("structured_outputs", {}),
    _unsupported("structural_tag"),
    _unsupported("json_schema"),
    _unsupported("regex"),
    _unsupported("ebnf"),
    _unsupported("continue_final_message", False, routes=(CHAT,)),
    _unsupported("add_generation_prompt", True, routes=(CHAT,)),
    _unsupported("chat_template", routes=(CHAT,)),
    _unsupported("chat_template_kwargs", {}, routes=(CHAT,)),
    _unsupported("documents", [], routes=(CHAT,)),
    _unsupported("truncate_prompt_tokens"),
    _unsupported("include_stop_str_in_output", False),
    _unsupported("no_stop_trim", False),
    _unsupported("skip_special_tokens", True),
    _unsupported("spaces_between_special_tokens", True),
    _unsupported("add_special_tokens", True, routes=(COMPLETIONS,)),
    _unsupported("add_special_tokens", False, routes=(CHAT,)),
    _unsupported("cache_salt", ""),
    _unsupported("bad_words", []),
    _unsupported("allowed_token_ids"),
    _unsupported("use_beam_search", False),
    _unsupported("length_penalty", 1, 1.0),
    _unsupported("return_tokens_as_token_ids", False),
    _unsupported("logits_processors", []),
    _unsupported("prompt_embeds", routes=(COMPLETIONS,)),
    _unsupported("mm_processor_kwargs", {}, routes=(CHAT,)),
    _unsupported("kv_transfer_params"),
    _unsupported("lora_path"),
)

BY_ROUTE: dict[str, dict[str, Field]] = {
    route: {field.name: field for field in FIELDS if route in field.routes} for route in BOTH
}
