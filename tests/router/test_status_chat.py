"""`paceline chat` and `paceline status` as processes, against a router in front of fake replicas."""

import asyncio
import sys
from pathlib import Path

import pytest

from paceline.proto.load import RankMemory, ReplicaLoad
from tests.fakes import FakeReplica
from tests.router.conftest import running_router, until

PACELINE = str(Path(sys.executable).with_name("paceline"))


async def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        PACELINE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
    return process.returncode or 0, out.decode(), err.decode()


def address_of(client) -> str:
    return str(client.base_url).rstrip("/")


async def test_chat_streams_answers_and_remembers_what_was_said():
    async with FakeReplica(text="Hello there.") as replica, running_router(replica.address) as client:
        code, out, err = await run(
            "chat", "--url", address_of(client), "--system", "Be brief", stdin="hi\nand you\n/quit\n"
        )
        assert code == 0
        assert out.splitlines() == ["Hello there.", "Hello there."]
        assert "tiny" in err
        first, second = (len(request.prompt_ids) for request in replica.submissions)
        assert second > first + 10


async def test_reset_forgets_all_but_the_system_prompt():
    async with FakeReplica(text="Yes.") as replica, running_router(replica.address) as client:
        await run("chat", "--url", address_of(client), "--system", "Be brief", stdin="hi\n/reset\nhi\n")
        first, second = (request.prompt_ids for request in replica.submissions)
        assert first == second


async def test_what_the_server_refuses_is_told_and_the_chat_goes_on():
    async with FakeReplica(text="Yes.") as replica, running_router(replica.address) as client:
        flags = ["--url", address_of(client), "--max-tokens", "20"]
        code, out, err = await run("chat", *flags, stdin="word " * 400 + "\nhi\n")
        assert code == 0
        assert "context" in err
        assert out.split() == ["Yes."]


async def test_a_broken_stream_is_told_and_not_an_answer_that_ended():
    async with FakeReplica(text="one two three four", die_at=3) as replica, running_router(replica.address) as client:
        code, _, err = await run("chat", "--url", address_of(client), stdin="hi\n")
        assert code == 0
        assert "lost" in err


@pytest.mark.parametrize("command", ["chat", "status"])
async def test_a_server_that_is_not_there_is_one_sentence(command):
    code, out, err = await run(command, "--url", "http://127.0.0.1:9")
    assert code == 1
    assert out == ""
    assert err.startswith("paceline: no paceline answers at http://127.0.0.1:9")
    assert "Traceback" not in err


async def test_status_once_prints_a_line_per_replica_that_scripts_can_cut():
    load = ReplicaLoad(running=3, waiting=2, blocks_used=40, blocks_total=100)
    ranks = tuple(
        RankMemory(rank=i, weight_bytes=size << 20, kv_bytes=5 << 19, kv_bytes_per_token=64)
        for i, size in enumerate((60, 60, 65))
    )
    async with (
        FakeReplica(replica_id="replica-0", load=load, ranks=ranks) as one,
        FakeReplica(replica_id="replica-1") as two,
        running_router(one.address, two.address) as client,
    ):

        async def both_heard() -> bool:
            text = (await client.get("/metrics")).text
            return 'replica_id="replica-1"' in text and "requests_running{" in text and "} 3.0" in text

        await until(both_heard)
        code, out, _ = await run("status", "--url", address_of(client), "--once")
    assert code == 0
    heading, *rows = [line.split("\t") for line in out.splitlines()]
    table = {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    assert table.keys() == {"replica-0", "replica-1"}
    seen = table["replica-0"]
    assert (seen["state"], seen["running"], seen["waiting"]) == ("ready", "3", "2")
    assert (seen["kv_used"], seen["kv_total"]) == ("40", "100")
    assert (seen["weights_mib"], seen["kv_mib"]) == ("2 x 60.0 + 65.0", "3 x 2.5")
    assert (table["replica-1"]["weights_mib"], table["replica-1"]["kv_mib"]) == ("-", "-")
