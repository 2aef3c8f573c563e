"""A router that is asked to stop: nothing new, what runs goes on for a while, then an error event; and it returns."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx

from paceline.router.app import serve_router
from paceline.router.config import RouterConfig
from tests.fakes import FakeReplica
from tests.router.conftest import ready, until

ENDLESS = {"prompt": "x", "stream": True, "ignore_eos": True}


class Stopping:
    def __init__(self, serving, stop, now, http):
        self.serving, self.stop, self.now, self.http = serving, stop, now, http


@asynccontextmanager
async def stoppable(*replicas, **settings):
    stop, now, url = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    config = RouterConfig(port=0, replicas=replicas, **settings)
    serving = asyncio.create_task(serve_router(config, ready=url.set_result, stop=stop, now=now))
    try:
        async with httpx.AsyncClient(base_url=await url, timeout=20) as http:
            await until(lambda: ready(http))
            yield Stopping(serving, stop, now, http)
    finally:
        stop.set()
        now.set()
        await asyncio.wait_for(serving, 10)


async def test_ready_turns_at_once_and_nothing_new_is_taken_while_one_runs_to_its_end():
    async with FakeReplica(text="one two three four five", delay=0.05) as fake, stoppable(fake.address) as it:
        running = asyncio.create_task(it.http.post("/v1/completions", json={"prompt": "x", "stream": True}))
        await until(lambda: fake.running)
        it.stop.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer = await it.http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "draining", "open": 1}
        assert answer.headers["connection"] == "close"
        assert (await it.http.get("/health/live")).status_code == 200
        refused = await it.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        ended = await running
        assert ended.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in ended.text
        await asyncio.wait_for(it.serving, 20)
        assert len(fake.submissions) == 1


async def test_what_waits_for_its_turn_is_served_too():
    async with FakeReplica(hold=True) as fake, stoppable(fake.address) as it:
        waiting = asyncio.create_task(it.http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: fake.submissions)
        it.stop.set()
        await asyncio.sleep(0.1)
        fake.release()
        assert (await waiting).status_code == 200
        await asyncio.wait_for(it.serving, 20)


async def test_past_its_time_a_stream_gets_one_error_event_and_no_done():
    async with FakeReplica(delay=0.01) as fake, stoppable(fake.address, drain_seconds=0.3) as it:
        running = asyncio.create_task(it.http.post("/v1/completions", json=ENDLESS))
        whole = asyncio.create_task(it.http.post("/v1/completions", json={"prompt": "x", "ignore_eos": True}))
        await until(lambda: len(fake.running) == 2)
        began = time.monotonic()
        it.stop.set()
        events = (await running).text.strip().split("\n\n")
        assert json.loads(events[-1][6:])["error"]["code"] == "draining"
        assert sum('"error"' in event for event in events) == 1
        assert "data: [DONE]" not in events
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await asyncio.wait_for(it.serving, 20)
        assert time.monotonic() - began >= 0.3


async def test_now_does_not_wait():
    async with FakeReplica(delay=0.01) as fake, stoppable(fake.address, drain_seconds=60) as it:
        running = asyncio.create_task(it.http.post("/v1/completions", json=ENDLESS))
        await until(lambda: fake.running)
        it.stop.set()
        await asyncio.sleep(0.1)
        assert not it.serving.done()
        it.now.set()
        await asyncio.wait_for(it.serving, 20)
        assert '"code":"draining"' in (await running).text


async def test_with_nothing_open_it_ends_at_once():
    async with FakeReplica() as fake, stoppable(fake.address, drain_seconds=60) as it:
        assert (await it.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        it.stop.set()
        await asyncio.wait_for(it.serving, 20)
