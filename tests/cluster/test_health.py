"""How a replica says that it is well, and how it ends itself when it is not."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from paceline.cluster.engine.executor import Loaded
from paceline.cluster.health import HealthServer, Vitals
from paceline.cluster.watchdog import Watchdog
from paceline.proto import replica_pb2 as pb
from paceline.proto.errors import StartupError
from tests.cluster.drive import CARD, TIMEOUT, GatedExecutor, attached, running_replica, until
from tests.cluster.engine.fakes import make_request


def ask(port: int | None, name: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/{name}", timeout=TIMEOUT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def statuses(port: int | None) -> list[int]:
    """Of live, ready and progress."""
    return [(await asyncio.to_thread(ask, port, name))[0] for name in ("live", "ready", "progress")]


async def test_a_replica_is_live_while_it_loads_and_ready_when_it_has():
    may_load, executor = threading.Event(), GatedExecutor(gate_open=True)

    def load(config, on_phase):
        assert may_load.wait(TIMEOUT)
        return Loaded(executor, CARD, 64, "")

    async with running_replica(executor, load=load, wait=False) as replica:
        port = replica.server.health_port
        assert await statuses(port) == [200, 503, 200]
        may_load.set()
        await asyncio.wait_for(replica.server.ready(), TIMEOUT)
        assert await statuses(port) == [200, 200, 200]
        draining = asyncio.create_task(replica.server.drain(1))
        await until(lambda: replica.server.state == "draining")
        assert await statuses(port) == [200, 503, 200]
        await draining


async def test_a_step_that_does_not_end_shows_in_progress_first_and_then_in_live():
    executor = GatedExecutor()
    async with running_replica(executor, step_timeout=1.0) as replica:
        port = replica.server.health_port
        router = await attached(replica)
        await router.submit(1, make_request())
        await until(executor.collecting.is_set)
        assert await statuses(port) == [200, 200, 200]
        seen = [[200, 200, 200]]
        while seen[-1] != [503, 200, 503]:
            if (now := await statuses(port)) != seen[-1]:
                seen.append(now)
        assert seen == [[200, 200, 200], [200, 200, 503], [503, 200, 503]]
        state = await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)
        assert state.stalled_seconds > 1.0
        executor.open_gate()
        await router.read_until(lambda: bool(router.endings(1)))
        await until(lambda: replica.server.got_on_at() is None)  # idle: nothing can stall
        assert await statuses(port) == [200, 200, 200]


async def test_health_answers_at_once_while_the_event_loop_is_stuck():
    async with running_replica() as replica:
        port, answers = replica.server.health_port, []

        def probe() -> None:
            answers.append(ask(port, "live")[0])

        thread = threading.Thread(target=probe)
        thread.start()
        thread.join(TIMEOUT)  # this is the event loop's thread
        assert answers == [200]


def test_other_paths_are_unknown_and_a_port_in_use_is_a_startup_error():
    server = HealthServer(lambda: Vitals(True, True, True, "ready", 0.0), "127.0.0.1", 0)
    server.start()
    assert ask(server.port, "else")[0] == 404
    assert ask(server.port, "state")[0] == 404
    assert ask(server.port, "live") == (
        200,
        {"live": True, "ready": True, "progress": True, "state": "ready", "stalled_seconds": 0.0},
    )
    with pytest.raises(StartupError, match="health"):
        HealthServer(lambda: Vitals(True, True, True, "ready", 0.0), "127.0.0.1", server.port)
    server.stop()


class Patient:
    """A replica as a watchdog sees it."""

    def __init__(self):
        self.step: float | None = 0.0
        self.steps = True  # the engine gets on
        self.loops = True  # so does the event loop
        self.given_up = ""

    def got_on_at(self) -> float | None:
        if self.steps and self.step is not None:
            self.step += 1
        return self.step

    def give_up(self, reason: str) -> None:
        self.given_up = reason

    def call_soon(self, function) -> None:
        if self.loops:
            function()


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr("paceline.cluster.watchdog.GRACE", 0.01)
    patient, ended = Patient(), []
    dog = Watchdog(patient, 0.2, end=ended.append)
    dog.start()
    yield patient, ended
    dog.stop()


async def test_the_watchdog_leaves_a_replica_alone_that_works_or_sleeps(watched):
    patient, ended = watched
    await asyncio.sleep(0.4)
    patient.step = None
    await asyncio.sleep(0.4)
    assert (patient.given_up, ended) == ("", [])


@pytest.mark.parametrize(("stuck", "who"), [("steps", "engine"), ("loops", "event loop")])
async def test_the_watchdog_gives_up_what_does_not_get_on(watched, stuck, who):
    patient, ended = watched
    began = time.monotonic()
    setattr(patient, stuck, False)
    await until(lambda: ended == [1])
    assert patient.given_up == f"the {who} did not get on for 0.2 s"
    assert time.monotonic() - began >= 0.15
