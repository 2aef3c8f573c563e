"""An error of our tree as a gRPC status with google.rpc details, for machines that do not read sentences.

Always an ErrorInfo: `reason` is the error's code, the same word that HTTP has. What the caller can mend names its
field, as HTTP names it; what passes by itself says when to come again.
"""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.proto.errors import PacelineError, ReplicaLost

DOMAIN = "paceline"
MAX_MESSAGE = 400  # characters, twice in the trailers, which clients take up to 8 KiB of
MAX_FIELD = 200


def status_of(error: PacelineError, num_emitted: int = 0) -> grpc.Status:
    """``num_emitted``: tokens that the client already has. With such, a lost replica is not for a plain retry."""
    message = error.message[:MAX_MESSAGE]
    name = "ABORTED" if num_emitted and isinstance(error, ReplicaLost) else error.grpc_code
    metadata = {"tokens_emitted": str(num_emitted)} if num_emitted else {}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN, metadata=metadata)]
    field = (error.param or "")[:MAX_FIELD]
    if name == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message, reason=error.code)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    elif name == "NOT_FOUND":
        details.append(error_details_pb2.ResourceInfo(resource_type=field, description=message))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(
        status_pb2.Status(code=grpc.StatusCode[name].value[0], message=message, details=map(_packed, details))
    )


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
