"""The engine's host without a wire: what order its callers may rely on, and how it starts and ends."""

import asyncio
import threading
import time

import msgspec
import pytest

from paceline.cluster.engine.executor import Loaded
from paceline.cluster.host import EngineHost
from paceline.cluster.routes import Caller
from paceline.proto.errors import InvalidRequest, NoReplica, StartupError
from tests.cluster.drive import CARD, TIMEOUT, GatedExecutor, replica_config, until
from tests.cluster.engine.fakes import make_request


@pytest.fixture
async def hosting():
    """Makes hosts of gated executors, and stops them."""
    hosts = []

    async def start(executor: GatedExecutor, load=None, wait: bool = True) -> EngineHost:
        host = EngineHost(
            replica_config(), load or (lambda config, on_phase: Loaded(executor, CARD, 512, "")), "host-t"
        )
        hosts.append((host, executor))
        host.start()
        if wait:
            await asyncio.wait_for(host.ready(), TIMEOUT)
        return host

    yield start
    for host, executor in hosts:
        executor.open_gate()
        await asyncio.wait_for(host.stop(), TIMEOUT)


def submit(host: EngineHost, caller: Caller, handle: int, request) -> asyncio.Future:
    answer = asyncio.get_running_loop().create_future()
    host.submit(caller, handle, request, answer.set_result)
    return answer


