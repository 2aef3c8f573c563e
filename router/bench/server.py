"""A server as a target: POST /v1/completions of any server that speaks OpenAI's dialect, streamed, token prompts.

A client shares its machine with what it measures, so this one does little: raw connections, one parser, times taken
when bytes come in.
"""

import asyncio
import ssl
import time
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

from paceline.router.bench.figures import Record
from paceline.router.bench.workloads import Job

TIMEOUT = 900.0  # seconds that one request may take
MOST_ERROR_BYTES = 300  # of what a server says is wrong


class ServerTarget:
    """``url`` is where /v1 hangs, as `client.py` has checked it; connections are kept and used again."""

    def __init__(self, url: str, model: str, api_key: str | None = None):
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/completions"
        head = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        head += [f"Authorization: Bearer {api_key}"] if api_key else []
        self._head = "\r\n".join([*head, "Content-Length: "]).encode()
        self._model = model
        self._idle: deque[_Connection] = deque()

    async def ask(self, job: Job) -> Record:
        body = orjson.dumps(
            {
                "model": self._model,
                "prompt": job.prompt_ids,
                "max_tokens": job.num_wanted,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        record = Record(len(job.prompt_ids), job.num_wanted, time.perf_counter())
        try:
            async with asyncio.timeout(TIMEOUT):
                connection = await self._send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), record)
        except TimeoutError:
            record.error = f"no end within {TIMEOUT:.0f} s"
        except OSError as error:
            record.error = f"the connection broke: {error}"
        else:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
        record.ended = time.perf_counter()
        return record

    async def close(self) -> None:
        while self._idle:
            self._idle.popleft().close()

    async def _send(self, request: bytes, record: Record) -> "_Connection":
        """The connection that the whole answer came by."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                try:
                    await connection.send(request, record)
                    return connection
                except ConnectionError:  # a server may close an idle one just as it is used again
                    if record.arrivals:
                        raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        await connection.send(request, record)
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. Called by httptools as its bytes come in, so names of callbacks are its."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._record: Record | None = None
        self._done: asyncio.Future[None] | None = None
        self._rest = b""  # the line that has not ended
        self._ended = False  # the stream has said so
        self._now = 0.0

    async def send(self, request: bytes, record: Record) -> None:
        """Returns when the answer is whole, with what came in the record. Raises OSError when the connection breaks."""
        assert self._transport is not None
        self._record, self._rest, self._ended = record, b"", False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- of asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from asyncio's

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._end(ConnectionError(f"what came is no answer: {error}"))

    def eof_received(self) -> None:
        """Where nothing says how long a body is, its end is the connection's."""
        if self._ended:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._end(error if isinstance(error, OSError) else ConnectionError("the server closed it"))

    def _end(self, error: Exception | None = None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error) if error else self._done.set_result(None)

    # -- of httptools ----------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self._record is not None
        status = self._parser.get_status_code()
        if status != 200:
            self._record.error = f"{status} {self._rest[:MOST_ERROR_BYTES].decode(errors='replace')}"
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._end()

    def _take(self, data: bytes) -> None:
        """One event. Without usage each chunk counts as one id."""
        record = self._record
        assert record is not None
        if data == b"[DONE]":
            self._ended = True
            return
        event = orjson.loads(data)
        if event.get("choices"):
            record.arrivals.append(self._now)
            record.num_ids = max(record.num_ids, len(record.arrivals))
        if usage := event.get("usage"):
            record.num_ids = usage["completion_tokens"]
        if error := event.get("error"):
            record.error = str(error.get("message", error))[:MOST_ERROR_BYTES]
