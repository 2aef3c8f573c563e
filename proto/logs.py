"""How every process of paceline logs: to stderr, a line each, for people (console) or for machines (json).

Here because the router, the controller and a replica all start with it; it is the standard library and nothing else.
It knows lines, not what they say. No caller may log a prompt, an answer or a key: ids, counts and times only.

A line of a request carries its id by itself: whoever takes a request in calls ``bind``, and what runs for it, in tasks
that it starts as well, logs with that id. `extra={"fields": {...}}` adds values that machines may want.
"""

import json
import logging
import sys
from contextvars import ContextVar, Token
from datetime import UTC, datetime

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")

# Of a context, not of the module: each request's task sees its own.
_request_id: ContextVar[str | None] = ContextVar("paceline_request_id", default=None)


def configure(format: str = "console", level: str = "info", **fields: object) -> None:
    """Replaces whatever the root logger did. Call it once, where a process begins. ``fields`` are on every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else ConsoleLines())
    handler.addFilter(_add_request_id)
    if fields:
        handler.addFilter(lambda record: _add_fields(record, fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("grpc", "uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def bind(request_id: str) -> Token:
    """From here on, lines of this context carry the id; ``unbind`` with what this returns."""
    return _request_id.set(request_id)


def unbind(token: Token) -> None:
    _request_id.reset(token)


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, request_id where there is one, the fields, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = request_id
        line = getattr(record, "fields", {}) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {"request_id": getattr(record, "request_id", None), **getattr(record, "fields", {})}
        tail = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().formatMessage(record) + tail


def _add_fields(record: logging.LogRecord, fields: dict[str, object]) -> bool:
    record.fields = fields | getattr(record, "fields", {})
    return True


def _add_request_id(record: logging.LogRecord) -> bool:
    if getattr(record, "request_id", None) is None:
        record.request_id = _request_id.get()
    return True