def hold_loop_until(condition) -> None:
    """What the engine has to say piles up meanwhile."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def answer_of(future: asyncio.Future):
    return await asyncio.wait_for(future, TIMEOUT)


async def test_the_reply_comes_before_the_first_delta_even_when_both_wait_for_a_busy_loop(hosting):
    host = await hosting(GatedExecutor(gate_open=True))
    caller, order = host.open("router"), []
    caller.outbox.deltas = lambda rows: order.append("deltas")
    host.submit(caller, 1, make_request(max_tokens=4), lambda error: order.append("reply"))
    hold_loop_until(lambda: host.load.finished_total)
    assert order == []
    await until(lambda: not caller.engine_ids)
    assert order == ["reply"] + ["deltas"] * 4


async def test_a_cancelled_request_frees_its_blocks_within_two_steps(hosting):
    executor = GatedExecutor()
    host = await hosting(executor)
    caller = host.open("router")
    accepted = submit(host, caller, 1, make_request(prompt=100, max_tokens=500))
    assert await answer_of(accepted) is None
    executor.allow(5)
    await until(lambda: len(executor.plans) == 6)
    assert host._engine.scheduler.pool.num_referenced > 0
    host.cancel(caller, 1)
    executor.allow(2)
    await until(lambda: host.load.finished_total == {"abort": 1})
    assert (host.load.running, host.load.blocks_used) == (0, 0)
    assert len(executor.plans) <= 8
    assert caller.engine_ids == {}


async def test_a_cancel_before_the_engine_took_the_request_ends_it_without_a_reply(hosting):
    executor = GatedExecutor()
    host = await hosting(executor)
    caller = host.open("router")
    submit(host, caller, 1, make_request("first", max_tokens=3))
    await until(executor.collecting.is_set)
    second = submit(host, caller, 2, make_request("second", max_tokens=3))
    host.cancel(caller, 2)
    executor.open_gate()
    await until(lambda: host.load.finished_total == {"abort": 1, "length": 1})
    assert not second.done()


async def test_requests_that_the_engine_had_not_come_to_when_it_died_are_refused(hosting):
    executor = GatedExecutor(fail_at=0)
    host = await hosting(executor)
    caller = host.open("router")
    first = submit(host, caller, 1, make_request("first"))
    await until(executor.collecting.is_set)
    second = submit(host, caller, 2, make_request("second"))
    executor.open_gate()
    assert await answer_of(first) is None
    assert isinstance(await answer_of(second), NoReplica)
    assert host.state == "dead"
    assert host.failed.is_set()
    assert caller.engine_ids == {}
    assert isinstance(await answer_of(submit(host, caller, 3, make_request("third"))), NoReplica)


async def test_closing_a_caller_aborts_what_is_its_and_nothing_else(hosting):
    executor = GatedExecutor()
    host = await hosting(executor)
    one, other = host.open("one"), host.open("other")
    accepted = [submit(host, one, 1, make_request("a")), submit(host, other, 1, make_request("b"))]
    executor.allow(1)
    for future in accepted:
        assert await answer_of(future) is None
    host.close(one)
    assert (one.engine_ids, len(other.engine_ids)) == ({}, 1)
    executor.open_gate()
    await until(lambda: host.load.finished_total == {"abort": 1, "length": 1})


async def test_attempts_are_fenced_among_callers_of_one_name_only(hosting):
    executor, request = GatedExecutor(), make_request("same", max_tokens=3)
    host = await hosting(executor)
    router, stranger = host.open("router"), host.open("another")
    taken = [submit(host, router, 1, request), submit(host, stranger, 1, request)]
    executor.allow(1)
    for future in taken:
        assert await answer_of(future) is None
    again = submit(host, router, 2, request)
    assert again.done()  # refused at the door, without the engine
    assert isinstance(again.result(), InvalidRequest)
    assert again.result().param == "request_id"
    executor.open_gate()
    await until(lambda: host.load.finished_total == {"length": 2})
    assert await answer_of(submit(host, router, 3, request)) is None  # an id that has ended is free again


async def test_a_host_stopped_while_it_loads_ends_its_thread_and_says_so():
    executor, may_load = GatedExecutor(), threading.Event()

    def load(config, on_phase):
        assert may_load.wait(TIMEOUT)
        return Loaded(executor, CARD, 64, "")

    host = EngineHost(replica_config(), load, "host-t")
    host.start()
    stopping = asyncio.create_task(host.stop())
    with pytest.raises(StartupError, match="stopped"):
        await asyncio.wait_for(host.ready(), TIMEOUT)
    may_load.set()
    await asyncio.wait_for(stopping, TIMEOUT)
    assert not host._thread.is_alive()
    assert executor.closed.is_set()


async def test_stop_before_start_and_twice_is_fine(hosting):
    idle = EngineHost(replica_config(), lambda config, on_phase: None, "host-t")
    await asyncio.wait_for(idle.stop(), TIMEOUT)
    host = await hosting(GatedExecutor())
    await asyncio.wait_for(host.stop(), TIMEOUT)
    await asyncio.wait_for(host.stop(), TIMEOUT)
    assert host.state == "stopping"


async def test_any_error_while_loading_becomes_one_startup_error(hosting):
    def load(config, on_phase):
        raise OSError("disk on fire")

    host = await hosting(GatedExecutor(), load, wait=False)
    with pytest.raises(StartupError, match="OSError: disk on fire"):
        await asyncio.wait_for(host.ready(), TIMEOUT)
    assert host.state == "dead"


async def test_the_engine_is_told_the_windows_of_the_models_kv_groups(hosting):
    group = CARD.kv_groups[0]
    card = msgspec.structs.replace(CARD, kv_groups=(group, msgspec.structs.replace(group, window=32)))
    host = await hosting(GatedExecutor(), lambda config, on_phase: Loaded(GatedExecutor(), card, 512, ""))
    assert host.limits is not None
    assert host.limits.windows == (0, 32)


async def test_an_unfit_engine_config_fails_the_start(hosting):
    host = await hosting(
        GatedExecutor(), lambda config, on_phase: Loaded(GatedExecutor(), CARD, 0, "no blocks at all"), wait=False
    )
    with pytest.raises(StartupError, match="num_blocks"):
        await asyncio.wait_for(host.ready(), TIMEOUT)


async def test_a_refusal_of_the_scheduler_leaves_nothing_behind(hosting):
    host = await hosting(GatedExecutor(gate_open=True))
    caller = host.open("router")
    error = await answer_of(submit(host, caller, 1, make_request(prompt=[])))
    assert isinstance(error, InvalidRequest)
    assert (error.param, caller.engine_ids, len(host._routes), host._routes._newest) == ("prompt", {}, 0, {})
