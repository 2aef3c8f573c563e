"""The cluster token at the door of a server: who asks for work, or for what runs where, must show it.

Knows method names and one secret. What only reads (health, the model's card, a replica's state) stays open.
"""

import hmac
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from paceline.proto.token import KEY, bearer

GUARDED = frozenset(
    (
        "/paceline.replica.v1.ReplicaService/Attach",
        "/paceline.replica.v1.ReplicaService/Generate",
        "/paceline.replica.v1.ReplicaService/Abort",
        "/paceline.replica.v1.ReplicaService/Drain",
        "/paceline.cluster.v1.ClusterService/WatchReplicas",
    )
)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses guarded calls without ``authorization: Bearer <token>`` with UNAUTHENTICATED."""

    def __init__(self, token: str):
        ((_, line),) = bearer(token)
        self._expected = line.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = dict(details.invocation_metadata or ()).get(KEY, "")
        if details.method not in GUARDED or hmac.compare_digest(str(given).encode(), self._expected):
            return await continuation(details)
        # A stream handler fits calls of every kind: it refuses without waiting for a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")


def guards(token: str | None) -> tuple[TokenGuard, ...]:
    """Interceptors for a server; none without a token."""
    return (TokenGuard(token),) if token else ()
