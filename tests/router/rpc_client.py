"""Small words for tests that speak gRPC to a router."""

from contextlib import asynccontextmanager

import grpc.aio

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from tests.e2e.server import free_port
from tests.router.fronts import channel_to

ENDLESS = pb.Sampling(ignore_eos=True, max_tokens=200)


@asynccontextmanager
async def grpc_router(router, *replicas: str, more=(), **settings):
    """The stub, the port and the channel of a router on a free port."""
    port = free_port()
    async with router(*replicas, grpc_port=port, **settings), channel_to(port, *more) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel), port, channel


def whole(text: str = "x", **more) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=pb.GenerationSpec(text=text, **more))


def streamed(text: str = "x", **more) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(spec=pb.GenerationSpec(text=text, **more))


async def read_all(stream, told: list) -> None:
    async for message in stream:
        told.append(message)


async def drain(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
