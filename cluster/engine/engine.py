"""The engine loop: plan, run, take in, pass on. One thread owns it; others speak to it through its inbox.

This file knows the order of things and the clock, not how a step is decided (scheduler.py) or run (an Executor).
"""

import logging
import queue
import time
from collections.abc import Callable

from paceline.cluster.engine.executor import IDLE_CHECK, Executor
from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto.errors import PacelineError, ReplicaLost
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import FINISH_ERROR, Request, TokenDelta

log = logging.getLogger("paceline.engine")

LOAD_PERIOD = 0.25  # seconds between snapshots while busy


class Engine:
    """``publish`` gets the deltas of each step, in order, on the engine's thread, and must not block.

    ``submit``, ``abort``, ``finish`` and ``stop`` may be called from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[list[TokenDelta]], None],
        on_load: Callable[[ReplicaLoad], None] = lambda load: None,
    ):
        self.scheduler = scheduler
        self.load = scheduler.load()
        self._executor = executor
        self._publish = publish
        self._on_load = on_load
        self._depth = scheduler.config.depth
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rate_since = (time.monotonic(), 0)  # time and generated tokens
        self._next_load = 0.0
        self._got_on_at: float | None = None  # when it last finished a step, or began to have work; None: it sleeps

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Up to ``depth`` plans in flight; then the oldest result."""
        scheduler, executor = self.scheduler, self._executor
        while scheduler.num_in_flight < self._depth and (plan := scheduler.schedule(time.monotonic())):
            executor.submit(plan)
        if not scheduler.num_in_flight:
            raise AssertionError("there is work, but nothing can be planned and nothing is in flight")
        return scheduler.commit(executor.collect(), time.monotonic())

    def run(self) -> None:
        """Until stop(). An error of the executor or of ours ends every open request, then is raised."""
        try:
            while self._serve_inbox():
                if expired := self.scheduler.expire(time.time()):
                    self._publish(expired)
                    continue  # perhaps nothing is left to do
                if deltas := self.step():
                    self._publish(deltas)
                self._got_on_at = time.monotonic()
                self._snapshot()
        except BaseException as error:
            log.exception("the engine failed at step %d", self.load.step_id)
            self._publish(self._end_all(f"the engine failed: {type(error).__name__}"))
            raise
        finally:
            self._executor.close()
        self._publish(self._end_all("the replica was stopped"))

    @property
    def _idle(self) -> bool:
        return not self.scheduler.has_work and not self.scheduler.num_in_flight

    def _serve_inbox(self) -> bool:
        """Runs what others asked for; sleeps while there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                if not self._idle:
                    return True
                command = self._sleep()
                self._got_on_at = time.monotonic()
            if command is None:
                return False
            command()

    def _sleep(self) -> Callable[[], None] | None:
        """Until the next command. Idleness is told at once; if it lasts, the invariants are checked and rates fall, and
        then and again the executor is looked at."""
        self._got_on_at = None
        self._snapshot(force=True)
        try:
            return self._inbox.get(timeout=IDLE_CHECK)
        except queue.Empty:
            pass
        try:
            self.scheduler.check()
        except AssertionError:
            log.exception("an invariant does not hold; the replica goes on")
        self._rate_since = (time.monotonic(), self.scheduler.counters.generated)
        self._snapshot(force=True)
        while True:
            self._executor.check()
            try:
                return self._inbox.get(timeout=IDLE_CHECK)
            except queue.Empty:
                pass

    def _end_all(self, error: str) -> list[TokenDelta]:
        """As lost with the replica: a router may go on with them elsewhere."""
        abort = self.scheduler.abort
        request_ids = self.scheduler.request_ids()
        return [d for request_id in request_ids for d in abort(request_id, FINISH_ERROR, error, ReplicaLost.code)]

    def _snapshot(self, force: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_load and not force:
            return
        self._next_load = now + LOAD_PERIOD
        since, count = self._rate_since
        generated = self.scheduler.counters.generated
        rate = (generated - count) / (now - since) if now > since else 0.0
        if now - since > 2.0:
            self._rate_since = (now, generated)
        self.load = self.scheduler.load(tokens_per_second=rate)
        self._on_load(self.load)

    # -- from other threads ----------------------------------------------------------------------------------------

    def submit(self, request: Request, reply: Callable[[PacelineError | None], None]) -> None:
        """Queues a request; ``reply`` is called on the engine's thread before any of its deltas is published.

        One that the engine has not come to when it ends gets no reply: whoever runs ``run`` knows that it ended.
        """

        def add() -> None:
            try:
                self.scheduler.add(request, time.monotonic())
            except PacelineError as error:
                reply(error)
            else:
                reply(None)

        self._inbox.put(add)

    @property
    def got_on_at(self) -> float | None:
        """Of the monotonic clock: when it last finished a step, or began to have work. None while it has none."""
        return self._got_on_at

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._pass_on(self.scheduler.abort(request_id)))

    def lose(self, request_id: str, error: str) -> None:
        """Ends it as lost with the replica."""
        self._inbox.put(lambda: self._pass_on(self.scheduler.abort(request_id, FINISH_ERROR, error, ReplicaLost.code)))

    def finish(self, request_id: str, choice: int, num_ids: int) -> None:
        self._inbox.put(lambda: self._pass_on(self.scheduler.finish(request_id, choice, num_ids)))

    def stop(self) -> None:
        self._inbox.put(None)

    def _pass_on(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._publish(deltas)
