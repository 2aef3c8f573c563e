"""HTTP: routes, bodies and headers in; a call to the service; errors as statuses in OpenAI's envelope.

Nothing about tokens, replicas or fields is decided here. How a call is answered is `answer.py`.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

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
    Unauthenticated,
)
from paceline.proto.model import ModelCard
from paceline.router import access, openai, openapi, shapes, tools
from paceline.router.answer import Answer, ignored_header, retry_after
from paceline.router.auth import Guard
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.limits import Deadlines, Gate, deadlines
from paceline.router.metrics import Metrics
from paceline.router.openai import Call
from paceline.router.pool import Pool
from paceline.router.service import Service
from paceline.router.tokenizer import Tokenizer

log = logging.getLogger("paceline.router")

T = TypeVar("T")

LARGE_BODY = 256 * 1024  # bytes; more is parsed off the event loop

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_JSON_TYPE = re.compile(r"application/(json|[\w.-]+\+json)\s*(;.*)?", re.IGNORECASE)
_ROUTES = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT}
_RETRY = {"retry-after": "1"}
_CHALLENGE = {"www-authenticate": "Bearer"}
_MILLISECONDS = re.compile(r"[1-9][0-9]{0,9}")
_TIMEOUTS = {
    "queue": "x-queue-timeout-ms",
    "first_token": "x-first-token-timeout-ms",
    "request": "x-request-timeout-ms",
}


def make_app(service: Service, pool: Pool, metrics: Metrics, guard: Guard, config: RouterConfig) -> FastAPI:
    """The routes. Needs a server that tells of closed connections (`http.disconnect`), as uvicorn does."""
    app = FastAPI(title="paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Entry, metrics=metrics, gate=service.gate, guard=guard)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PacelineError, _paceline_error)
    started = int(time.time())

    async def asked(request: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """What the body says; a large one is looked at in a thread."""
        raw = await _read(request, config.max_body_bytes)
        return await Tokenizer.off_loop(len(raw), lambda: make(_parse_json(raw, config.max_body_values)), LARGE_BODY)

    async def complete(request: Request) -> Response:
        times = _deadlines(request, config)
        service.model  # noqa: B018  no replica yet: say so before reading a body
        service.check()
        route, card, key = _ROUTES[request.url.path], service.model.card, request.scope["state"]["key"]
        call = await asked(request, lambda body: openai.parse(route, body, card, config, key))
        request_id = request.scope["state"]["request_id"]
        return Answer(call, times, service, metrics, request_id, config.ping_seconds)

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

    async def prompt_of(request: Request) -> Call:
        card, key = service.model.card, request.scope["state"]["key"]
        return await asked(request, lambda body: tools.one_prompt(body, card, config, key))

    async def tokenize(request: Request) -> Response:
        call = await prompt_of(request)
        _, ids = await tools.tokenize(service.model, call)
        return _counted({}, ids, call, service.model.card)

    async def render(request: Request) -> Response:
        call = await prompt_of(request)
        text, ids = await service.render(call)
        return _counted({"prompt": text}, ids, call, service.model.card)

    async def detokenize(request: Request) -> Response:
        body = await asked(request, lambda body: body)
        return _json(200, orjson.dumps({"prompt": await tools.detokenize(service.model, body)}))

    app.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/render", render, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)

    document = orjson.dumps(openapi.document(config, tools.version()))

    @app.get("/openapi.json")
    async def describe() -> Response:
        return _json(200, document)

    @app.get("/version")
    async def version() -> Response:
        return _json(200, orjson.dumps({"version": tools.version()}))

    @app.get("/health/live")
    async def live() -> Response:
        return _json(200, b'{"status":"live"}')

    @app.get("/health/ready")
    async def ready() -> Response:
        num_ready = len(pool.usable)
        if service.gate.draining:
            return _json(503, orjson.dumps({"status": "draining", "open": service.gate.num_open}), _RETRY)
        if num_ready:
            return _json(200, orjson.dumps({"status": "ready", "replicas_ready": num_ready}))
        reason = "no replica has been reached yet" if pool.card is None else "no replica takes requests"
        return _json(503, orjson.dumps({"status": "not_ready", "replicas_ready": 0, "reason": reason}), _RETRY)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(await asyncio.to_thread(metrics.render), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class Entry:
    """Around every request: its id, in and out, whose it is, and the count of answers. Plain ASGI, for it sees every
    chunk, and paths that lead nowhere."""

    def __init__(self, app: ASGIApp, metrics: Metrics, gate: Gate, guard: Guard):
        self._app = app
        self._metrics = metrics
        self._gate = gate
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id") or ""
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        access.begin(request_id)
        status, began = 499, time.perf_counter()  # unless an answer begins, the client was gone

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self._gate.draining:  # the client's pool must not send its next request here
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        self._metrics.began()
        try:
            scope["state"]["key"] = self._guard.admit(scope["path"], _header(scope, b"authorization"))
            await self._app(scope, receive, sending)
        except Unauthenticated as error:
            await _json(error.http_status, shapes.error_of(error), _CHALLENGE)(scope, receive, sending)
        except Exception:
            status = 500
            log.exception("request %s failed", request_id)
            body = shapes.error_of(InternalError(f"internal error; request id {request_id}"))
            await _json(500, body)(scope, receive, sending)
        finally:
            route, seconds = _ROUTES.get(scope["path"], "other"), time.perf_counter() - began
            self._metrics.ended(route, status, seconds)
            access.end(getattr(scope.get("route"), "path", "other"), status, seconds)


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


def _deadlines(request: Request, config: RouterConfig) -> Deadlines:
    """Counted from the moment at which the head of the request has come. Raises InvalidRequest naming the header."""
    return deadlines(config, time.time(), **timeouts(request.headers.get))


def timeouts(header_of: Callable[[str], str | None]) -> dict[str, float]:
    """Seconds that the caller asks for, as `limits.deadlines` takes them."""
    seconds = {}
    for name, header in _TIMEOUTS.items():
        given = header_of(header)
        if given is not None:
            if not _MILLISECONDS.fullmatch(given.strip()):
                raise InvalidRequest(f"{header} must be a whole number of milliseconds, at least 1", header)
            seconds[name] = int(given) / 1000
    return seconds


async def _read(request: Request, limit: int) -> bytearray:
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
    return body


def _parse_json(raw: bytearray, max_values: int) -> dict[str, Any]:
    # The parser holds up every thread until it is through. A list or a name takes it several times as long as an id.
    if raw.count(b",") + 4 * (raw.count(b":") + raw.count(b"[")) > max_values:
        raise PayloadTooLarge(f"the body may hold at most {max_values} values; lists and names count four times")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} at position {error.pos}"[:200]) from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _counted(body: dict[str, Any], ids: list[int], call: Call, card: ModelCard) -> Response:
    body |= {"tokens": ids, "count": len(ids), "max_model_len": card.max_model_len}
    return _json(200, orjson.dumps(body), ignored_header(call))


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def _paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    headers = {name.decode(): value.decode() for name, value in retry_after(error)}
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
