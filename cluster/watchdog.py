"""Ends a process whose engine does not get on. A thread of its own: neither a stuck step nor a stuck loop stops it.

It counts its own looks, not the clock's seconds: a process that was stopped as a whole and goes on is not stuck.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("paceline.replica")

LOOKS = 20  # without a change, until the time is up
LONGEST_LOOK = 1.0  # seconds
GRACE = 2.0  # seconds in which streams may be told


class Watched(Protocol):
    """What the watchdog asks of a replica, from its own thread."""

    def got_on_at(self) -> float | None:
        """Changes with every step; None while there is no work."""

    def give_up(self, reason: str) -> None:
        """Ends its streams with an error, if its event loop still runs."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Into its event loop."""


class Watchdog:
    """``end`` is called, with an exit status, when neither engine nor event loop can be hoped for."""

    def __init__(self, watched: Watched, step_timeout: float, end: Callable[[int], None] = os._exit):
        self._watched = watched
        self._timeout = step_timeout
        self._period = min(LONGEST_LOOK, step_timeout / LOOKS)
        self._end = end
        self._stopped = threading.Event()
        self._answered = True  # by the event loop, since the last look
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        seen: float | None = None
        engine_silent = loop_silent = 0.0  # seconds of looks
        while not self._stopped.wait(self._period):
            before, seen = seen, self._watched.got_on_at()
            engine_silent = engine_silent + self._period if seen is not None and seen == before else 0.0
            loop_silent = 0.0 if self._answered else loop_silent + self._period
            if self._answered:
                self._answered = False
                self._watched.call_soon(self._answer)
            if max(engine_silent, loop_silent) >= self._timeout:
                who = "engine" if engine_silent >= self._timeout else "event loop"
                self._give_up(f"the {who} did not get on for {self._timeout:g} s")
                return

    def _answer(self) -> None:
        self._answered = True

    def _give_up(self, reason: str) -> None:
        log.critical("%s: the process ends", reason)
        self._watched.give_up(reason)
        self._stopped.wait(GRACE)
        self._end(1)
