"""Keys on the gRPC port: an interceptor, for it sees every method, also reflection's and those that do not exist.

Who gets in is decided in `auth.py`. Health goes with /health/live and /health/ready: a Check of the empty name is
liveness, all else that it tells is readiness.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health

from paceline.proto.errors import Unauthenticated
from paceline.router.auth import READY, Guard
from paceline.router.rpc import Front

_HEALTH = f"/{health.SERVICE_NAME}/"
_CHECK = _HEALTH + "Check"


class KeyCheck(grpc.aio.ServerInterceptor):
    """``front`` answers what is refused, so that it is counted and logged as every call is."""

    def __init__(self, guard: Guard, front: Front):
        self._guard = guard
        self._front = front

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = details.method
        try:
            route = READY if method.startswith(_HEALTH) else method
            self._guard.admit(route, dict(details.invocation_metadata or ()).get("authorization"))
        except Unauthenticated as error:
            return self._only_liveness(await continuation(details), error) if method == _CHECK else self._closed(error)
        return await continuation(details)

    def _closed(self, error: Unauthenticated) -> grpc.RpcMethodHandler:
        """Streams both ways whatever the method is: no message is read, and a client of one message sees no
        difference."""

        async def refuse(requests: AsyncIterator[bytes], context: ServicerContext) -> None:
            await self._refuse(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _only_liveness(self, handler: Any, error: Unauthenticated) -> grpc.RpcMethodHandler:
        async def check(request: Any, context: ServicerContext) -> Any:
            if request.service:
                await self._refuse(error, context)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(check, handler.request_deserializer, handler.response_serializer)

    async def _refuse(self, error: Unauthenticated, context: ServicerContext) -> None:
        async def refuse(visit: Any) -> None:
            raise error

        await self._front.visit("other", context, refuse)
