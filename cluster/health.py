"""Three answers about a replica over plain HTTP, on threads of their own: being busy never makes one fail.

    GET /health/live       can the process recover? 503: it is to be killed
    GET /health/ready      does it take requests? 503: send them elsewhere
    GET /health/progress   do steps advance while there is work? 503: look at it

Knows HTTP and these three; what they mean is asked of a `Vitals`.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from paceline.proto.errors import StartupError

READ_TIMEOUT = 5.0  # seconds that a client has for its request


@dataclass(frozen=True)
class Vitals:
    live: bool
    ready: bool
    progress: bool
    state: str
    stalled_seconds: float


class HealthServer:
    """``look`` is called on a thread of this server, once per request."""

    def __init__(self, look: Callable[[], Vitals], host: str, port: int):
        """Binds. Raises StartupError."""
        try:
            self._server = _Server((host, port), _handler(look))
        except OSError as error:
            raise StartupError(f"cannot listen for health checks on {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(1.0,), name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; the thread ends within a second."""
        threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


def _handler(look: Callable[[], Vitals]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT

        def do_GET(self) -> None:
            vitals = asdict(look())
            name = self.path.removeprefix("/health/")
            status = 404 if vitals.get(name) not in (True, False) else 200 if vitals[name] else 503
            body = json.dumps(vitals).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not news."""

    return Handler
