"""Clients that ask for a stream and do not read it, over real sockets; and what waits for them meanwhile."""

import asyncio
import json
import socket
import time

import pytest

from paceline.proto.request import TokenDelta, TokenLogprobs
from paceline.router.mailbox import HARD, Mailbox
from tests.fakes import FakeReplica, tiny_card
from tests.router.conftest import until

SETTINGS = {"slow_reader_seconds": 0.5, "max_unread_bytes": 65536, "max_unread_tokens": 100}
CARD = tiny_card(max_model_len=1_000_000)
# With log probabilities the buffers before the mailbox fill at once, long before the kernel gives the connection up.
BODY = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, "logprobs": 5}).encode()


def connect(url) -> socket.socket:
    """A client whose own buffer is small: what it leaves lying stays on the server's side."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((url.host, url.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
    return client


async def test_a_stream_that_nobody_reads_is_cancelled_and_its_neighbour_is_not(router, caplog):
    async with FakeReplica(card=CARD, delay=0.002, per_frame=4) as fake, router(fake.address, **SETTINGS) as http:
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 3000}
        neighbour = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: len(fake.running) == 1)
        client = await asyncio.to_thread(connect, http.base_url)
        began = time.monotonic()
        await until(lambda: len(fake.cancels) == 1, timeout=8)
        assert time.monotonic() - began >= 0.5
        await until(lambda: "does not read" in caplog.text)
        said = [record.message for record in caplog.records if "does not read" in record.message]
        assert len(said) == 1
        assert said[0].startswith("request req-")
        assert not [record for record in caplog.records if "ASGI" in record.message]
        assert (await neighbour).text.endswith("data: [DONE]\n\n")
        assert 'paceline_router_shed_total{reason="cancelled"} 1.0' in (await http.get("/metrics")).text
        assert "paceline_router_open_choices 0.0" in (await http.get("/metrics")).text
        client.close()


async def test_a_reader_that_pauses_and_goes_on_gets_everything(router):
    async with FakeReplica(delay=0.001, per_frame=4) as fake, router(fake.address, **SETTINGS) as http:
        client = await asyncio.to_thread(connect, http.base_url)
        await asyncio.sleep(0.3)
        client.setblocking(False)
        loop, got = asyncio.get_running_loop(), 0
        for _ in range(3):
            while got < 200_000:
                got += len(await loop.sock_recv(client, 65536))
            got = 0
            await asyncio.sleep(0.2)
        assert fake.cancels == []
        client.close()
        await until(lambda: fake.cancels)


# -- the mailbox -------------------------------------------------------------------------------------------------------


def delta(num_ids: int, num_tops: int | None = None) -> TokenDelta:
    logprobs = None
    if num_tops is not None:
        logprobs = [TokenLogprobs(-1.0, [1] * num_tops, [-1.0] * num_tops)] * num_ids
    return TokenDelta(request_id="r", choice=0, offset=0, ids=[7] * num_ids, logprobs=logprobs)


class Watched:
    def __init__(self, patience=0.05):
        self.slow = 0
        self.box = Mailbox(max_tokens=10, max_bytes=4000, patience=patience, on_slow=self._slow)

    def _slow(self):
        self.slow += 1


@pytest.mark.parametrize("news", [[delta(11)], [delta(1)] * 11, [delta(2, num_tops=40)]])
async def test_too_much_for_too_long_is_told_once_and_dropped(news):
    it = Watched()
    for one in news:
        it.box.put(None, one)
    await asyncio.sleep(0.1)
    it.box.put(None, delta(500))
    assert it.slow == 1
    assert it.box._news == []


async def test_up_to_the_limit_may_wait_for_ever():
    it = Watched()
    it.box.put(None, delta(10))
    await asyncio.sleep(0.1)
    assert it.slow == 0
    assert len(await it.box.take()) == 1


async def test_a_reader_that_catches_up_is_forgiven_and_one_that_stays_behind_is_not():
    it = Watched(patience=0.2)
    for _ in range(4):
        it.box.put(None, delta(11))
        await it.box.take()  # late, but then it comes back with nothing waiting
        it.box.put(None, delta(1))
        await it.box.take()
        await asyncio.sleep(0.1)
    assert it.slow == 0
    for _ in range(5):
        it.box.put(None, delta(11))
        if not it.slow:
            await it.box.take()
        it.box.put(None, delta(11))
        await asyncio.sleep(0.1)
    assert it.slow == 1


async def test_far_too_much_is_not_kept_for_any_time():
    it = Watched(patience=3600)
    for _ in range(100):
        it.box.put(None, delta(10))
    assert it.slow == 1
    it = Watched(patience=3600)
    it.box.put(None, delta(HARD * 10 + 1))
    assert it.slow == 1
