import asyncio
import json
import threading
import time

import httpx
import openai
import pytest

from paceline.proto.errors import Overloaded
from paceline.router import openai as openai_parser
from paceline.router.answer import while_connected
from paceline.router.rest import LARGE_BODY
from tests.fakes import FakeReplica, encode, tiny_card
from tests.router.conftest import ready, until

HI = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "The capital of France is Paris."


async def events(client, path="/v1/completions", **body):
    """Parsed events of a stream, "[DONE]" among them."""
    response = await client.post(path, json={"stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    lines = response.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 16_384
    return body["error"]


async def test_the_openai_client_streams_and_does_not(router):
    async with FakeReplica(text=TEXT, num_cached=16) as fake, router(fake.address) as http:
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        whole = await client.chat.completions.create(model="tiny", messages=HI, temperature=0)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.prompt_tokens_details.cached_tokens == 16
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage
        assert len({chunk.id for chunk in chunks}) == 1
        done = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1)
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        assert done.choices[0].finish_reason == "length"
        assert len(done.choices[0].logprobs.tokens) == 3
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nope", messages=HI, stream=True)
        assert caught.value.code == "model_not_found"
        await client.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_one_reason_for_each_choice_and_ends_once(router, path, usage):
    async with FakeReplica(text=TEXT) as fake, router(fake.address) as http:
        options = {"stream_options": {"include_usage": True}} if usage else {}
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": HI}
        seen = await events(http, path, n=3, max_tokens=8, temperature=1, seed=1, **body, **options)
        assert seen[-1] == "[DONE]"
        assert seen.count("[DONE]") == 1
        chunks = [chunk for chunk in seen[:-1] if chunk["choices"]]
        assert len(seen) - 1 - len(chunks) == usage
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        for index in range(3):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == "length"
            assert not mine[-1].get("text")
            assert not mine[-1].get("delta")
        assert ("usage" in seen[0]) == usage


async def test_streamed_text_equals_whole_text(router):
    text = "한국어 ď🙂é and then some."
    async with FakeReplica(text=text) as fake, router(fake.address) as http:
        seen = await events(http, prompt="x")
        deltas = [chunk["choices"][0]["text"] for chunk in seen[:-1]]
        whole = (await http.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"]
        assert "".join(deltas) == whole == text
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("raw", [b"[]", b"null", b"123", b'{"model":', b"", b"\xff\xfe", b'{"prompt": "\\ud800"}'])
async def test_a_body_that_is_no_json_object_is_400(router, raw):
    async with FakeReplica() as fake, router(fake.address) as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await http.post(path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert error_of(response)["type"] == "invalid_request_error"


async def test_content_types_other_than_json_are_415_and_none_is_fine(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        raw = b'{"prompt": "x"}'
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            response = await http.post("/v1/completions", content=raw, headers={"content-type": content_type})
            assert response.status_code == 415
            error_of(response)
        for headers in ({}, {"content-type": "application/json; charset=utf-8"}):
            assert (await http.post("/v1/completions", content=raw, headers=headers)).status_code == 200


async def test_a_body_over_the_limit_is_413_with_or_without_a_length(router):
    async def chunks():
        for _ in range(20):
            yield b" " * 1000

    async with FakeReplica() as fake, router(fake.address, max_body_bytes=10_000) as http:
        for content in (b" " * 20_000, chunks()):
            response = await http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert error_of(response)["code"] == "payload_too_large"


async def test_refusals_name_the_field_and_never_repeat_the_input(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        talk = [{"role": "SECRET", "content": "x"}]
        for body, param in (
            ({"messages": talk}, "messages[0].role"),
            ({"temperature": "SECRET", "messages": talk}, "temperature"),
        ):
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert error_of(response)["param"] == param
            assert "SECRET" not in response.text
        response = await http.post("/v1/completions", json={"prompt": "x", "suffix": "SECRET"})
        assert (response.status_code, error_of(response)["param"]) == (400, "suffix")
        assert "SECRET" not in response.text
        response = await http.post("/v1/completions", json={"prompt": [5] * 256, "stream": True})
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert fake.submissions == []


async def test_unknown_routes_and_methods_speak_the_same_envelope(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/v1/completions", 405),
            ("GET", "/v1/models/x", 404),
        ):
            response = await http.request(method, path)
            assert response.status_code == status
            error_of(response)


async def test_ids_of_requests_go_in_and_out_and_unknown_fields_are_named(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        both = await asyncio.gather(
            *(
                http.post(
                    "/v1/completions", json={"prompt": text, "foo": 1, "b,a\nd": 2}, headers={"x-request-id": "mine"}
                )
                for text in ("x", "y")
            )
        )
        for response in both:
            assert response.status_code == 200
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["x-paceline-ignored-fields"] == "foo, b?a?d"
        assert len({request.request_id for request in fake.submissions}) == 2
        plain = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "not one id"})
        assert plain.headers["x-request-id"].startswith("req-")
        assert "x-paceline-ignored-fields" not in plain.headers
        stream = await http.post("/v1/completions", json={"prompt": "x", "foo": 1, "stream": True})
        assert stream.headers["x-paceline-ignored-fields"] == "foo"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_replica_refuses_is_a_real_status(router, stream):
    reject = Overloaded("the queue is full", retry_after=2.4)
    async with FakeReplica(reject=reject) as fake, router(fake.address) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
        assert error_of(response)["code"] == "overloaded"
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("options", "code"), [({"die_at": 3}, "replica_lost"), ({"fail_at": 3}, "sequence_fault")])
async def test_a_failure_in_mid_stream_is_one_error_event_and_no_done(router, options, code):
    async with FakeReplica(text=TEXT, delay=0.01, **options) as fake, router(fake.address) as http:
        seen = await events(http, prompt="x")
        assert "[DONE]" not in seen
        assert [chunk for chunk in seen if "error" in chunk] == seen[-1:]
        assert seen[-1]["error"]["code"] == code
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in seen[:-1])
        assert TEXT.startswith("".join(chunk["choices"][0]["text"] for chunk in seen[:-1]))


@pytest.mark.parametrize(("options", "status"), [({"die_at": 0}, 503), ({"fail_at": 0}, 500)])
async def test_a_failure_before_the_first_token_is_a_real_status_for_streams_too(router, options, status):
    async with FakeReplica(**options) as fake, router(fake.address) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert response.status_code == status
        error_of(response)


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"delay": 0.005}, {"stream": True}),
        ({"delay": 0.005}, {}),
        ({"delay": 0.005}, {"n": 4, "stream": True}),
        ({"delay": 0.005}, {"n": 4, "prompt": ["a", "b"]}),
        ({"stall_at": 0}, {"stream": True}),
        ({"stall_at": 0}, {}),
        ({"hold": True}, {"stream": True}),
        ({"hold": True}, {}),
    ],
)
async def test_a_closed_connection_aborts_in_every_state(router, options, body):
    async with FakeReplica(**options) as fake, router(fake.address) as http:
        raw = json.dumps({"prompt": "x", "ignore_eos": True} | body).encode()
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        num_prompts = len(body.get("prompt", "x"))
        await until(lambda: len(fake.submissions) == num_prompts)
        if body.get("stream") and "delay" in options:
            await reader.read(10)
        writer.close()
        await until(lambda: len(fake.cancels) == num_prompts, timeout=1)
        assert fake.running == {}
        assert "paceline_router_in_flight 1.0" in (await http.get("/metrics")).text  # the scrape itself
        fake.stall_at = None
        fake.release()
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_many_streams_at_once_get_each_its_own_text(router):
    def script(request, choice):
        return [request.prompt_ids[0]] * 20 + [2]

    async with FakeReplica(script=script) as fake, router(fake.address) as http:
        letters = "abcdefghijklmnopqrstuvwxyz"
        every = await asyncio.gather(*(events(http, prompt=letter) for letter in letters))
        for letter, seen in zip(letters, every, strict=True):
            assert "".join(chunk["choices"][0]["text"] for chunk in seen[:-1]) == letter * 20


