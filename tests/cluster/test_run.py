"""A replica as a process of its own: what its signals mean, what it exits with, and that it ends when it is stuck."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from tests.cluster.drive import TIMEOUT, RawRouter, hello
from tests.cluster.engine.fakes import make_request

# The executor takes 5 ms a step, until it hangs, fails, or holds up the event loop by the step of that number.
PROGRAM = """
import asyncio, sys, time
from paceline.cluster.engine.executor import Loaded
from paceline.cluster.run import run_replica
from tests.cluster.drive import CARD, LightExecutor, replica_config

class Executor(LightExecutor):
    def collect(self):
        time.sleep(0.005)
        result = super().collect()
        if result.step_id == {hang_at}:
            time.sleep(1000)
        if result.step_id == {block_at}:
            loop.call_soon_threadsafe(time.sleep, 1000)
        return result

def load(config, on_phase):
    return Loaded(Executor(gate_open=True, fail_at={fail_at}), CARD, 2048, "a fake")

async def main():
    global loop
    loop = asyncio.get_running_loop()
    config = replica_config(step_timeout={step_timeout}, drain_seconds={drain_seconds})
    return await run_replica(config, load=load, ready=lambda address: print(address, flush=True))

sys.exit(asyncio.run(main()))
"""


@asynccontextmanager
async def process(**settings) -> AsyncIterator[tuple[asyncio.subprocess.Process, RawRouter]]:
    """With a router on it, whose request has begun."""
    values = {"hang_at": None, "block_at": None, "fail_at": None, "step_timeout": 60.0, "drain_seconds": 30.0}
    program = PROGRAM
    for name, value in (values | settings).items():
        program = program.replace("{" + name + "}", repr(value))
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), TIMEOUT)).decode().strip()
        async with grpc.aio.insecure_channel(address) as channel:
            router = RawRouter(ReplicaServiceStub(channel).Attach())
            await router.send(hello=hello())
            await router.submit(1, make_request(max_tokens=300))
            await router.read_until(lambda: bool(router.ids(1)))
            yield child, router
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def exit_status(child: asyncio.subprocess.Process, within: float = TIMEOUT) -> int:
    return await asyncio.wait_for(child.wait(), within)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_drains_and_exits_with_0(number):
    async with process() as (child, router):
        child.send_signal(number)
        await router.read_until(lambda: router.told_draining)
        await router.read_to_end()
        assert router.endings(1) == [(0, "length")]
        assert len(router.ids(1)) == 300
        assert await router.call.code() is grpc.StatusCode.OK
        assert await exit_status(child) == 0


async def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error_and_exits_with_0():
    async with process(drain_seconds=0.1) as (child, router):
        child.send_signal(signal.SIGTERM)
        await router.read_to_end()
        assert router.endings(1) == [(0, "error")]
        assert await exit_status(child) == 0


async def test_a_second_signal_ends_it_at_once():
    async with process() as (child, router):
        child.send_signal(signal.SIGTERM)
        await router.read_until(lambda: router.told_draining)
        child.send_signal(signal.SIGTERM)
        assert await exit_status(child, 1.0) == 128 + signal.SIGTERM


async def test_an_engine_that_dies_takes_the_process_with_it_and_streams_are_told():
    async with process(fail_at=100) as (child, router):
        await router.read_to_end()
        assert router.endings(1) == [(0, "error")]
        assert await exit_status(child) == 1


async def test_a_step_that_hangs_ends_the_process_and_streams_break_with_an_error():
    async with process(hang_at=100, step_timeout=1.0) as (child, router):
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await router.read_to_end()
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "replica" in broken.value.details()
        assert await exit_status(child) == 1


async def test_an_event_loop_that_hangs_ends_the_process():
    async with process(block_at=100, step_timeout=1.0) as (child, router):
        with pytest.raises(grpc.aio.AioRpcError):
            await router.read_to_end()
        assert await exit_status(child) == 1


async def test_a_process_that_was_stopped_for_longer_than_a_step_may_take_goes_on():
    async with process(step_timeout=1.0) as (child, router):
        child.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        child.send_signal(signal.SIGCONT)
        await router.read_until(lambda: bool(router.endings(1)))
        assert router.endings(1) == [(0, "length")]
        assert child.returncode is None


async def test_without_work_nothing_is_too_slow():
    async with process(step_timeout=0.5) as (child, router):
        await router.read_until(lambda: bool(router.endings(1)))
        await asyncio.sleep(1.5)
        assert child.returncode is None
        await router.submit(2, make_request(max_tokens=3))
        await router.read_until(lambda: bool(router.endings(2)))
