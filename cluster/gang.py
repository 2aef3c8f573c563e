"""A replica of several ranks, seen from its engine: start them as one, hand each the same plans, end them as one.

Knows connections and phases of a start; who starts the processes, and where, is a `Launcher`'s affair (ranks.py has
Ray's, spawn.py child processes on this host). Knows no torch.
"""

from typing import NamedTuple, Protocol


class Door(NamedTuple):
    """Where ranks find their engine, and the secret that they share with it."""

    host: str
    port: int
    key: bytes


class Launcher(Protocol):
    """Starts the processes of one gang and ends them. Called from the engine's thread only, but for ``kill``."""

    def start(self, door: Door) -> None:
        """Every process is to call ``rank_process.run(door, index)`` with an index of its own, 0 .. num_ranks - 1.
        Does not wait for them. Raises StartupError."""

    def troubles(self) -> dict[int, str]:
        """By index, why a process has not come or is gone, as far as it is known without waiting."""

    def kill(self) -> None:
        """Ends whatever is left, also processes that are stopped. May be called again, and from any thread."""