async def test_health_tells_the_truth(router):
    fake = FakeReplica()
    await fake.start()
    async with router(fake.address) as http:
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).json() == {"status": "ready", "replicas_ready": 1}
        await fake.stop()

        async def not_ready():
            return not await ready(http)

        await until(not_ready)
        assert (await http.get("/health/ready")).json()["reason"] == "no replica takes requests"
        assert (await http.get("/health/live")).status_code == 200
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_router_without_replicas_starts_and_says_503(router):
    async with router("127.0.0.1:1", wait=False) as http:
        response = await http.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["reason"] == "no replica has been reached yet"
        for request in (http.get("/v1/models"), http.post("/v1/completions", json={"prompt": "x"})):
            response = await request
            assert response.status_code == 503
            assert error_of(response)["code"] == "no_replica"


async def test_a_strict_server_refuses_what_nothing_reads(router):
    async with FakeReplica() as fake, router(fake.address, strict=True) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "foo": 1})
        assert (response.status_code, error_of(response)["param"]) == (400, "foo")
        assert (await http.post("/v1/completions", json={"prompt": "x", "store": False})).status_code == 200


async def test_a_body_of_more_values_than_a_parser_may_take_is_413(router):
    async with FakeReplica() as fake, router(fake.address, max_body_values=1000) as http:
        for body in ({"prompt": [5] * 1001}, {str(at): 1 for at in range(210)}):
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")
        assert (await http.post("/v1/completions", json={"prompt": [5] * 100})).status_code == 200


