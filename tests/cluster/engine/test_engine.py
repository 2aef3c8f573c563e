"""The engine's thread: when it works, when it sleeps, and how it ends. Steps wait at a gate that the tests open."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from paceline.cluster.engine import engine as engine_module
from paceline.cluster.engine.engine import Engine
from paceline.proto.errors import InvalidRequest, PacelineError
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import Request, TokenDelta
from tests.cluster.drive import TIMEOUT, GatedExecutor
from tests.cluster.engine.fakes import expected_ids, make_request, make_scheduler


class Running:
    """An engine on its thread, and all that it said."""

    def __init__(self, executor: GatedExecutor, num_blocks: int, **config):
        self.news = threading.Condition()
        self.deltas: list[TokenDelta] = []
        self.loads: list[ReplicaLoad] = []
        self.replies: dict[str, PacelineError | None] = {}
        self.error: BaseException | None = None
        self.executor = executor
        self.engine = Engine(make_scheduler(num_blocks, **config), executor, self._publish, self._on_load)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, request: Request) -> None:
        def reply(error: PacelineError | None) -> None:
            with self.news:
                assert not [d for d in self.deltas if d.request_id == request.request_id]
                self.replies[request.request_id] = error
                self.news.notify_all()

        self.engine.submit(request, reply)

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self.news:
            assert self.news.wait_for(condition, TIMEOUT), "it did not happen"

    def ids(self, request_id: str, choice: int = 0) -> list[int]:
        ids: list[int] = []
        for delta in self.deltas:
            if (delta.request_id, delta.choice) == (request_id, choice):
                assert delta.offset == len(ids) or not delta.ids
                ids += delta.ids
        return ids

    def endings(self) -> list[tuple[str, int, str]]:
        return [(d.request_id, d.choice, d.finish_reason) for d in self.deltas if d.finish_reason]

    def cpu_seconds(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def join(self) -> None:
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def _publish(self, deltas: list[TokenDelta]) -> None:
        with self.news:
            self.deltas += deltas
            self.news.notify_all()

    def _on_load(self, load: ReplicaLoad) -> None:
        with self.news:
            self.loads.append(load)
            self.news.notify_all()


@contextmanager
def running(executor: GatedExecutor | None = None, num_blocks: int = 256, **config) -> Iterator[Running]:
    executor = executor or GatedExecutor(gate_open=True)
    it = Running(executor, num_blocks, **config)
    it.thread.start()
    try:
        yield it
    finally:
        executor.open_gate()
        it.engine.stop()
        it.join()


def idle(it: Running) -> Callable[[], bool]:
    return lambda: bool(it.loads) and it.loads[-1].running == it.loads[-1].waiting == 0


# -- work and sleep ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_from_several_threads_all_end_with_their_own_ids(depth):
    requests = [make_request(f"r{i}", prompt=10 + i, max_tokens=5 + i, n=1 + i % 2) for i in range(24)]
    with running(depth=depth) as it:
        threads = [
            threading.Thread(target=lambda part: [it.submit(r) for r in part], args=(requests[i::4],)) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        it.wait_for(lambda: len(it.endings()) == sum(r.params.n for r in requests))
        assert it.replies == {r.request_id: None for r in requests}
        for request in requests:
            for choice in range(request.params.n):
                assert it.ids(request.request_id, choice) == expected_ids(request, choice)
        assert {reason for *_, reason in it.endings()} == {"length"}


def test_an_idle_engine_sleeps():
    with running() as it:
        it.submit(make_request(max_tokens=5))
        it.wait_for(lambda: len(it.endings()) == 1 and idle(it)())
        steps, loads, cpu, began = len(it.executor.plans), len(it.loads), it.cpu_seconds(), time.monotonic()
        it.thread.join(engine_module.IDLE_CHECK + 0.3)  # long enough for the check at idle, which tells a load too
        assert it.thread.is_alive()
        assert len(it.executor.plans) == steps
        assert len(it.loads) == loads + 1
        assert it.cpu_seconds() - cpu < 0.05 * (time.monotonic() - began)
        it.submit(make_request("next", max_tokens=2))  # and wakes up
        it.wait_for(lambda: len(it.endings()) == 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_up_to_depth_plans_are_in_flight_when_a_result_is_awaited(depth):
    with running(depth=depth) as it:
        it.submit(make_request(max_tokens=20))
        it.wait_for(it.endings)
        assert max(it.executor.outstanding) == depth
        # but for the last ones, when max_tokens leaves nothing to plan
        assert it.executor.outstanding.count(depth) >= 19


def test_a_request_that_arrives_during_a_step_is_in_the_next_plan():
    executor = GatedExecutor()
    with running(executor) as it:
        it.submit(make_request("first", max_tokens=50))
        assert executor.collecting.wait(TIMEOUT)
        it.submit(make_request("second", max_tokens=50))
        executor.allow(1)
        it.wait_for(lambda: "second" in it.replies)
        executor.allow(1)
        it.wait_for(lambda: it.ids("second"))
        assert [len(plan.chunk_slots) for plan in executor.plans[:2]] == [1, 2]


# -- abort, finish, refusal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_during_a_step_ends_the_request_once_and_the_engine_tells_that_it_is_idle(depth):
    executor = GatedExecutor()
    with running(executor, depth=depth) as it:
        it.submit(make_request("r", prompt=40, max_tokens=100, n=2))
        executor.allow(3)
        it.wait_for(lambda: len(it.ids("r", 1)) >= 1)
        assert executor.collecting.wait(TIMEOUT)
        for _ in range(2):  # the second one finds nothing to end
            it.engine.abort("r")
        it.engine.abort("unknown")
        steps = len(executor.plans)
        executor.allow(2)
        it.wait_for(lambda: idle(it)() and it.loads[-1].blocks_used == 0 and it.loads[-1].finished_total)
        assert it.endings() == [("r", 0, "abort"), ("r", 1, "abort")]
        assert len(executor.plans) == steps
        assert it.engine.load == it.loads[-1]


def test_finish_ends_a_choice_as_stop_with_the_count_it_is_told():
    executor = GatedExecutor()
    with running(executor) as it:
        it.submit(make_request("r", max_tokens=100))
        executor.allow(6)
        it.wait_for(lambda: len(it.ids("r")) == 6)
        it.engine.finish("r", 0, 4)
        it.engine.finish("r", 0, 2)
        it.engine.finish("r", 7, 2)
        executor.open_gate()
        it.wait_for(it.endings)
        it.wait_for(idle(it))
        assert it.endings() == [("r", 0, "stop")]
        assert it.deltas[-1].usage.num_generated == 4


def test_a_refused_request_is_replied_to_and_leaves_the_engine_at_rest():
    with running() as it:
        it.submit(make_request("r", prompt=[]))
        it.wait_for(lambda: "r" in it.replies)
        assert isinstance(it.replies["r"], InvalidRequest)
        it.wait_for(idle(it))
        assert (it.deltas, it.executor.plans) == ([], [])


# -- loads -------------------------------------------------------------------------------------------------------------


def test_the_load_is_told_while_busy_and_at_once_when_idle(monkeypatch):
    monkeypatch.setattr(engine_module, "LOAD_PERIOD", 0.0)
    with running() as it:
        it.submit(make_request(prompt=40, max_tokens=10))
        it.wait_for(it.endings)
        it.wait_for(idle(it))
        busy = [load for load in it.loads if load.running]
        assert [load.generation_tokens_total for load in busy] == list(range(1, 10))
        assert all(load.blocks_used >= 3 for load in busy)
        last = it.loads[-1]
        assert (last.blocks_used, last.generation_tokens_total, last.prompt_tokens_total) == (0, 10, 40)
        assert last.step_id == 10


def test_while_busy_loads_come_once_in_a_period(monkeypatch):
    monkeypatch.setattr(engine_module, "LOAD_PERIOD", 3600.0)
    with running() as it:
        it.submit(make_request(max_tokens=50))
        it.wait_for(it.endings)
        it.wait_for(idle(it))
        assert [load for load in it.loads if load.running] == []


def test_the_token_rate_rises_with_work_and_falls_to_nothing_at_rest(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_CHECK", 0.02)
    monkeypatch.setattr(engine_module, "LOAD_PERIOD", 0.0)
    with running() as it:
        it.submit(make_request(max_tokens=50))
        it.wait_for(it.endings)
        assert any(load.tokens_per_second > 0 for load in it.loads)
        it.wait_for(lambda: idle(it)() and it.loads[-1].tokens_per_second == 0)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_an_executor_that_raises_ends_every_choice_once_and_then_the_engine(depth, caplog):
    executor = GatedExecutor(fail_at=4)
    with running(executor, depth=depth, max_num_seqs=2) as it:
        requests = [make_request("r0", max_tokens=100), make_request("r1", max_tokens=100, n=3), make_request("r2")]
        for request in requests:
            it.submit(request)
            executor.allow(1)
            it.wait_for(lambda request=request: request.request_id in it.replies)
        executor.open_gate()
        it.join()
        assert isinstance(it.error, RuntimeError)
        choices = [(r.request_id, choice) for r in requests for choice in range(r.params.n)]
        assert sorted(it.endings()) == [(*choice, "error") for choice in choices]
        assert {d.error for d in it.deltas if d.finish_reason} == {"the engine failed: RuntimeError"}
        assert executor.closed.is_set()
        assert "the device is gone" in caplog.text


def test_stop_ends_what_runs_with_an_error_and_closes_the_executor():
    executor = GatedExecutor()
    with running(executor) as it:
        it.submit(make_request("r", max_tokens=100, n=2))
        executor.allow(2)
        it.wait_for(lambda: it.ids("r"))
        it.engine.stop()
        executor.open_gate()
        it.join()
        assert it.error is None
        assert sorted(it.endings()) == [("r", 0, "error"), ("r", 1, "error")]
        assert it.deltas[-1].error == "the replica was stopped"
        assert executor.closed.is_set()


def test_an_invariant_that_does_not_hold_at_idle_is_logged_and_the_engine_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "IDLE_CHECK", 0.02)
    with running(check=False) as it:
        it.wait_for(lambda: len(it.loads) == 2)  # falling asleep, and the check that finds nothing
        assert "invariant" not in caplog.text
        it.engine.scheduler.pool.refs[3] += 1  # a block that nobody holds
        it.submit(make_request("r", max_tokens=3))
        it.wait_for(it.endings)
        seen = len(it.loads)
        it.wait_for(lambda: len(it.loads) >= seen + 1 and "invariant" in caplog.text)
        it.submit(make_request("next", max_tokens=3))
        it.wait_for(lambda: len(it.endings()) == 2)
        assert it.ids("next") == expected_ids(make_request("next", max_tokens=3))
