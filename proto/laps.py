"""Phases of a start that follow each other, each timed from the end of the one before. Knows not what they do."""

import time
from collections.abc import Callable


class Laps:
    """``on_phase`` is told the name and the seconds of each phase as it ends."""

    def __init__(self, on_phase: Callable[[str, float], None]):
        self._on_phase = on_phase
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """``phase`` ends now, and the next one begins."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._on_phase(phase, seconds)