async def test_large_bodies_are_read_in_another_thread(router, monkeypatch):
    threads = []
    parse = openai_parser.parse

    def seen(*args):
        threads.append(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(openai_parser, "parse", seen)
    async with FakeReplica() as fake, router(fake.address) as http:
        await http.post("/v1/completions", json={"prompt": "x"})
        await http.post("/v1/completions", json={"prompt": "x" * LARGE_BODY})
        await http.post("/tokenize", json={"prompt": "x" * LARGE_BODY})
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


async def test_live_answers_while_a_large_prompt_is_tokenized(router):
    card = tiny_card(max_model_len=100_000)
    async with FakeReplica(card=card) as fake, router(fake.address, max_body_bytes=32 << 20) as http:
        big = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hello world " * 500_000}))
        slowest = 0.0
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not big.done():
            began = loop.time()
            assert (await http.get("/health/live")).status_code == 200
            slowest = max(slowest, loop.time() - began)
            await asyncio.sleep(0.01)
        assert error_of(await big)["code"] == "context_length_exceeded"
        assert slowest < 0.5 * (loop.time() - started)


async def test_a_hundred_thousand_tokens_and_a_scrape_do_not_hold_up_health(router):
    """Parsed and tokenized off the loop: while that lasts, one probe after another is answered."""
    card = tiny_card(max_model_len=200_000)
    async with FakeReplica(card=card, stall_at=0) as fake, router(fake.address, max_body_bytes=32 << 20) as http:
        body = {"prompt": "hello world " * 60_000}
        big, num_probes = asyncio.create_task(http.post("/v1/completions", json=body)), 0
        while not fake.submissions:
            assert (await http.get("/health/live")).status_code == 200
            num_probes += 1
            await http.get("/metrics")
        assert len(fake.submissions[-1].prompt_ids) >= 100_000
        assert num_probes >= 5
        big.cancel()


async def test_text_as_ids_gives_the_same_as_text(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        for prompt in ("hello there", encode("hello there")):
            assert (await http.post("/v1/completions", json={"prompt": prompt})).status_code == 200
        assert fake.submissions[0].prompt_ids == fake.submissions[1].prompt_ids


async def test_stopping_ends_open_streams_with_an_error_event(router):
    async with FakeReplica(delay=0.01) as fake:
        async with router(fake.address) as http:
            client = httpx.AsyncClient(base_url=http.base_url, timeout=10)
            body = {"prompt": "x", "stream": True, "ignore_eos": True}
            streaming = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: fake.running)
            await asyncio.sleep(0.1)
        response = await streaming
        last = response.text.strip().split("\n\n")[-1]
        assert json.loads(last[6:])["error"]["code"] == "draining"
        await client.aclose()


async def test_work_ends_when_the_client_is_gone_and_not_before():
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work():
        await asyncio.sleep(0.01)

    assert await while_connected(receive, work())
    gone.set()
    assert not await while_connected(receive, asyncio.sleep(10))


# -- under pressure ----------------------------------------------------------------------------------------------------


async def test_twenty_at_once_into_six_places(router):
    async with (
        FakeReplica(hold=True, max_num_seqs=2, max_waiting_requests=4) as fake,
        router(fake.address) as http,
        httpx.AsyncClient(base_url=http.base_url, timeout=20, limits=httpx.Limits(max_connections=None)) as many,
    ):
        asked = [asyncio.create_task(many.post("/v1/completions", json={"prompt": "x"})) for _ in range(20)]
        await until(lambda: sum(task.done() for task in asked) == 14)  # nobody waits for a place: all six are held
        full = await http.post("/v1/completions", content=b"not even json")
        assert full.status_code == 429  # said before the body is read
        assert (await http.get("/health/ready")).status_code == 200
        fake.release()
        answers = await asyncio.gather(*asked)
        assert sorted(response.status_code for response in answers) == [200] * 6 + [429] * 14
        for response in answers:
            if response.status_code == 429:
                assert response.headers["retry-after"].isdecimal()
                assert int(response.headers["retry-after"]) >= 1
                assert error_of(response)["code"] == "overloaded"
        assert len(fake.submissions) == 6
        assert (await http.post("/v1/completions", json={"prompt": "x", "n": 6})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "x", "n": 7})).status_code == 400
        assert 'paceline_router_shed_total{reason="overloaded"} 15.0' in (await http.get("/metrics")).text


