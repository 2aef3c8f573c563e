"""Lines for people and for machines, with the request's id, and never what a user wrote."""

import asyncio
import io
import json
import logging

import httpx
import pytest

from paceline.proto import logs
from tests.fakes import FakeReplica
from tests.router.conftest import running_router, until


class Lines:
    """Everything that was logged, as text."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.configure("json", "info")

    def configure(self, *how: str) -> None:
        logs.configure(*how)
        logging.getLogger().handlers[0].setStream(self.text)  # type: ignore[attr-defined]

    def __call__(self) -> list[dict]:
        return [json.loads(line) for line in self.text.getvalue().splitlines()]


@pytest.fixture
def lines():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield Lines()
    root.handlers[:] = before
    root.setLevel(level)


def test_a_json_line_holds_time_level_logger_message_and_fields(lines):
    logging.getLogger("paceline.x").info("hello %s", "there", extra={"fields": {"ms": 3.5}})
    [line] = lines()
    assert line["message"] == "hello there"
    assert (line["level"], line["logger"], line["ms"]) == ("info", "paceline.x", 3.5)
    assert line["time"].endswith("+00:00")


def test_fields_of_a_process_are_on_every_line(lines):
    logs.configure("json", "info", rank=3)
    logging.getLogger().handlers[0].setStream(lines.text)
    logging.getLogger("paceline").info("loaded", extra={"fields": {"ms": 2}})
    logging.getLogger("paceline").info("ready")
    assert [(line["rank"], line.get("ms")) for line in lines()] == [(3, 2), (3, None)]


def test_an_exception_stays_on_its_line(lines):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("paceline").exception("it failed")
    [line] = lines()
    assert "ValueError: broken" in line["exception"]


def test_a_bound_id_is_on_the_lines_of_its_context_and_of_no_other(lines):
    log = logging.getLogger("paceline")

    async def request(name):
        logs.bind(name)
        await asyncio.sleep(0)
        await asyncio.create_task(step(name))

    async def step(name):
        log.info("of %s", name)

    async def both():
        await asyncio.gather(request("a"), request("b"))
        log.info("of none")

    asyncio.run(both())
    seen = {line["message"]: line.get("request_id") for line in lines()}
    assert seen == {"of a": "a", "of b": "b", "of none": None}


def test_the_console_shows_fields_and_id_after_the_message(lines):
    lines.configure("console", "info")
    token = logs.bind("req-1")
    logging.getLogger("paceline.access").info("POST /x", extra={"fields": {"status": 200}})
    logs.unbind(token)
    assert lines.text.getvalue().strip().endswith("POST /x request_id=req-1 status=200")


def test_a_level_leaves_the_lower_ones_out(lines):
    lines.configure("json", "warning")
    logging.getLogger("paceline").info("quiet")
    logging.getLogger("paceline").warning("loud")
    assert [line["message"] for line in lines()] == ["loud"]


def accessed(lines) -> list[dict]:
    return [line for line in lines() if line["logger"] == "paceline.access"]


SECRET = "tell nobody of the blue heron"


@pytest.mark.parametrize("stream", [True, False])
async def test_one_access_line_per_request_with_its_numbers_and_never_the_prompt(lines, stream):
    async with FakeReplica(text="Hello world.") as replica, running_router(replica.address) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        assert answer.status_code == 200
        assert answer.text
    seen = lines()
    [line] = accessed(lines)
    assert line["request_id"] == "mine-1"
    assert line["status"] == 200
    assert line["ms"] > 0
    assert line["prompt_tokens"] > 5
    assert line["completion_tokens"] > 1
    assert "heron" not in json.dumps(seen)
    assert "Hello world" not in json.dumps(seen)


async def test_refusals_have_an_access_line_and_probes_have_none(lines):
    async with FakeReplica() as replica, running_router(replica.address) as client:
        await client.post("/v1/completions", content=b"{")
        await client.get("/metrics")
        await client.get("/nowhere/" + "heron")
    routes = [(line["route"], line["status"]) for line in accessed(lines)]
    assert routes == [("/v1/completions", 400), ("other", 404)]


async def test_a_client_that_leaves_is_a_499(lines):
    async with FakeReplica(hold=True) as replica, running_router(replica.address) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=0.3)

        await until(lambda: accessed(lines))
    assert [line["status"] for line in accessed(lines)] == [499]
