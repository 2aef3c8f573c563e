from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "finish")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submission
    cancel: Cancel
    finish: Finish
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submission, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "accepted", "rejected", "deltas", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    accepted: Accepted
    rejected: Rejected
    deltas: Deltas
    heartbeat: Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., deltas: _Optional[_Union[Deltas, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "incarnation", "protocol", "fingerprint")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    incarnation: str
    protocol: int
    fingerprint: str
    def __init__(self, router_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("replica_id", "incarnation", "protocol", "fingerprint", "max_num_seqs", "max_waiting_requests", "max_waiting_tokens", "ranks", "start_seconds")
    class StartSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: str
    protocol: int
    fingerprint: str
    max_num_seqs: int
    max_waiting_requests: int
    max_waiting_tokens: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankMemory]
    start_seconds: _containers.ScalarMap[str, float]
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol: _Optional[int] = ..., fingerprint: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ..., start_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ("rank", "weight_bytes", "kv_bytes", "kv_bytes_per_token")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    def __init__(self, rank: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("seed", "n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_ids", "ignore_eos", "logprobs", "min_tokens", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    seed: int
    n: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    min_tokens: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("handle", "request_id", "attempt", "prompt_ids", "resume", "params", "tenant", "priority", "deadline_unix", "block_hashes", "traceparent", "cache_root", "queue_deadline_unix", "first_token_deadline_unix")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEADLINE_UNIX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_DEADLINE_UNIX_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    resume: _containers.RepeatedCompositeFieldContainer[Ids]
    params: SamplingParams
    tenant: str
    priority: int
    deadline_unix: float
    block_hashes: bytes
    traceparent: str
    cache_root: bytes
    queue_deadline_unix: float
    first_token_deadline_unix: float
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., resume: _Optional[_Iterable[_Union[Ids, _Mapping]]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_unix: _Optional[float] = ..., block_hashes: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., cache_root: _Optional[bytes] = ..., queue_deadline_unix: _Optional[float] = ..., first_token_deadline_unix: _Optional[float] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("handle", "choice", "num_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    NUM_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    num_ids: int
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ..., num_ids: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    error: ErrorInfo
    def __init__(self, handle: _Optional[int] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("code", "message", "param", "retry_after")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    retry_after: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after: _Optional[float] = ...) -> None: ...

class Deltas(_message.Message):
    __slots__ = ("handles", "choices", "offsets", "num_ids", "ids", "endings", "logprobs", "prompt_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NUM_IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    num_ids: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    endings: _containers.RepeatedCompositeFieldContainer[Ending]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., num_ids: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., endings: _Optional[_Iterable[_Union[Ending, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("row", "finish_reason", "num_prompt", "num_cached", "num_generated", "error", "error_code")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    row: int
    finish_reason: str
    num_prompt: int
    num_cached: int
    num_generated: int
    error: str
    error_code: str
    def __init__(self, row: _Optional[int] = ..., finish_reason: _Optional[str] = ..., num_prompt: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_generated: _Optional[int] = ..., error: _Optional[str] = ..., error_code: _Optional[str] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "tokens")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    row: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, row: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "draining")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    load: Load
    draining: bool
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("step_id", "running", "waiting", "queued_tokens", "tokens_per_second", "blocks_used", "blocks_total", "prompt_tokens_total", "cached_prompt_tokens_total", "generation_tokens_total", "computed_tokens_total", "recomputed_tokens_total", "preemptions_total", "block_copies_total", "finished_total", "discarded_tokens_total")
    class FinishedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    running: int
    waiting: int
    queued_tokens: int
    tokens_per_second: float
    blocks_used: int
    blocks_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    computed_tokens_total: int
    recomputed_tokens_total: int
    preemptions_total: int
    block_copies_total: int
    finished_total: _containers.ScalarMap[str, int]
    discarded_tokens_total: int
    def __init__(self, step_id: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., blocks_used: _Optional[int] = ..., blocks_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., cached_prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., computed_tokens_total: _Optional[int] = ..., recomputed_tokens_total: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., block_copies_total: _Optional[int] = ..., finished_total: _Optional[_Mapping[str, int]] = ..., discarded_tokens_total: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("submission",)
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    submission: Submission
    def __init__(self, submission: _Optional[_Union[Submission, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: Deltas
    def __init__(self, deltas: _Optional[_Union[Deltas, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_known",)
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    num_known: int
    def __init__(self, num_known: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("card_json",)
    CARD_JSON_FIELD_NUMBER: _ClassVar[int]
    card_json: str
    def __init__(self, card_json: _Optional[str] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("replica_id", "incarnation", "state", "load", "stalled_seconds", "ranks")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: str
    state: str
    load: Load
    stalled_seconds: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankMemory]
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., stalled_seconds: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_ended",)
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    num_ended: int
    def __init__(self, num_ended: _Optional[int] = ...) -> None: ...
