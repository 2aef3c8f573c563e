"""The one tree of errors, and what each leaf means to every surface that may carry it.

    PacelineError
    ├── RequestError               the caller's mistake; nothing was computed
    │   ├── InvalidRequest         400  a field is malformed or out of range
    │   ├── UnsupportedField       400  a known field that this version does not serve
    │   ├── ContextLengthExceeded  400  prompt and max_tokens do not fit the context
    │   ├── KVPoolExceeded         400  the sequence can never fit the KV block pool
    │   ├── Unauthenticated        401  no key, or one that is not known
    │   ├── NotPermitted           403  the key may not ask for this
    │   ├── ModelNotFound          404
    │   └── PayloadTooLarge        413
    ├── Overloaded                 429  a queue is full; try again later
    ├── DeadlineError              504  a time that the caller or the server had set has passed
    │   ├── QueueTimeout                for the first step: nothing was computed
    │   ├── FirstTokenTimeout           for the first token
    │   └── RequestTimeout              for the whole request
    ├── Cancelled                  499  the client went away
    ├── NoReplica                  503  nothing is ready to serve
    ├── Draining                   503  this server finishes what it has and takes nothing new
    ├── ReplicaLost                503  the replica died or its stream broke
    ├── SequenceFault              500  one row of a step failed; its neighbours go on
    ├── InternalError              500  our own bug
    └── StartupError               -    the process cannot start; one sentence says why

This file knows codes, not transports: HTTP envelopes and gRPC statuses are made by the front ends.
"""

from typing import ClassVar


class PacelineError(Exception):
    """Base of everything that paceline raises on purpose.

    Attributes of the class say what the error means: ``code`` (stable, on the wire), ``http_status``, ``grpc_code``
    (name of the gRPC status), ``retryable`` (the client may send the same request again), ``scope`` (what is broken:
    request, replica or cluster) and ``movable`` (a router may continue the request elsewhere).
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    scope: ClassVar[str] = "request"
    movable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None, retry_after: float | None = None):
        # Every argument goes to super().__init__, or it is lost when the exception is pickled across processes.
        super().__init__(message, param, retry_after)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds

    def __str__(self) -> str:
        return self.message


class RequestError(PacelineError):
    """The request itself is at fault; sending it again changes nothing."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class InvalidRequest(RequestError):
    code = "invalid_value"


class UnsupportedField(RequestError):
    code = "unsupported_field"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class KVPoolExceeded(RequestError):
    code = "kv_pool_exceeded"


class Unauthenticated(RequestError):
    code = "invalid_api_key"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class NotPermitted(RequestError):
    code = "not_permitted"
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"


class Overloaded(PacelineError):
    code = "overloaded"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True
    scope = "replica"
    movable = True


class DeadlineError(PacelineError):
    """Each leaf says which of the three times it was."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class QueueTimeout(DeadlineError):
    code = "queue_timeout"


class FirstTokenTimeout(DeadlineError):
    code = "first_token_timeout"


class RequestTimeout(DeadlineError):
    code = "request_timeout"


class Cancelled(PacelineError):
    code = "cancelled"
    http_status = 499
    grpc_code = "CANCELLED"


class NoReplica(PacelineError):
    code = "no_replica"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    scope = "cluster"
    movable = True


class Draining(PacelineError):
    code = "draining"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    scope = "cluster"
    movable = True


class ReplicaLost(PacelineError):
    code = "replica_lost"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True
    scope = "replica"
    movable = True


class SequenceFault(PacelineError):
    code = "sequence_fault"


class InternalError(PacelineError):
    code = "internal_error"


class StartupError(PacelineError):
    """Something needed at start is missing or wrong. The command line prints the message and exits with 1."""

    code = "startup_error"
    scope = "cluster"


def _leaves(cls: type[PacelineError]) -> dict[str, type[PacelineError]]:
    found = {} if "code" not in vars(cls) or cls is PacelineError else {cls.code: cls}
    for child in cls.__subclasses__():
        found |= _leaves(child)
    return found


BY_CODE: dict[str, type[PacelineError]] = _leaves(PacelineError)


def from_wire(code: str, message: str, param: str | None = None, retry_after: float | None = None) -> PacelineError:
    """The error that another process named. A code of a newer version becomes an InternalError with its text."""
    return BY_CODE.get(code, InternalError)(message, param, retry_after)
