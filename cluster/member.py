"""One replica as the controller holds it: its life, its process, and what was last seen and heard of it.

It asks the process and waits for its end; what follows from that is `lifecycle.py`'s.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from paceline.cluster.lifecycle import Life, Report, Sight, State

log = logging.getLogger("paceline.controller")

STARTING_PERIOD, SERVING_PERIOD = 0.25, 2.0  # seconds between looks at a replica, and between questions to it


class Member:
    """One replica: its life, and what was last seen of it."""

    def __init__(self, name: str, now: float):
        self.name = name
        self.life = Life(since=now)
        self.since_unix = time.time()  # of its last change of state
        self.process: Any = None  # of a placement
        self.placed = False
        self.shortage = ""
        self.report: Report | None = None
        self.heard_at = 0.0
        self.death = ""
        self.leaving = False
        self.was_ready = False
        self.drain_seconds = 0.0
        self.wake = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def sight(self) -> Sight:
        return Sight(
            placed=self.placed,
            shortage=self.shortage,
            exists=self.process is not None,
            report=self.report,
            heard_at=self.heard_at,
            death=self.death,
            leaving=self.leaving,
        )

    def hold(self, process: Any) -> None:
        """From now on this is its process."""
        self.process, self.report, self.death = process, None, ""
        self.heard_at = time.monotonic()
        self.tasks = [asyncio.create_task(self._follow(process)), asyncio.create_task(self._ask(process))]

    def live(self, life: Life) -> None:
        if life.since != self.life.since:
            self.since_unix = time.time()
        self.life = life
        self.was_ready |= life.state is State.READY

    def let_go(self) -> Any:
        """It has no process any more. Returns the one it had."""
        for task in self.tasks:
            task.cancel()
        process, self.process, self.report, self.placed = self.process, None, None, False
        return process

    async def rest(self) -> None:
        """Until there is news, or the next look is due. What this process slept beyond that (it was stopped, or the
        machine was) is not the replica's silence."""
        settled = self.life.state is State.READY or (self.life.state is State.PENDING and self.life.reason)
        period = SERVING_PERIOD if settled else STARTING_PERIOD
        due = time.monotonic() + period
        with suppress(TimeoutError):
            async with asyncio.timeout(period):  # unlike wait_for it never swallows a cancellation
                await self.wake.wait()
        self.wake.clear()
        now = time.monotonic()
        self.heard_at = min(now, self.heard_at + max(0.0, now - due))

    async def _follow(self, process: Any) -> None:
        """Its start, which is no news to one that runs, and how it ends."""
        try:
            await process.start()
            await process.run()
            self.death = "its process ended"
        except Exception as error:
            self.death = str(error)
        self.wake.set()

    async def _ask(self, process: Any) -> None:
        """What it says of itself, while it answers."""
        try:
            while True:
                report = await process.report()
                self.heard_at = time.monotonic()
                if report != self.report:
                    self.report = report
                    self.wake.set()
                await asyncio.sleep(SERVING_PERIOD if report.state == State.READY else STARTING_PERIOD)
        except Exception as error:  # how it ended is what `_follow` hears
            log.debug("%s does not answer: %s", self.name, error)
