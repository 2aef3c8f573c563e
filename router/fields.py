"""Every field of the OpenAI surface that paceline knows, and what happens to it: the table behind validation and docs.

Three classes. Supported: checked against kind and range, then done. Unsupported: refused by name, unless the value asks
for nothing. Ignored: harmless, and treated like a field that is not in the table: named in
`X-Paceline-Ignored-Fields`, or refused by a strict server. How values are checked is `checks.py`.
"""

from typing import Any

import msgspec

COMPLETIONS, CHAT = "completions", "chat"
BOTH = (COMPLETIONS, CHAT)
SUPPORTED, UNSUPPORTED, IGNORED = "supported", "unsupported", "ignored"


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One row. ``doc`` is a sentence for users: what it does, unit, default; of what is not supported: why.

    ``kind`` names the check of a supported field. Ranges: ``above`` makes ``low`` exclusive; ``limit`` names the config
    value that is the upper bound: of a number, of a string's characters, of a list's or an object's members.
    ``neutral``: values beside null of an unsupported field that ask for nothing, and are accepted.
    """

    name: str
    doc: str
    status: str = SUPPORTED
    kind: str = ""
    routes: tuple[str, ...] = BOTH
    low: float | None = None
    high: float | None = None
    above: bool = False
    limit: str | None = None
    neutral: tuple[Any, ...] = ()


def _supported(name: str, kind: str, doc: str, **more: Any) -> Field:
    return Field(name=name, kind=kind, doc=doc, **more)


def _unsupported(name: str, doc: str, *neutral: Any, routes: tuple[str, ...] = BOTH) -> Field:
    return Field(name=name, status=UNSUPPORTED, doc=doc, neutral=neutral, routes=routes)


def _ignored(name: str, doc: str, routes: tuple[str, ...] = BOTH) -> Field:
    return Field(name=name, status=IGNORED, doc=doc, routes=routes)


_INT32 = 2**31 - 1
_ONE, _TALK = (COMPLETIONS,), (CHAT,)

_PROMPT: tuple[Field, ...] = (
    _supported("model", "string", "Name of the model, as `/v1/models` lists it. Default: the one that is served."),
    _supported(
        "prompt", "prompt", "A text, a list of token ids, or a list of either; each is a prompt. Required.", routes=_ONE
    ),
    _supported("messages", "messages", "The conversation, oldest first. Required.", routes=_TALK),
    _supported(
        "add_special_tokens",
        "boolean",
        "Whether a text gets the token that begins texts, where the model has one. Default true.",
        routes=_ONE,
    ),
    _supported(
        "add_generation_prompt",
        "boolean",
        "Whether the template opens the assistant's turn. Default true, and false with `continue_final_message`.",
        routes=_TALK,
    ),
    _supported(
        "continue_final_message",
        "boolean",
        "The answer goes on from the last message, which must be the assistant's. Default false.",
        routes=_TALK,
    ),
    _supported(
        "chat_template_kwargs",
        "template_kwargs",
        "More variables for the chat template, as an object; names that it gets anyway are refused. Default none.",
        routes=_TALK,
    ),
    _supported(
        "truncate_prompt_tokens",
        "truncate",
        "Keep so many of the prompt's last tokens, and the token that begins texts as the first of them; -1 keeps what "
        "leaves room for `max_tokens`. Default: a prompt is never cut.",
        low=-1,
    ),
    _supported(
        "cache_salt",
        "string",
        "Prompts share cached prefixes only with those of the same salt. Default none.",
        limit="max_salt_len",
    ),
)

_SAMPLING: tuple[Field, ...] = (
    _supported(
        "max_tokens",
        "integer",
        "Most tokens per choice. 0, with `echo` or `prompt_logprobs`, computes the prompt alone. Default: what the "
        "context leaves.",
        low=0,
        routes=_ONE,
    ),
    _supported(
        "max_tokens", "integer", "Most tokens per choice. Default: what the context leaves.", low=1, routes=_TALK
    ),
    _supported("max_completion_tokens", "integer", "The same as `max_tokens`.", low=1, routes=_TALK),
    _supported(
        "min_tokens",
        "integer",
        "Neither an end token nor a stop comes before so many tokens. A grammar that has come to its end wins. "
        "Default 0.",
        low=0,
    ),
    _supported("temperature", "number", "0 is greedy. Default: the model's own, or 1.", low=0, high=2),
    _supported(
        "top_p",
        "number",
        "Draw from the likeliest tokens that together have this probability. Default: the model's own, or 1.",
        low=0,
        above=True,
        high=1,
    ),
    _supported(
        "top_k",
        "integer",
        "Draw from so many of the likeliest tokens; 0 and -1 keep all. Default: the model's own, or 0.",
        low=-1,
        high=_INT32,
    ),
    _supported(
        "min_p",
        "number",
        "Draw from tokens at least this share as likely as the likeliest. Default: the model's own, or 0.",
        low=0,
        high=1,
    ),
    _supported(
        "presence_penalty",
        "number",
        "Taken from the logit of each token that has been generated already. Default 0.",
        low=-2,
        high=2,
    ),
    _supported(
        "frequency_penalty",
        "number",
        "Taken from the logit of a token once for each time that it has been generated. Default 0.",
        low=-2,
        high=2,
    ),
    _supported(
        "repetition_penalty",
        "number",
        "Above 1, tokens of the prompt and of the answer become less likely. Default: the model's own, or 1.",
        low=0.01,  # the rank divides by it
        high=100,
    ),
    _supported(
        "logit_bias",
        "logit_bias",
        "Token ids, as strings, and what is added to their logits, from -100 to 100. Default none.",
        limit="max_logit_bias",
    ),
    _supported(
        "seed",
        "integer",
        "Any 64 bits. The same seed draws the same tokens, whatever else runs. Default: a random one.",
        low=-(2**63),
        high=2**64 - 1,
    ),
    _supported("n", "integer", "Choices per prompt. Default 1.", low=1, limit="max_n"),
    _supported("best_of", "integer", "Accepted where it equals `n`; anything else is refused.", low=1, limit="max_n"),
    _supported(
        "stop",
        "stop",
        "A string, or a list of them: the first to appear ends the choice and is not part of its text. Default none.",
        limit="max_stop",
    ),
    _supported(
        "stop_token_ids",
        "stop_ids",
        "Token ids that end a choice, beside the model's own. Default none.",
        limit="max_stop_ids",
    ),
    _supported("ignore_eos", "boolean", "Go on past the model's own end tokens. Default false."),
    _supported(
        "priority",
        "integer",
        "Lower runs first. The API key may set the lowest number that is allowed. Default 0, or the key's own if that "
        "is higher.",
        low=-_INT32 - 1,
        high=_INT32,
    ),
)

_STRUCTURE: tuple[Field, ...] = (
    _supported(
        "response_format",
        "response_format",
        "`text`, `json_object`, or `json_schema` with the schema in `json_schema.schema`. Default text.",
    ),
    _supported(
        "structured_outputs",
        "structured_outputs",
        "An object with one of `json` (a schema), `json_object`, `regex`, `choice` (a list of texts) and `grammar`. "
        "Default none.",
    ),
    _supported("guided_json", "schema", "A JSON schema, as an object or as text, that the answer obeys. Default none."),
    _supported("guided_regex", "regex", "A regular expression that the whole text matches. Default none."),
    _supported("guided_choice", "choice", "A list of texts: the answer is one of them. Default none."),
    _supported("guided_grammar", "grammar", "A grammar, in the notation of Lark or of GBNF. Default none."),
    _supported("json_schema", "schema", "The same as `guided_json`."),
    _supported("regex", "regex", "The same as `guided_regex`."),
    _supported("ebnf", "grammar", "The same as `guided_grammar`."),
)

_OUTPUT: tuple[Field, ...] = (
    _supported(
        "logprobs",
        "integer",
        "Log probabilities of each token and of so many of the likeliest ones beside it. Default none.",
        low=0,
        limit="max_logprobs",
        routes=_ONE,
    ),
    _supported("logprobs", "boolean", "Log probabilities of each token. Default false.", routes=_TALK),
    _supported(
        "top_logprobs",
        "integer",
        "So many of the likeliest tokens beside each; needs `logprobs: true`. Default 0.",
        low=0,
        limit="max_logprobs",
        routes=_TALK,
    ),
    _supported(
        "prompt_logprobs",
        "integer",
        "The same of the prompt's tokens, from the second on; not with `stream`. Such a request reads nothing from the "
        "prefix cache. Default none.",
        low=0,
        limit="max_logprobs",
    ),
    _supported(
        "echo",
        "boolean",
        "Each choice begins with the text of its prompt, and its `logprobs` with the prompt's. Default false.",
        routes=_ONE,
    ),
    _supported(
        "include_stop_str_in_output",
        "boolean",
        "What ended the choice stays in its text, if it has text. Default false.",
    ),
    _supported("no_stop_trim", "boolean", "The same as `include_stop_str_in_output`."),
    _supported("skip_special_tokens", "boolean", "Leave control tokens out of the text. Default true."),
    _supported("return_token_ids", "boolean", "Each choice carries its `token_ids`. Default false."),
    _supported("stream", "boolean", "Answer in server-sent events, as tokens come. Default false."),
    _supported(
        "stream_options",
        "stream_options",
        "`include_usage: true` ends a stream with a chunk that holds the usage; needs `stream: true`. Default none.",
    ),
    _supported("user", "string", "Accepted and not used: the tenant comes from the API key."),
)

_OPENAI: tuple[Field, ...] = (
    _unsupported("echo", "Chats do not repeat their messages.", False, routes=_TALK),
    _unsupported("add_special_tokens", "A chat template writes its own.", False, routes=_TALK),
    _unsupported("suffix", "Text after the answer needs a model trained for it.", "", routes=_ONE),
    _unsupported("tools", "Tools are not served yet.", [], routes=_TALK),
    _unsupported("tool_choice", "Tools are not served yet.", "none", "auto", routes=_TALK),
    _unsupported("parallel_tool_calls", "Says nothing without tools.", True, False, routes=_TALK),
    _unsupported("functions", "Tools are not served yet.", [], routes=_TALK),
    _unsupported("function_call", "Tools are not served yet.", "none", "auto", routes=_TALK),
    _unsupported("modalities", "Answers are text.", ["text"], [], routes=_TALK),
    _unsupported("audio", "Answers are text.", routes=_TALK),
    _unsupported("prediction", "Predicted outputs are not used.", routes=_TALK),
    _unsupported("web_search_options", "The model has no tools of its own.", routes=_TALK),
    _unsupported("moderation", "Nothing is moderated.", routes=_TALK),
    _unsupported("reasoning_effort", "Reasoning is not told apart from the answer yet.", "none", routes=_TALK),
    _unsupported("store", "Nothing is stored.", False),
    _unsupported("service_tier", "There is one tier; see `priority`.", "auto", "default"),
    _ignored("metadata", "Belongs to stored answers; nothing is stored."),
    _ignored("safety_identifier", "Who asks is the API key's tenant."),
    _ignored("prompt_cache_key", "The prefix cache finds equal prompts by itself; see `cache_salt`."),
    _ignored("prompt_cache_options", "The prefix cache keeps what it has room for."),
    _ignored("prompt_cache_retention", "The prefix cache keeps what it has room for."),
    _ignored("verbosity", "A hint for models that know it.", _TALK),
)

_PEERS: tuple[Field, ...] = (
    _unsupported("chat_template", "A template is code: only the server's own is run.", routes=_TALK),
    _unsupported("documents", "Put texts into the messages.", [], routes=_TALK),
    _unsupported("truncation_side", "The last tokens are kept.", "left"),
    _unsupported("guided_whitespace_pattern", "JSON has at most one blank between tokens."),
    _unsupported("structural_tag", "Structure holds for the whole text."),
    _unsupported("stop_regex", "Stops are strings or token ids.", []),
    _unsupported("bad_words", "Use `logit_bias`.", []),
    _unsupported("allowed_token_ids", "Use `guided_choice` or a grammar."),
    _unsupported("logprob_token_ids", "Log probabilities are of the likeliest tokens."),
    _unsupported("use_beam_search", "Choices are drawn one by one.", False),
    _unsupported("length_penalty", "Belongs to beam search.", 1, 1.0),
    _unsupported("early_stopping", "Belongs to beam search.", False),
    _unsupported("watermarking", "Tokens are not marked.", False),
    _unsupported("repetition_detection", "Use penalties or `max_tokens`."),
    _unsupported("thinking_token_budget", "Reasoning is not told apart from the answer yet.", -1),
    _unsupported("spaces_between_special_tokens", "Text is what the tokens spell.", True),
    _unsupported("return_tokens_as_token_ids", "Use `return_token_ids`.", False),
    _unsupported("return_prompt_text", "Use `/render`.", False),
    _unsupported("return_prompt_token_ids", "Use `/render`.", False),
    _unsupported("return_token_offsets", "Tokens have no offsets here.", False),
    _unsupported("return_hidden_states", "Hidden states stay inside.", False),
    _unsupported("return_routed_experts", "Routing inside the model stays inside.", False),
    _unsupported("return_meta_info", "Usage says what is known.", False),
    _unsupported("return_cached_tokens_details", "Usage says how much was cached.", False),
    _unsupported("logits_processors", "Code of clients is not run.", []),
    _unsupported("custom_logit_processor", "Code of clients is not run."),
    _unsupported("custom_params", "Belongs to code of clients.", {}),
    _unsupported("vllm_xargs", "Belongs to code of clients.", {}),
    _unsupported("prompt_embeds", "Prompts are text or token ids.", routes=_ONE),
    _unsupported("input_ids", "Send `prompt` to the completions route.", routes=_TALK),
    _unsupported("task", "Belongs to one model's own encoding.", routes=_TALK),
    _unsupported("media_io_kwargs", "Prompts are text.", {}, routes=_TALK),
    _unsupported("mm_processor_kwargs", "Prompts are text.", {}, routes=_TALK),
    _unsupported("images_config", "Prompts are text.", {}),
    _unsupported("use_audio_in_video", "Prompts are text.", False, routes=_TALK),
    _unsupported("lora_path", "Adapters are not served yet."),
    _unsupported("session_params", "Send the whole conversation; its prefix is cached.", {}),
    _unsupported("extra_key", "See `cache_salt`."),
    _unsupported("kv_transfer_params", "Replicas share nothing that a client could name."),
    _unsupported("ec_transfer_params", "Replicas share nothing that a client could name."),
    _unsupported("bootstrap_host", "Replicas share nothing that a client could name."),
    _unsupported("bootstrap_port", "Replicas share nothing that a client could name."),
    _unsupported("bootstrap_room", "Replicas share nothing that a client could name."),
    _unsupported("data_parallel_rank", "The router picks the replica."),
    _unsupported("routed_dp_rank", "The router picks the replica."),
    _ignored("request_id", "Send the header `X-Request-Id`."),
    _ignored("rid", "Send the header `X-Request-Id`."),
    _ignored("session_id", "The router picks the replica."),
    _ignored("custom_labels", "Metrics have no labels of clients."),
    _ignored("guided_decoding_backend", "There is one."),
    _ignored("stream_interval", "Tokens are sent as they come."),
    _ignored("include_reasoning", "Reasoning is not told apart from the answer yet.", _TALK),
    _ignored("separate_reasoning", "Reasoning is not told apart from the answer yet.", _TALK),
    _ignored("stream_reasoning", "Reasoning is not told apart from the answer yet.", _TALK),
)

GROUPS: dict[str, tuple[Field, ...]] = {
    "prompt": _PROMPT,
    "sampling": _SAMPLING,
    "structure": _STRUCTURE,
    "output": _OUTPUT,
    "openai": _OPENAI,
    "peers": _PEERS,
}
FIELDS: tuple[Field, ...] = tuple(field for group in GROUPS.values() for field in group)

BY_ROUTE: dict[str, dict[str, Field]] = {
    route: {field.name: field for field in FIELDS if route in field.routes} for route in BOTH
}
