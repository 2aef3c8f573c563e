"""The gRPC port: health, limits, keepalive, TLS, reflection."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.proto.errors import StartupError
from paceline.router.app import serve_router
from paceline.router.config import RouterConfig
from paceline.router.rpc_server import SERVICES, options
from tests.e2e.server import free_port
from tests.fakes import FakeReplica
from tests.router.conftest import until
from tests.router.fronts import channel_to, details_of
from tests.router.rpc_client import grpc_router, read_all, streamed, whole

GRPCURL = str(Path(sys.executable).with_name("grpcurl"))
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# -- health ------------------------------------------------------------------------------------------------------------


async def test_health_follows_the_replica_and_liveness_does_not(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (_, _, channel):
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

        async def all_are(wanted: int) -> bool:
            return [await status(name) for name in SERVICES] == [wanted] * len(SERVICES)

        assert set(SERVICES) == {"paceline.inference.v1.InferenceService", "paceline.inference.v1.ModelService"}
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        await until(lambda: all_are(SERVING))
        while (await watch.read()).status != SERVING:
            pass
        await fake.stop()
        assert (await watch.read()).status == NOT_SERVING
        assert await all_are(NOT_SERVING)
        assert await status("") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await status("nobody")
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_draining_ends_what_runs_refuses_what_is_new_and_tells_health_first():
    port, stop = free_port(), asyncio.Event()
    async with FakeReplica(delay=0.02) as fake, channel_to(port) as channel:
        config = RouterConfig(port=0, grpc_port=port, replicas=(fake.address,), drain_seconds=5)
        serving = asyncio.create_task(serve_router(config, stop=stop))
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), wait_for_ready=True)
        while (await watch.read()).status != SERVING:
            pass
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        some = pb.Sampling(ignore_eos=True, max_tokens=40)
        told: list[pb.StreamGenerateResponse] = []
        running = asyncio.create_task(read_all(stub.StreamGenerate(streamed(sampling=some)), told))
        await until(lambda: fake.running)
        stop.set()
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole())
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert details_of(raised.value)["ErrorInfo"].reason == "draining"
        await running
        assert told[-1].usage.completion_tokens == 40
        await asyncio.wait_for(serving, 5)


# -- transport ---------------------------------------------------------------------------------------------------------


async def test_a_large_message_is_refused_and_the_channel_lives(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address, grpc_max_message_bytes=100_000) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole("x" * 200_000))
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Generate(whole())).choices[0].text == "Hello world."


async def test_metadata_is_bounded_and_the_channel_lives(router):
    more = [("grpc.max_metadata_size", 1 << 20), ("grpc.absolute_max_metadata_size", 1 << 20)]
    async with FakeReplica() as fake, grpc_router(router, fake.address, more=more) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(), metadata=[("x-much", "x" * 100_000)])
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Generate(whole())).choices[0].text == "Hello world."


def test_the_options_have_the_names_that_the_library_reads():
    given = dict(options(RouterConfig()))
    core = Path(grpc.__file__).parent.joinpath("_cython").glob("cygrpc*.so")
    binary = next(iter(core)).read_bytes()
    assert all(name.encode() in binary for name in given)
    assert given["grpc.http2.max_ping_strikes"] == 0
    assert given["grpc.max_receive_message_length"] == given["grpc.max_send_message_length"] == 64 << 20


async def test_a_silent_call_survives_pings(router):
    """The same as a minute with a ping each 10 s: without our options the third ping ends the connection."""
    pings = [
        ("grpc.keepalive_time_ms", 500),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with FakeReplica(hold=True) as fake, grpc_router(router, fake.address, more=pings) as (stub, _, _):
        call = asyncio.ensure_future(stub.Generate(whole()))
        await asyncio.sleep(5)
        assert not call.done()
        fake.release()
        assert (await call).choices[0].text == "Hello world."


async def test_a_port_that_is_taken_is_one_sentence(router):
    port = free_port()
    async with FakeReplica() as fake, router(fake.address, grpc_port=port):
        with pytest.raises(StartupError, match="gRPC"):
            async with router(fake.address, grpc_port=port):
                pass


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    """An authority, and what it signed for a server and a client: ca.pem, and each .pem and .key."""
    folder, authority = tmp_path_factory.mktemp("pki"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("server", "client"):
        signed = authority.issue_cert("localhost", "127.0.0.1", common_name=name)
        signed.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        signed.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return folder


@asynccontextmanager
async def tls_router(replica: str, pki: Path, **more: str):
    """A router that speaks TLS: HTTP port and gRPC port."""
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    port = free_port()
    config = RouterConfig(
        port=0,
        grpc_port=port,
        replicas=(replica,),
        ssl_certfile=str(pki / "server.pem"),
        ssl_keyfile=str(pki / "server.key"),
        **more,
    )
    serving = asyncio.create_task(serve_router(config, ready=url.set_result, stop=stop))
    try:
        yield await asyncio.wait_for(url, 10), port
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)


async def test_tls_on_both_fronts(pki):
    ca = (pki / "ca.pem").read_bytes()
    async with FakeReplica() as fake, tls_router(fake.address, pki) as (url, port):
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, verify=_ssl(pki)) as http:
            await until(lambda: _ready(http))
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        async with channel_to(port, credentials=grpc.ssl_channel_credentials(ca)) as channel:
            answer = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(whole())
            assert answer.choices[0].text == "Hello world."


async def test_mutual_tls_takes_only_clients_that_the_authority_knows(pki):
    ca = (pki / "ca.pem").read_bytes()
    client = (pki / "client.key").read_bytes(), (pki / "client.pem").read_bytes()
    async with FakeReplica() as fake, tls_router(fake.address, pki, ssl_ca_certs=str(pki / "ca.pem")) as (url, port):
        async with httpx.AsyncClient(base_url=url, verify=_ssl(pki, "client")) as http:
            await until(lambda: _ready(http))
        async with httpx.AsyncClient(base_url=url, verify=_ssl(pki)) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/health/live")
        async with channel_to(port, credentials=grpc.ssl_channel_credentials(ca, *client)) as channel:
            answer = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(whole())
            assert answer.choices[0].text == "Hello world."
        async with channel_to(port, credentials=grpc.ssl_channel_credentials(ca)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceServiceStub(channel).Generate(whole(), timeout=3)


@pytest.mark.parametrize("files", [{"ssl_certfile": "nowhere.pem"}, {"ssl_ca_certs": "nowhere.pem"}])
async def test_a_bad_certificate_is_one_sentence(router, files):
    with pytest.raises(StartupError, match="certificate"):
        async with router(wait=False, grpc_port=0, **files):
            pass


def _ssl(pki: Path, own: str | None = None):
    import ssl

    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    if own:
        context.load_cert_chain(pki / f"{own}.pem", pki / f"{own}.key")
    return context


async def _ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/health/ready")).status_code == 200


# -- grpcurl -----------------------------------------------------------------------------------------------------------


async def grpcurl(*arguments: str, ok: bool = True) -> str:
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out = (await asyncio.wait_for(process.communicate(), 10))[0].decode()
    assert (process.returncode == 0) == ok, out
    return out


async def test_grpcurl_finds_its_way_by_reflection(router):
    async with (
        FakeReplica(num_cached=1) as fake,
        grpc_router(router, fake.address, grpc_reflection=True) as (_, port, _),
    ):
        address, service = f"localhost:{port}", "paceline.inference.v1.InferenceService"
        listed = (await grpcurl(address, "list")).split()
        assert {*SERVICES, "grpc.health.v1.Health"} <= set(listed)
        assert "StreamGenerate" in await grpcurl(address, "describe", service)
        body = json.dumps({"spec": {"text": "hello", "sampling": {"temperature": 0, "logitBias": {"5": 1}}}})
        answer = json.loads(await grpcurl("-d", body, address, f"{service}/Generate"))
        assert answer["choices"][0]["text"] == "Hello world."
        assert answer["choices"][0]["finish"] == {"reason": "FINISH_REASON_STOP"}
        chat = json.dumps({"spec": {"messages": {"messages": [{"role": "user", "content": "hi"}]}}})
        stream = await grpcurl("-d", chat, address, f"{service}/StreamGenerate")
        assert '"usage"' in stream
        wrong = '{"spec":{"text":"x","sampling":{"n":0}}}'
        assert "n must be at least 1" in await grpcurl("-d", wrong, address, f"{service}/Generate", ok=False)
        name = json.dumps({"service": service})
        assert "SERVING" in await grpcurl("-d", name, address, "grpc.health.v1.Health/Check")


async def test_without_the_flag_nothing_is_reflected(router):
    async with FakeReplica() as fake, grpc_router(router, fake.address) as (_, port, _):
        assert "reflection" in await grpcurl(f"localhost:{port}", "list", ok=False)
