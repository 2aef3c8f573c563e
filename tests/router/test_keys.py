"""API keys: what a key file may hold, who gets in on both ports, and what a changed file does to a running server."""

import asyncio
import logging
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.proto.errors import StartupError, Unauthenticated
from paceline.router import keyring
from paceline.router.auth import OPENABLE, Guard
from paceline.router.config import RouterConfig
from paceline.router.keyring import Keyring
from paceline.router.keys import NOBODY, entry_of, fresh, hash_of, parse_keys
from paceline.router.limits import Gate
from paceline.router.rest import make_app
from paceline.router.rpc_server import SERVICES
from tests.e2e.server import free_port
from tests.fakes import FakeReplica
from tests.router.conftest import running_router, until
from tests.router.fronts import channel_to, details_of
from tests.router.rpc_client import drain, grpc_router, streamed, whole

ALICE, BOB = "pl-alice", "pl-bob"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def entries(*keys: str) -> str:
    return "".join(entry_of(key, tenant=key.removeprefix("pl-")) for key in keys) or "[]\n"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(entries(ALICE, BOB))
    return path


# -- the file ----------------------------------------------------------------------------------------------------------


def test_an_entry_says_what_its_key_stands_for():
    made = entry_of("pl-x", "acme: a & b", priority=-2, cache_salt="shared") + entries(ALICE)
    keys = parse_keys(made, "keys.yaml")
    assert "pl-x" not in made
    key = keys[hash_of("pl-x")]
    assert (key.tenant, key.best_priority, key.salt) == ("acme: a & b", -2, "shared")


def test_keys_share_cached_prompts_only_with_the_same_salt():
    text = entries(ALICE, BOB) + entry_of("pl-1", "t", cache_salt="s") + entry_of("pl-2", "u", cache_salt="s")
    salts = [key.salt for key in parse_keys(text, "keys.yaml").values()]
    assert all(salts)
    assert len({*salts}) == 3


def test_an_empty_list_lets_nobody_in_and_an_empty_file_is_a_mistake():
    assert parse_keys("[]", "keys.yaml") == {}
    with pytest.raises(StartupError, match="list"):
        parse_keys("", "keys.yaml")


