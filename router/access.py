"""One line per request in the log: which, how it ended, how long it took, how many tokens. Both front ends write it so.

What a user wrote is in none of it, nor are paths that users made up: a route is one of ours.
"""

import logging
from contextvars import ContextVar

from paceline.proto import logs
from paceline.proto.request import Usage

log = logging.getLogger("paceline.access")

PROBES = ("/health/live", "/health/ready", "/metrics")  # every other second of every day

# Of a request's context. A list, so that what a task of the request counts is seen where the request ends.
_usage: ContextVar[list[Usage] | None] = ContextVar("paceline_usage", default=None)


def begin(request_id: str) -> None:
    """In the request's own task. Lines of its context carry the id from now on."""
    logs.bind(request_id)
    _usage.set([])


def used(usage: Usage) -> None:
    seen = _usage.get()
    if seen is not None:
        seen.append(usage)


def end(route: str, status: int, seconds: float) -> None:
    fields: dict[str, object] = {"route": route, "status": status, "ms": round(seconds * 1000, 1)}
    if seen := _usage.get():
        fields |= {"prompt_tokens": seen[-1].num_prompt, "cached_tokens": seen[-1].num_cached}
        fields["completion_tokens"] = seen[-1].num_generated
    log.log(logging.DEBUG if route in PROBES else logging.INFO, "request", extra={"fields": fields})