async def test_times_come_by_header_and_the_server_caps_them(router):
    async with FakeReplica() as fake, router(fake.address, queue_timeout=2.0, request_timeout=60.0) as http:
        headers = {"X-Queue-Timeout-Ms": "500", "X-First-Token-Timeout-Ms": "700", "X-Request-Timeout-Ms": "999999"}
        before = time.time()
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
        [sent] = fake.submissions
        times = [at - before for at in (sent.queue_deadline, sent.first_token_deadline, sent.deadline)]
        assert times == pytest.approx([0.5, 0.7, 60.0], abs=0.3)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "99999999999"])
@pytest.mark.parametrize("header", ["x-queue-timeout-ms", "x-first-token-timeout-ms", "x-request-timeout-ms"])
async def test_a_time_that_is_none_is_400_and_named(router, header, value):
    async with FakeReplica() as fake, router(fake.address) as http:
        response = await http.post("/v1/completions", json={"prompt": "x"}, headers={header: value})
        assert (response.status_code, error_of(response)["param"]) == (400, header)
        assert fake.submissions == []


@pytest.mark.parametrize("stream", [True, False])
async def test_what_expires_in_the_queue_is_504_with_its_name(router, stream):
    async with FakeReplica(hold=True) as fake, router(fake.address) as http:
        headers = {"x-queue-timeout-ms": "100"}
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream}, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (504, "queue_timeout")
        await until(lambda: fake.cancels)


async def test_a_hundred_mistakes_close_nothing(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        for _ in range(100):
            assert (await http.post("/v1/completions", json={"prompt": 5})).status_code == 400
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_one_of_two_replicas_dies_and_ready_stays(router, caplog):
    a, b = FakeReplica(replica_id="a", delay=0.01, die_at=5), FakeReplica(replica_id="b", delay=0.01)
    async with a, b, router(a.address, b.address) as http:

        async def is_ready(num):
            return (await http.get("/health/ready")).json()["replicas_ready"] == num

        await until(lambda: is_ready(2))
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 40}
        broken, whole = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
        assert "[DONE]" not in broken.text
        assert whole.text.endswith("data: [DONE]\n\n")
        lines = [record.message for record in caplog.records if "stream broken" in record.message]
        assert len(lines) == 1
        assert broken.headers["x-request-id"] in lines[0]
        assert (await http.get("/health/ready")).json() == {"status": "ready", "replicas_ready": 1}
        await b.stop()
        await until(lambda: is_ready(0))
        gone = await http.get("/health/ready")
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