GOOD = f"- sha256: {hash_of(ALICE)}\n  tenant: alice\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ["line 1", "YAML"]),
        ("sha256: x", ["list"]),
        ("- pl-secret", ["line 1", "sha256"]),
        (GOOD + "- tenant: secret\n", ["line 3", "sha256 is missing"]),
        (GOOD + f"- sha256: {hash_of(BOB)}\n", ["line 3", "tenant is missing"]),
        (GOOD + "- sha256: pl-secret\n  tenant: bob\n", ["line 3", "sha256", "64"]),
        (GOOD + "- tenant: bob\n  sha256: [secret]\n", ["line 4", "sha256"]),
        (GOOD + "- tenant: bob\n  key: pl-secret\n", ["line 4", "sha256, tenant, priority, cache_salt"]),
        (GOOD + "  priority: secret\n", ["line 3", "priority", "whole"]),
        (GOOD + "  priority: 1.5\n", ["line 3", "priority"]),
        (GOOD + "  priority: 9999999999\n", ["line 3", "priority"]),
        (GOOD + "  cache_salt:\n", ["line 3", "cache_salt"]),
        (GOOD + f"  cache_salt: {'secret' * 30}\n", ["line 3", "cache_salt"]),
        (GOOD + "  tenant: secret\n", ["line 3", "tenant", "twice"]),
        (GOOD + GOOD, ["line 3", "twice"]),
        ("- &a [*a]\n", ["line 1"]),
        ("- *secret\n", ["line 1"]),
        ("- !!python/object:os.system {}\n", ["line 1"]),
    ],
)
def test_a_wrong_file_names_line_and_field_and_never_what_stands_there(tmp_path, text, words):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(StartupError) as raised:
        Keyring(str(path))
    assert all(word in str(raised.value) for word in [*words, "--api-key-file"])
    assert "secret" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(StartupError, match=r"--api-key-file .* cannot be read"):
        Keyring(str(tmp_path / "none.yaml"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="UTF-8"):
        Keyring(str(tmp_path / "binary"))


def test_fresh_keys_differ_and_are_long():
    keys = {fresh() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("pl-") and len(key) == 46 for key in keys)


# -- reloading ---------------------------------------------------------------------------------------------------------


def test_a_broken_file_changes_nothing_and_is_told_once(file, caplog):
    ring = Keyring(str(file))
    for broken in ("- sha256: 1", ""):
        caplog.clear()
        file.write_text(broken)
        ring.look()
        ring.look()
        assert ring.find(ALICE)
        [record] = caplog.records
        assert record.levelno == logging.ERROR
        assert "stay in force" in record.message
    caplog.clear()
    file.unlink()
    ring.look()
    ring.look()
    assert ring.find(ALICE)
    assert len(caplog.records) == 1
    file.write_text(entries(BOB))
    ring.look()
    assert ring.find(BOB)
    assert not ring.find(ALICE)


def test_a_link_that_is_swapped_on_the_way_is_seen(tmp_path):
    """As Kubernetes does it: keys.yaml -> ..data/keys.yaml, ..data -> a folder with a date."""
    for folder, key in (("..old", ALICE), ("..new", BOB)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keys.yaml").write_text(entries(key))
        os.utime(tmp_path / folder / "keys.yaml", ns=(1, 1))
    (tmp_path / "..data").symlink_to("..old")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    ring = Keyring(str(tmp_path / "keys.yaml"))
    assert ring.find(ALICE)
    (tmp_path / "..tmp").symlink_to("..new")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    ring.look()
    assert ring.find(BOB)
    assert not ring.find(ALICE)


@pytest.fixture
def often(monkeypatch):
    """The file is looked at all the time."""
    monkeypatch.setattr(keyring, "LOOK", 0.01)


async def test_a_removed_key_is_refused_without_a_restart_and_its_stream_goes_on(file, often):
    async with FakeReplica(hold=True) as fake, running_router(fake.address, wait=False, api_key_file=str(file)) as http:
        await until(lambda: gets_in(http, ALICE))
        stream = http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=bearer(ALICE))
        running = asyncio.create_task(stream)
        await until(lambda: fake.submissions)
        file.write_text(entries(BOB))
        await until(lambda: refused(http, ALICE))
        assert await gets_in(http, BOB)
        fake.release()
        assert (await running).text.endswith("data: [DONE]\n\n")
        file.write_text(entries(ALICE))
        await until(lambda: gets_in(http, ALICE))
        assert await refused(http, BOB)


async def gets_in(http: httpx.AsyncClient, key: str) -> bool:
    """And a replica is there."""
    return (await http.get("/health/ready", headers=bearer(key))).status_code == 200


async def refused(http: httpx.AsyncClient, key: str) -> bool:
    return (await http.get("/health/ready", headers=bearer(key))).status_code == 401


# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x", f"Bearer{ALICE}", "Bearer ÿ"]
)
def test_what_is_no_good_key_gets_in_nowhere_but_at_liveness(file, header):
    guard = Guard(Keyring(str(file)))
    assert guard.admit("/health/live", header) == NOBODY
    for route in ("/health/ready", "/metrics", "/v1/models", "/nowhere", "", "/health/live/"):
        with pytest.raises(Unauthenticated) as raised:
            guard.admit(route, header)
        assert "pl-" not in raised.value.message


def test_the_scheme_is_read_in_any_case(file):
    guard = Guard(Keyring(str(file)))
    assert {guard.admit("/v1/models", f"{scheme} {ALICE}").tenant for scheme in ("Bearer", "bearer", "BEARER ")} == {
        "alice"
    }


def test_an_open_route_knows_who_shows_a_key_and_takes_all_others(file):
    guard = Guard(Keyring(str(file)), ["/metrics"])
    assert guard.admit("/metrics", f"Bearer {BOB}").tenant == "bob"
    assert guard.admit("/metrics", "Bearer wrong") == guard.admit("/metrics", None) == NOBODY
    with pytest.raises(Unauthenticated):
        guard.admit("/health/ready", None)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/models", "/metric", "metrics", "/tokenize"])
def test_what_may_not_be_opened_ends_the_start(route):
    with pytest.raises(StartupError, match="--open-routes may name /health/ready, /metrics"):
        Guard(None, [route])


