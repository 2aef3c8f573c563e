"""Something done again and again until told to stop. It does not know what is done; waiting costs it a timer."""

import asyncio
from collections.abc import Awaitable, Callable


class Pinger:
    """Does ``work`` each ``seconds`` from now on; 0 is never. Stop it before doing anything that must not meet it."""

    def __init__(self, seconds: float, work: Callable[[], Awaitable[None]]):
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None
        self._doing: asyncio.Task[None] | None = None
        self._set()

    async def stop(self) -> None:
        """Idempotent. What is being done just now is waited for."""
        self._unset()
        if self._doing is not None:
            await self._doing

    def cancel(self) -> None:
        """Ends even what is being done just now."""
        self._unset()
        if self._doing is not None:
            self._doing.cancel()

    def _unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._fire)

    def _fire(self) -> None:
        self._doing = asyncio.get_running_loop().create_task(self._once())

    async def _once(self) -> None:
        await self._work()
        if self._timer is not None:  # nobody has stopped it meanwhile
            self._set()
