"""A replica that is to leave: who is told, what still runs, and what is refused."""

import asyncio

import grpc.aio

from paceline.cluster import host as host_module
from paceline.proto import replica_pb2 as pb
from paceline.router.link import attach, open_channel
from tests.cluster.drive import CARD, TIMEOUT, GatedExecutor, attached, hello, running_replica, stepping, until
from tests.cluster.engine.fakes import expected_ids, make_request


def drain(replica, seconds: float) -> asyncio.Task:
    return asyncio.create_task(_drain(replica, seconds))


async def _drain(replica, seconds: float) -> int:
    return (await replica.stub.Drain(pb.DrainRequest(seconds=seconds), timeout=TIMEOUT)).num_ended


async def state_of(replica) -> str:
    return (await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)).state


async def test_what_runs_ends_normally_and_only_then_is_the_drain_over():
    executor, request = GatedExecutor(), make_request(max_tokens=60)
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, request)
        executor.allow(2)
        await router.read_until(lambda: bool(router.ids(1)))
        draining = drain(replica, TIMEOUT)
        await router.read_until(lambda: router.told_draining)
        assert await state_of(replica) == "draining"
        await asyncio.sleep(host_module.NOTICE + 0.2)
        assert not draining.done()
        executor.open_gate()
        await router.read_until(lambda: bool(router.endings(1)))
        assert router.ids(1) == expected_ids(request)
        assert await asyncio.wait_for(draining, TIMEOUT) == 0
        assert await state_of(replica) == "drained"


async def test_what_is_new_is_refused_as_unavailable_once_routers_have_been_told():
    executor = GatedExecutor()
    async with running_replica(executor) as replica, stepping(executor):
        router = await attached(replica)
        await router.submit(1, make_request("long", max_tokens=1000))
        await router.read_until(lambda: bool(router.ids(1)))
        draining = drain(replica, TIMEOUT)
        await router.read_until(lambda: router.told_draining)
        await router.submit(2, make_request("on its way", max_tokens=3))  # sent before the router knew
        await router.read_until(lambda: bool(router.endings(2)))
        assert router.endings(2) == [(0, "length")]
        await asyncio.sleep(host_module.NOTICE)
        await router.submit(3, make_request("late"))
        await router.read_until(lambda: bool(router.of("rejected")))
        (rejected,) = router.of("rejected")
        assert (rejected.handle, rejected.error.code) == (3, "no_replica")
        assert "draining" in rejected.error.message
        assert rejected.error.retry_after > 0
        late = replica.stub.Attach()
        await late.write(pb.AttachRequest(hello=hello("router-b")))
        assert await asyncio.wait_for(late.code(), TIMEOUT) is grpc.StatusCode.UNAVAILABLE
        await router.send(cancel=pb.Cancel(handle=1))
        assert await asyncio.wait_for(draining, TIMEOUT) == 0


async def test_when_time_is_up_the_rest_ends_with_an_error_that_a_router_may_move():
    executor = GatedExecutor()
    async with running_replica(executor) as replica, stepping(executor):
        router = await attached(replica)
        await router.submit(1, make_request(max_tokens=1500, n=2))
        await router.read_until(lambda: bool(router.ids(1, 1)))
        draining = drain(replica, 0.2)
        await router.read_until(lambda: len(router.endings(1)) == 2)
        assert sorted(router.endings(1)) == [(0, "error"), (1, "error")]
        ending = router.of("deltas")[-1].endings[0]
        assert "drained" in ending.error
        assert ending.error_code == "replica_lost"
        assert await asyncio.wait_for(draining, TIMEOUT) == 2
        await until(lambda: replica.server.load.blocks_used == 0)


async def test_an_idle_replica_is_drained_at_once_and_again():
    async with running_replica() as replica:
        for _ in range(2):
            assert await asyncio.wait_for(drain(replica, 100.0), host_module.NOTICE + 1) == 0
        assert await state_of(replica) == "drained"


async def test_a_router_hears_of_it_on_its_link_and_sends_nothing_more():
    async with running_replica() as replica, open_channel(replica.address) as channel:
        link = await attach(channel, replica.address, CARD, "router-l", "1", TIMEOUT)
        reading = asyncio.create_task(link.run())
        await until(lambda: link.usable and link.load.blocks_total)
        draining = drain(replica, 1.0)
        await until(lambda: not link.usable, host_module.NOTICE)  # before anything is refused
        await draining
        reading.cancel()
