"""The cluster token at a replica's door: which calls ask for it."""

import asyncio

import grpc.aio
import pytest

from paceline.proto import codec
from paceline.proto import replica_pb2 as pb
from paceline.proto.token import bearer
from tests.cluster.drive import TIMEOUT, RawRouter, attached, hello, running_replica
from tests.cluster.engine.fakes import make_request

TOKEN = "the-token-of-this-cluster"
WRONG = [(), bearer("another"), (("authorization", TOKEN),), (("authorization", "bearer"),)]
GENERATE = pb.GenerateRequest(submission=codec.submission_of(make_request(max_tokens=2)))


async def status_of(call) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), TIMEOUT)


@pytest.mark.parametrize("metadata", WRONG)
async def test_without_the_token_nobody_asks_for_work(metadata):
    async with running_replica(cluster_token=TOKEN) as replica:
        stub = replica.stub
        calls = [
            stub.Attach(metadata=metadata),  # refused before it says anything
            stub.Generate(GENERATE, metadata=metadata),
            stub.Abort(pb.AbortRequest(), metadata=metadata),
            stub.Drain(pb.DrainRequest(seconds=1), metadata=metadata),
        ]
        assert {await status_of(call) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        assert replica.server.state == "ready"


async def test_with_the_token_everything_works_and_what_only_reads_needs_none():
    async with running_replica(cluster_token=TOKEN) as replica:
        router = await attached(replica, metadata=bearer(TOKEN))
        await router.submit(1, make_request())
        await router.read_until(lambda: bool(router.endings(1)))
        answers = [frame async for frame in replica.stub.Generate(GENERATE, metadata=bearer(TOKEN), timeout=TIMEOUT)]
        assert answers
        assert (await replica.stub.GetState(pb.GetStateRequest(), timeout=TIMEOUT)).state == "ready"
        assert (await replica.stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT)).card_json


async def test_a_replica_without_a_token_lets_everybody_in():
    async with running_replica() as replica:
        router = RawRouter(replica.stub.Attach(metadata=bearer("any")))
        await router.send(hello=hello())
        await router.read_until(lambda: bool(router.of("welcome")))
