"""Sockets between an engine and its ranks: who shows the key comes in, then whole frames go both ways, in order.

TCP, or a Unix socket for ranks on the engine's host (measured at 64 rows, between steps of a model that empties the
caches: 150 µs less for a plan and its result). The connections are those of multiprocessing, but for their pickles:
`send_bytes` and `recv_bytes` only. The key is
proved by HMAC when a connection is made; what goes over it afterwards is neither signed nor encrypted, as
torch.distributed's own traffic is not: gangs belong on a network that others cannot write into.

Knows no frames (messages.py) and no ranks.
"""

import fcntl
import logging
import queue
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from paceline.proto.errors import StartupError

log = logging.getLogger("paceline.gang")

AUTH_TIMEOUT = 10.0  # seconds that a stranger, or a rank, has for each message of the handshake
BACKLOG = 128
OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A host that vanished without a word is noticed after 10 + 3 * 5 s of silence.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface


class Door(NamedTuple):
    """Where ranks find their engine, and the secret that they share with it."""

    host: str
    port: int
    key: bytes
    local: str = ""  # name of a Unix socket that only the engine's own host knows; "" where the system has none


class Entrance:
    """The engine's side. Each who knocks is heard on a thread of its own: who is silent there holds up nobody."""

    def __init__(self, host: str):
        """Binds a free port of ``host``. Raises StartupError."""
        try:
            self._listener = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
        except OSError as error:
            raise StartupError(
                f"the engine cannot listen for its ranks on {host}: {error.strerror or error}"
            ) from error
        self._local = _abstract_listener() if sys.platform == "linux" else None
        name = self._local.getsockname()[1:].decode() if self._local else ""
        self.door = Door(host, self._listener.getsockname()[1], secrets.token_bytes(32), name)
        self._admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for listener in self._listeners:
            threading.Thread(target=self._listen, args=(listener,), name="entrance", daemon=True).start()

    @property
    def _listeners(self) -> list[socket.socket]:
        return [self._listener, *([self._local] if self._local else [])]

    def admitted(self, timeout: float) -> Connection | None:
        """The next who has shown the key, if one comes within so many seconds."""
        try:
            return self._admitted.get(timeout=timeout)
        except queue.Empty:
            return None

    def __enter__(self) -> "Entrance":
        return self

    def __exit__(self, *_) -> None:
        """Nobody comes in any more; who has been fetched stays."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            listener.close()
        while (connection := self.admitted(0)) is not None:
            connection.close()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError:  # closed
                return
            whence = address[0] if sock.family is not socket.AF_UNIX else "this host"
            threading.Thread(target=self._hear, args=(sock, whence), daemon=True).start()

    def _hear(self, sock: socket.socket, whence: str) -> None:
        connection = _connection(sock)
        try:
            set_timeouts(connection, AUTH_TIMEOUT)
            deliver_challenge(connection, self.door.key)
            answer_challenge(connection, self.door.key)
            set_timeouts(connection, 0)
        except (AuthenticationError, OSError, EOFError) as error:
            log.warning("somebody at %s did not show this gang's key (%s) and was turned away", whence, error)
            connection.close()
        else:
            self._admitted.put(connection)


def dial(door: Door, timeout: float = AUTH_TIMEOUT) -> Connection:
    """The rank's side. Raises StartupError."""
    try:
        connection = _connection(_reach(door, timeout))
        set_timeouts(connection, timeout)
        answer_challenge(connection, door.key)
        deliver_challenge(connection, door.key)
        set_timeouts(connection, 0)
    except (AuthenticationError, OSError, EOFError) as error:
        raise StartupError(f"cannot reach the engine at {door.host}:{door.port}: {error}") from error
    return connection


def set_timeouts(connection: Connection, seconds: float) -> None:
    """How long a read or write may wait for the other side, once it has begun; then it is an OSError. 0: forever."""
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    with _socket_of(connection) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def local_address(connection: Connection, door: Door) -> tuple[str, str]:
    """(ip, interface) by which other hosts reach this end: on the engine's host, as they reach the engine. The
    interface is "" where the system does not say."""
    with _socket_of(connection) as sock:
        ip = door.host if sock.family is socket.AF_UNIX else sock.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        names = [name for _, name in socket.if_nameindex() if _ip_of(sock, name) == ip]
    return ip, names[0] if names else ""


def wait_for_hangup(connection: Connection) -> None:
    """Returns when the other side is gone, whether or not there is something to read. Reads nothing."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    while not poll.poll():
        pass


def _connection(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    for option in () if sock.family is socket.AF_UNIX else OPTIONS:
        sock.setsockopt(*option)
    return Connection(sock.detach())


def _abstract_listener() -> socket.socket:
    """Its name lives in no folder and ends with the socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0paceline-{secrets.token_hex(16)}")
    listener.listen(BACKLOG)
    return listener


def _reach(door: Door, timeout: float) -> socket.socket:
    """Raises OSError."""
    if door.local:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"\0{door.local}")
            return sock
        except OSError:  # another host, or another container of this one
            sock.close()
    return socket.create_connection((door.host, door.port), timeout)


@contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The same descriptor, which stays open."""
    sock = socket.socket(fileno=connection.fileno())
    try:
        yield sock
    finally:
        sock.detach()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def _ip_of(sock: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # no IPv4 address
        return ""
    return socket.inet_ntoa(answer[20:24])