def routes() -> list[tuple[str, str]]:
    """(method, path) of all that the app serves."""
    app = make_app(SimpleNamespace(gate=Gate()), None, None, Guard(None), RouterConfig())
    return [(method, route.path) for route in app.routes for method in sorted(route.methods)]


def test_every_route_that_may_be_opened_is_one():
    paths = {path for _, path in routes()}
    assert {"/health/live", "/v1/completions", *OPENABLE} <= paths


# -- HTTP --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def guarded(file, **settings):
    """The fake replica and a client without a key, once the router would serve one with a key."""
    async with (
        FakeReplica() as fake,
        running_router(fake.address, wait=False, api_key_file=str(file), **settings) as it,
    ):
        await until(lambda: gets_in(it, ALICE))
        yield fake, it


async def test_without_a_key_every_route_but_liveness_is_401(file, caplog):
    caplog.set_level(logging.DEBUG)
    async with guarded(file) as (fake, http):
        made_up = [("GET", "/nowhere"), ("GET", "/"), ("OPTIONS", "/v1/models"), ("DELETE", "/v1/completions")]
        for method, path in [*routes(), *made_up]:
            for headers in ({}, bearer("pl-wrong"), {"Authorization": ALICE}, {"X-Api-Key": ALICE}):
                answer = await http.request(method, path, headers=headers | {"X-Request-Id": "mine"})
                if path == "/health/live":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"] == "mine"
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert not fake.submissions
    assert "pl-" not in caplog.text


async def test_two_keys_work_and_reach_the_replica_as_tenants(file):
    async with guarded(file) as (fake, http):
        for key in (ALICE, BOB):
            body = {"prompt": "x", "user": "someone", "tenant": "someone"}
            assert (await http.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
            assert fake.submissions[-1].tenant == key.removeprefix("pl-")
        assert (await http.get("/v1/models", headers=bearer(BOB))).status_code == 200
        assert (await http.get("/nowhere", headers=bearer(BOB))).status_code == 404


async def test_a_key_sets_priority_and_whose_cached_prompts_are_read_on_both_fronts(file):
    file.write_text(
        entries(ALICE)
        + entry_of("pl-low", "low", priority=3, cache_salt="shared")
        + entry_of("pl-free", "free", cache_salt="shared")
    )
    settings = {"api_key_file": str(file), "open_routes": ("/health/ready",), "grpc_port": free_port()}
    async with FakeReplica() as fake, running_router(fake.address, **settings) as http:
        seen = {}
        for key in (ALICE, "pl-low", "pl-free"):
            answer = await http.post("/v1/completions", json={"prompt": [5] * 40}, headers=bearer(key))
            assert answer.status_code == 200
            seen[key] = fake.submissions[-1]
        assert [request.priority for request in seen.values()] == [0, 3, 0]
        assert seen["pl-low"].block_hashes == seen["pl-free"].block_hashes != seen[ALICE].block_hashes
        refused = await http.post("/v1/completions", json={"prompt": "x", "priority": 2}, headers=bearer("pl-low"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
        async with channel_to(settings["grpc_port"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Generate(whole(priority=2), metadata=metadata("pl-low"))
            assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
            await stub.Generate(whole(priority=4), metadata=metadata("pl-low"))
            assert fake.submissions[-1].priority == 4


async def test_open_routes_need_no_key_and_others_still_do(file):
    async with guarded(file, open_routes=("/health/ready", "/metrics")) as (_, http):
        assert (await http.get("/health/ready")).status_code == 200
        assert (await http.get("/metrics", headers=bearer("pl-wrong"))).status_code == 200
        assert (await http.get("/version")).status_code == 401


async def test_a_key_is_asked_for_before_a_body_is_read(file):
    async with guarded(file) as (_, http):
        host = http.base_url
        reader, writer = await asyncio.open_connection(host.host, host.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 401")
        writer.close()


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0", "keys": True}, False),
    ],
)
async def test_a_server_that_everybody_reaches_and_nobody_guards_says_so(file, settings, warned, caplog):
    if settings.pop("keys", False):
        settings["api_key_file"] = str(file)
    async with running_router(wait=False, **settings):
        assert ("no --api-key-file" in caplog.text) == warned


# -- gRPC --------------------------------------------------------------------------------------------------------------


def metadata(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def calls(channel: grpc.aio.Channel, names: list[str], **more):
    """Each method of each service, one that does not exist, health of each name, and reflection."""
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            yield f"{service.full_name}/{method.name}", kind(f"/{service.full_name}/{method.name}")(b"", **more)
    yield "unknown", channel.unary_unary("/nobody.Service/Nothing")(b"", **more)
    health = health_pb2_grpc.HealthStub(channel)
    for name in names:
        yield f"check {name}", health.Check(health_pb2.HealthCheckRequest(service=name), **more)
    yield "watch", health.Watch(health_pb2.HealthCheckRequest(service=""), **more)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    yield "reflection", reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()]), **more)


async def code_of(call) -> grpc.StatusCode:
    """A stream that says anything is OK: not all of them end."""
    if not isinstance(call, grpc.aio.UnaryUnaryCall):
        with suppress(grpc.aio.AioRpcError):
            if await call.read() is not grpc.aio.EOF:
                call.cancel()
                return grpc.StatusCode.OK
    return await call.code()


async def test_without_a_key_every_method_but_liveness_is_unauthenticated(file, caplog):
    caplog.set_level(logging.DEBUG)
    settings = {"api_key_file": str(file), "grpc_reflection": True, "wait": False}
    async with FakeReplica() as fake, grpc_router(running_router, fake.address, **settings) as (_, _, channel):
        for shown in ([], metadata("pl-wrong"), [("x-api-key", ALICE)], [("authorization", ALICE)]):
            for name, call in calls(channel, [*SERVICES, "nobody"], metadata=shown):
                assert await code_of(call) == grpc.StatusCode.UNAUTHENTICATED, name
            live = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), metadata=shown)
            assert live.status == health_pb2.HealthCheckResponse.SERVING
        assert not fake.submissions
        opened = {name: await code_of(call) for name, call in calls(channel, [*SERVICES], metadata=metadata(ALICE))}
        assert grpc.StatusCode.UNAUTHENTICATED not in opened.values()
        assert opened["unknown"] == grpc.StatusCode.UNIMPLEMENTED
        assert opened["reflection"] == opened["watch"] == grpc.StatusCode.OK
    assert "pl-" not in caplog.text


