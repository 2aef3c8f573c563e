"""The connections under the HTTP server: how much of a head or an answer one may hold, and how one is cut off.

It knows no requests. A head is what comes before a body: the request line and its headers.
"""

import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.proto.errors import StartupError
from paceline.router import shapes

ABORT = "paceline.abort"  # in a request's scope: ends its connection at once, what waits in it is dropped
MAX_HEAD_BYTES = 64 * 1024


class Protocol(HttpToolsProtocol):
    """uvicorn's, with a way out for answers that nobody reads (closing would wait for the reader) and a bound on heads:
    the parser would gather them as long as they come. Trailers behind a body are gathered with its head."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._told_len = 0  # bytes of this message's head, as the parser tells them
        self._fed_len = 0  # bytes that it took since it told of a body, or of a head's or a message's end

    @property
    def _head_too_large(self) -> bool:
        return max(self._told_len, self._fed_len) > MAX_HEAD_BYTES

    def data_received(self, data: bytes) -> None:
        self._fed_len += len(data)
        super().data_received(data)
        if self._head_too_large and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self._told_len = 0

    def on_url(self, url: bytes) -> None:
        self._tell(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._tell(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _tell(self, num_bytes: int) -> None:
        self._told_len += num_bytes
        if self._told_len > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser stops, and uvicorn hears that the request is bad

    def on_headers_complete(self) -> None:
        self._fed_len = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fed_len = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fed_len = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it, is answered as all other mistakes are; the connection ends."""
        status, code, message = 400, "invalid_request", "this is not HTTP/1.1"
        if self._head_too_large:
            status, code = 431, "headers_too_large"
            message = f"the request line and headers may have at most {MAX_HEAD_BYTES} bytes"
        body = shapes.error_body(status, code, message)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def listen(host: str, port: int, unread_bytes: int, stuck_seconds: float) -> socket.socket:
    """``unread_bytes`` bounds what the kernel holds of an answer (it would take megabytes); ``stuck_seconds`` how long
    a client may take nothing at all before the kernel gives its connection up. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # Accepted connections inherit these. asyncio leaves Nagle's algorithm on for a listener that it did not make: an
    # answer of two writes then waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Linux doubles the size for its own bookkeeping.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(4096, unread_bytes // 2))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stuck_seconds))
    listener.setblocking(False)
    return listener
