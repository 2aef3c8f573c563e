"""The keys of a file, as the file is now: read at start, and again whenever it changes. What a key means is `keys.py`.

A file that breaks later changes nothing: the keys that were good stay good, and one line of the log says why.
"""

import asyncio
import logging
import os
from pathlib import Path

from paceline.proto.errors import StartupError
from paceline.router.keys import Key, hash_of, parse_keys

log = logging.getLogger("paceline.router")

LOOK = 1.0  # seconds between looks at the file


class Keyring:
    """Raises StartupError if the file cannot be read or holds what is no list of keys."""

    def __init__(self, path: str):
        self._path = path
        self._seen = _stamp(path)
        self._keys = _read(path)

    def find(self, key: str) -> Key | None:
        return self._keys.get(hash_of(key))

    async def follow(self) -> None:
        """For as long as it runs, a changed file is in force about a second later."""
        while True:
            await asyncio.sleep(LOOK)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reads the file if it is another one than at the last look."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._keys = _read(self._path)
            log.info("API keys: %d are in force", len(self._keys))
        except StartupError as error:
            log.error("API keys: the %d from before stay in force: %s", len(self._keys), error)


def keyring_of(path: str | None) -> Keyring | None:
    return Keyring(path) if path else None


def _read(path: str) -> dict[str, Key]:
    file = f"--api-key-file {path}"
    try:
        return parse_keys(Path(path).read_text(), file)
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise StartupError(f"{file} is not UTF-8") from None


def _stamp(path: str) -> tuple[int, ...] | None:
    """Of what the path leads to: Kubernetes swaps a link on the way there. None: nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
