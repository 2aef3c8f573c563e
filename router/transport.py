"""The connections under the HTTP server: how much may wait in one unread, and how one is cut off. Knows no requests."""

import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.proto.errors import StartupError

ABORT = "paceline.abort"  # in a request's scope: ends its connection at once, what waits in it is dropped


class Protocol(HttpToolsProtocol):
    """uvicorn's, and a way out for answers that nobody reads: closing would wait for the reader."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]


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
