"""Who gets in: one decision for HTTP and gRPC, made before anything else of a request is looked at. It knows no wire.

Deny by default: without a good key nothing is answered but liveness, whatever the path is and whether or not it exists.
"""

from collections.abc import Iterable

from paceline.proto.errors import StartupError, Unauthenticated
from paceline.router.keyring import Keyring
from paceline.router.keys import NOBODY, Key

LIVE, READY = "/health/live", "/health/ready"
OPENABLE = (READY, "/metrics", "/version", "/openapi.json")  # they tell of the server and do no work


class Guard:
    """Without a keyring everybody gets in. ``open_routes`` need no key. Raises StartupError for one that may not be
    opened."""

    def __init__(self, keyring: Keyring | None, open_routes: Iterable[str] = ()):
        self._keyring = keyring
        self._open = {LIVE, *open_routes}
        if self._open - {LIVE, *OPENABLE}:
            raise StartupError(f"--open-routes may name {', '.join(OPENABLE)}; all others need a key")

    def admit(self, route: str, authorization: str | None) -> Key:
        """Whose request it is. ``authorization`` is the header of that name. Raises Unauthenticated."""
        if self._keyring is None:
            return NOBODY
        scheme, _, given = (authorization or "").partition(" ")
        key = self._keyring.find(given.strip()) if scheme.lower() == "bearer" else None
        if key is None and route in self._open:
            return NOBODY
        if key is None:
            known = "this API key is not known" if authorization else "an API key is needed"
            raise Unauthenticated(f"{known}; send the header Authorization: Bearer KEY")
        return key
