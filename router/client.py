"""A small HTTP client for the terminal commands: JSON, text, and server-sent events, with the standard library alone.

It knows the envelope of errors and nothing of chats or tables.
"""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from paceline.proto.errors import StartupError

TIMEOUT = 300.0  # seconds without a byte: a prompt may wait in a queue
KEY_HINT = "this command takes it from PACELINE_API_KEY or --key-file"


class Refused(Exception):
    """The server answered with an error; the message is its own."""


class Client:
    """One connection per call, each with the key if there is one. Raises StartupError where no server answers, Refused
    where it says no."""

    def __init__(self, url: str, ca_file: str | None = None, api_key: str | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"{url} is not an http or https URL")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as error:
                raise StartupError(f"--ssl-ca-certs {ca_file} cannot be used: {error}") from error

    def text(self, path: str) -> str:
        connection, response = self._ask("GET", path, None)
        try:
            return response.read().decode()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of each event until [DONE]. Leaving early closes the connection, which ends the work behind it."""
        connection, response = self._ask("POST", path, body)
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                event = json.loads(text)
                if "error" in event:
                    raise Refused(event["error"]["message"])
                yield event
            raise Refused("the stream ended before the answer did")
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"the connection broke: {error}") from error
        finally:
            _close(connection, response)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        if self._tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
        try:
            payload, headers = None, self._headers
            if body is not None:
                payload, headers = json.dumps(body).encode(), headers | {"Content-Type": "application/json"}
            connection.request(method, self._prefix + path, payload, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise StartupError(f"no paceline answers at {self.url}: {error}") from error
        if response.status != 200:
            raw = response.read()
            connection.close()
            hint = f" ({KEY_HINT})" if response.status == 401 else ""
            raise Refused((_message(raw) or f"the server answered {response.status}") + hint)
        return connection, response


def _message(raw: bytes) -> str | None:
    try:
        return json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None


def _close(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
    """At once, without reading the rest: http.client would leave the socket open as long as the response lives."""
    if connection.sock is not None:
        with suppress(OSError):  # the other side was first
            connection.sock.shutdown(socket.SHUT_RDWR)
    response.close()
    connection.close()