async def test_a_refusal_has_the_same_words_as_over_http_and_an_id(file):
    settings = {"api_key_file": str(file), "wait": False}
    async with FakeReplica() as fake, grpc_router(running_router, fake.address, **settings) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole(), metadata=[("x-request-id", "mine")])
        assert details_of(raised.value)["ErrorInfo"].reason == "invalid_api_key"
        assert ("x-request-id", "mine") in [*raised.value.trailing_metadata()]


async def test_opening_readiness_opens_health_of_every_name_and_nothing_else(file):
    settings = {"api_key_file": str(file), "open_routes": ("/health/ready",)}
    async with FakeReplica() as fake, grpc_router(running_router, fake.address, **settings) as (stub, _, channel):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVICES):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
        assert (await health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0])).read()).status
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(whole())
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_serves_calls_and_names_the_tenant(file):
    settings = {"api_key_file": str(file), "open_routes": ("/health/ready",)}
    async with FakeReplica() as fake, grpc_router(running_router, fake.address, **settings) as (stub, _, _):
        assert (await stub.Generate(whole(), metadata=metadata(ALICE))).choices[0].text == "Hello world."
        await drain(stub.StreamGenerate(streamed(), metadata=metadata(BOB)))
        assert [request.tenant for request in fake.submissions] == ["alice", "bob"]


async def test_a_key_that_went_while_its_stream_runs_takes_no_new_call(file, often):
    settings = {"api_key_file": str(file), "open_routes": ("/health/ready",)}
    async with FakeReplica(hold=True) as fake, grpc_router(running_router, fake.address, **settings) as (stub, _, _):
        running = stub.StreamGenerate(streamed(), metadata=metadata(ALICE))
        await until(lambda: fake.submissions)
        file.write_text(entries(BOB))

        async def is_refused() -> bool:
            call = stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata(ALICE))
            return await call.code() == grpc.StatusCode.UNAUTHENTICATED

        await until(is_refused)
        fake.release()
        await drain(running)
        assert await running.code() == grpc.StatusCode.OK
