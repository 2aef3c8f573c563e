"""HTTP: bytes in, a call to the service, bytes out. Nothing about tokens, replicas or fields is decided here.

Errors before the first byte are real statuses in OpenAI's envelope. After it, one error event ends a stream, and no
`[DONE]`. A client that closes its connection ends what it asked for, in whatever state that is.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Coroutine
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.proto.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    PayloadTooLarge,
)
from paceline.router import openai, shapes
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.metrics import Metrics
from paceline.router.openai import Call
from paceline.router.pool import Pool
from paceline.router.service import Generation, Service

log = logging.getLogger("paceline.router")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_JSON_TYPE = re.compile(r"application/(json|[\w.-]+\+json)\s*(;.*)?", re.IGNORECASE)
_HEADER_SAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # no spaces, no commas
_ROUTES = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT}
_MAX_IGNORED = 20  # names in the header


def make_app(service: Service, pool: Pool, metrics: Metrics, config: RouterConfig) -> FastAPI:
    """The routes. Needs a server that tells of closed connections (`http.disconnect`), as uvicorn does."""
    app = FastAPI(title="paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Entry, metrics=metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PacelineError, _paceline_error)
    started = int(time.time())

    async def complete(request: Request) -> Response:
        service.model  # noqa: B018  no replica yet: say so before reading a body
        body = _parse_json(await _read(request, config.max_body_bytes))
        call = openai.parse(_ROUTES[request.url.path], body, service.model.card, config)
        return Answer(call, service, metrics, request.scope["state"]["request_id"])

    for path in _ROUTES:
        app.add_api_route(path, complete, methods=["POST"], response_model=None)

    @app.get("/v1/models")
    async def models() -> Response:
        card = service.model.card
        one = shapes.models_body(card.name, started, card.max_model_len)
        return _json(200, orjson.dumps({"object": "list", "data": [one]}))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card = service.model.card
        if name != card.name:
            raise ModelNotFound(f"this model is not served; served: {card.name}", "model")
        return _json(200, orjson.dumps(shapes.models_body(card.name, started, card.max_model_len)))

    @app.get("/health/live")
    async def live() -> Response:
        return _json(200, b'{"status":"live"}')

    @app.get("/health/ready")
    async def ready() -> Response:
        num_ready = sum(link.usable for link in pool.links)
        if num_ready:
            return _json(200, orjson.dumps({"status": "ready", "replicas_ready": num_ready}))
        reason = "no replica has been reached yet" if pool.card is None else "no replica takes requests"
        return _json(503, orjson.dumps({"status": "not_ready", "replicas_ready": 0, "reason": reason}))

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(await asyncio.to_thread(metrics.render), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class Entry:
    """Around every request: its id, in and out, and the count of answers. Plain ASGI, for it sees every chunk."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, began = 499, time.perf_counter()  # unless an answer begins, the client was gone

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        self._metrics.began()
        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = 500
            log.exception("request %s failed", request_id)
            body = shapes.error_of(InternalError(f"internal error; request id {request_id}"))
            await _json(500, body)(scope, receive, sending)
        finally:
            route = _ROUTES.get(scope["path"], "other")
            self._metrics.ended(route, status, time.perf_counter() - began)


class Answer(Response):
    """Runs the call when the server wants the answer, streamed or whole, watching the connection all the while."""

    def __init__(self, call: Call, service: Service, metrics: Metrics, request_id: str):
        self.background = None
        self._call = call
        self._service = service
        self._metrics = metrics
        self._request_id = request_id
        self._began = time.perf_counter()
        self._started = False  # headers are out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await while_connected(receive, self._run(send)):
            log.info("request %s: the client closed the connection", self._request_id)

    async def _run(self, send: Send) -> None:
        try:
            async with self._service.open(self._call) as generation:
                prefix = "chatcmpl-" if self._call.route == CHAT else "cmpl-"
                tokenizer = generation.model.tokenizer
                shape = shapes.Shape(self._call, tokenizer, prefix + secrets.token_hex(12), int(time.time()))
                await (self._stream if self._call.stream else self._whole)(generation, shape, send)
        except PacelineError as error:
            await self._fail(error, send)
        except Exception:
            log.exception("request %s failed", self._request_id)
            await self._fail(InternalError(f"internal error; request id {self._request_id}"), send)

    async def _whole(self, generation: Generation, shape: shapes.Shape, send: Send) -> None:
        first = True
        async for batch in generation.deltas():
            if first:
                self._metrics.first_text(self._call.route, time.perf_counter() - self._began)
                first = False
            for delta in batch:
                shape.collect(delta)
        usage = await generation.usage()
        self._metrics.finished(usage)
        await self._send_json(200, shape.whole(usage), send)

    async def _stream(self, generation: Generation, shape: shapes.Shape, send: Send) -> None:
        """Headers wait for the first news, so that whatever goes wrong before is a status and not a broken stream."""
        gaps: list[float] = []
        last = self._began
        async for batch in generation.deltas():
            now = time.perf_counter()
            if self._started:
                gaps.append(now - last)
                body = b"".join([shape.event(delta) for delta in batch])
            else:
                self._metrics.first_text(self._call.route, now - last)
                await self._start(200, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")], send)
                body = shape.opening() + b"".join([shape.event(delta) for delta in batch])
            last = now
            await send({"type": "http.response.body", "body": body, "more_body": True})
        usage = await generation.usage()
        self._metrics.gaps(self._call.route, gaps)
        self._metrics.finished(usage)
        body = shape.usage_event(usage) if self._call.include_usage else b""
        await send({"type": "http.response.body", "body": body + shapes.DONE, "more_body": False})

    async def _fail(self, error: PacelineError, send: Send) -> None:
        if not self._started:
            await self._send_json(error.http_status, shapes.error_of(error), send, _retry_after(error))
            return
        log.warning("request %s: stream broken: %s", self._request_id, error.code)
        self._metrics.broke(error.code)
        body = b"data: " + shapes.error_of(error) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_json(
        self, status: int, body: bytes, send: Send, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, b"application/json", [length, *(headers or [])], send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        headers = [(b"content-type", content_type), *headers]
        if self._call.ignored:
            names = [_HEADER_SAFE.sub("?", name)[:64] for name in self._call.ignored[:_MAX_IGNORED]]
            headers.append((b"x-paceline-ignored-fields", ", ".join(names).encode()))
        self._started = True
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs ``work`` until it ends or the client is gone; then it is cancelled. False if the client was gone."""
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return False
        await running
        return True
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, limit: int) -> bytes:
    content_type = request.headers.get("content-type")
    if content_type and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise HTTPException(415, "the content type must be application/json")
    length = request.headers.get("content-length", "")
    too_large = PayloadTooLarge(f"the body may have at most {limit} bytes")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} at position {error.pos}"[:200]) from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _retry_after(error: PacelineError) -> list[tuple[bytes, bytes]]:
    if error.retry_after is None:
        return []
    return [(b"retry-after", str(max(1, round(error.retry_after))).encode())]


async def _paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    headers = {name.decode(): value.decode() for name, value in _retry_after(error)}
    return _json(error.http_status, shapes.error_of(error), headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and methods, and our 415."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
    messages = {404: "there is no such route", 405: "this route does not take this method"}
    code = codes.get(error.status_code, "invalid_request")
    message = messages.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    return _json(error.status_code, shapes.error_body(error.status_code, code, message), headers)
