"""One call over HTTP, from a well-formed `Call` to the last byte: streamed or whole, and how it ends if it must.

Errors before the first byte are real statuses in OpenAI's envelope. After it, one error event ends a stream, and no
`[DONE]`. A stream that has nothing to say yet says so now and then, lest somebody on the way cut it off. A client that
closes its connection ends what it asked for, in whatever state that is; one that does not read loses its connection.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.proto.errors import Cancelled, InternalError, PacelineError
from paceline.router import openai, shapes
from paceline.router.fields import CHAT
from paceline.router.generation import Generation
from paceline.router.limits import Deadlines
from paceline.router.metrics import Metrics
from paceline.router.openai import Call
from paceline.router.pinger import Pinger
from paceline.router.service import Service
from paceline.router.shapes import size_of
from paceline.router.tokenizer import Tokenizer
from paceline.router.transport import ABORT

log = logging.getLogger("paceline.router")

FAIL_WAIT = 5.0  # seconds that an error event waits for a client that does not read
_MAX_IGNORED = 20  # names in the header


class Answer(Response):
    """Runs the call when the server wants the answer, streamed or whole, watching the connection all the while."""

    def __init__(
        self,
        call: Call,
        deadlines: Deadlines,
        service: Service,
        metrics: Metrics,
        request_id: str,
        ping_seconds: float = 0.0,
    ):
        """``ping_seconds``: between the comments that a stream carries until its first news; 0 for none."""
        self.background = None
        self._call = call
        self._deadlines = deadlines
        self._service = service
        self._metrics = metrics
        self._request_id = request_id
        self._ping_seconds = ping_seconds
        self._began = time.perf_counter()
        self._started = False  # headers are out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await while_connected(receive, self._run(send, scope.get(ABORT))):
            log.info("request %s: the client closed the connection", self._request_id)

    async def _run(self, send: Send, abort: Callable[[], None] | None) -> None:
        self._pinger = Pinger(self._ping_seconds if self._call.stream else 0, lambda: self._ping(send))
        try:
            async with self._service.open(self._call, self._deadlines) as generation:
                prefix = "chatcmpl-" if self._call.route == CHAT else "cmpl-"
                tokenizer = generation.model.tokenizer
                shape = shapes.Shape(self._call, tokenizer, prefix + secrets.token_hex(12), int(time.time()))
                await (self._stream if self._call.stream else self._whole)(generation, shape, send)
        except PacelineError as error:
            await self._end(error, send, abort)
        except Exception:
            log.exception("request %s failed", self._request_id)
            failure = InternalError(f"internal error; request id {self._request_id}")
            await self._end(failure, send, abort)
        finally:
            self._pinger.cancel()

    async def _end(self, error: PacelineError, send: Send, abort: Callable[[], None] | None) -> None:
        """Says why, to a client that reads; cuts the connection to one that does not."""
        stuck = isinstance(error, Cancelled)
        if stuck:
            log.warning("request %s: cancelled: %s", self._request_id, error)
            self._metrics.broke(error.code)
        else:
            try:
                async with asyncio.timeout(FAIL_WAIT):
                    await self._pinger.stop()
                    await self._fail(error, send)
            except TimeoutError:
                stuck = True
        if stuck and abort is not None:
            abort()

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
        body = await Tokenizer.off_loop(shape.size, lambda: shape.whole(usage))
        await self._send_json(200, body, send)

    async def _stream(self, generation: Generation, shape: shapes.Shape, send: Send) -> None:
        """Headers wait for the first news or ping: what goes wrong before is a status and not a broken stream."""
        gaps: list[float] = []
        last = self._began
        opened = False
        plain = self._call.params.prompt_logprobs is None
        async for batch in generation.deltas():
            now = time.perf_counter()
            body = (
                shape.events(batch) if plain else await Tokenizer.off_loop(size_of(batch), partial(shape.events, batch))
            )
            if opened:
                gaps.append(now - last)
            else:
                opened = True
                self._metrics.first_text(self._call.route, now - last)
                await self._pinger.stop()
                await self._start_stream(send)
                body = shape.opening() + body
            last = now
            await send({"type": "http.response.body", "body": body, "more_body": True})
        usage = await generation.usage()
        self._metrics.gaps(self._call.route, gaps)
        self._metrics.finished(usage)
        body = shape.usage_event(usage) if self._call.include_usage else b""
        await send({"type": "http.response.body", "body": body + shapes.DONE, "more_body": False})

    async def _ping(self, send: Send) -> None:
        await self._start_stream(send)
        await send({"type": "http.response.body", "body": shapes.PING, "more_body": True})

    async def _start_stream(self, send: Send) -> None:
        if not self._started:
            await self._start(200, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")], send)

    async def _fail(self, error: PacelineError, send: Send) -> None:
        if not self._started:
            await self._send_json(error.http_status, shapes.error_of(error), send, retry_after(error))
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
        headers += [(name.encode(), value.encode()) for name, value in ignored_header(self._call).items()]
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


def ignored_header(call: Call) -> dict[str, str]:
    """Names the fields that nothing reads, if there are any."""
    return {"x-paceline-ignored-fields": openai.shown(call.ignored, _MAX_IGNORED)} if call.ignored else {}


def retry_after(error: PacelineError) -> list[tuple[bytes, bytes]]:
    if error.retry_after is None:
        return []
    return [(b"retry-after", str(max(1, round(error.retry_after))).encode())]
