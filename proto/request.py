"""What is asked and what comes back: `Request` on the way down, `TokenDelta` on the way up. All frozen.

Both speak token ids only; text begins and ends in the router. Validation is done before a `Request` is made: nothing
downstream checks ranges again.
"""

import msgspec

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How ids are drawn. Neutral values switch a step off: temperature 0 is greedy, top_k 0 and top_p 1 keep all.

    ``seed`` is always set (the router draws one when none was given): with (seed, choice, position) it is the whole
    state of the noise. ``max_tokens`` None means whatever the context and the pool leave; 0 computes the prompt alone.
    Before ``min_tokens`` ids no end token and no stop id is drawn. ``grammar`` (grammar.py) is what the text must obey:
    it overrides ``min_tokens`` and ``ignore_eos``, for where it has come to its end there is nothing else to draw.
    """

    seed: int
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the drawn id's; k: the top k beside it
    prompt_logprobs: int | None = None  # the same of the prompt's ids, from the second on
    grammar: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with n choices. ``resume`` holds ids already emitted per choice: never mixed into the prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    resume: tuple[tuple[int, ...], ...] = ()
    tenant: str = ""
    priority: int = 0  # lower runs first
    queue_deadline: float | None = None  # unix seconds: for its first step,
    first_token_deadline: float | None = None  # its first token,
    deadline: float | None = None  # and its end
    cache_root: bytes = b""  # parent of the first block's name (hashing.py); empty: no part in the prefix cache
    block_hashes: tuple[bytes, ...] = ()  # names of the prompt's full blocks, chained from cache_root
    traceparent: str = ""
    attempt: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Counted once per choice when it finishes. ``num_cached``: prompt tokens that came out of the prefix cache."""

    num_prompt: int
    num_cached: int
    num_generated: int


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Natural logarithms for one id, of the raw distribution (before temperature, penalties, bias and grammar)."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice: ids from ``offset`` on, counted from its first emitted id. The last one says why it ended.

    ``prompt_logprobs`` come chunk by chunk with choice 0, in order, for the prompt's ids from the second on: each once,
    and all of them before or with the first emitted id.
    """

    request_id: str
    choice: int
    offset: int
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None  # with finish_reason "error" only
    error_code: str | None = None  # of the error tree; None: the sequence's own fault
