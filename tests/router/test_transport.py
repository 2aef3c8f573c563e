"""The bytes before a body: as many as the cap, no more, whichever part of a head they are in; and what is no HTTP."""

import asyncio
import json

import httpx
import pytest

from paceline.router.transport import MAX_HEAD_BYTES

MUCH = MAX_HEAD_BYTES + 1000
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def said(http: httpx.AsyncClient, *pieces: bytes) -> tuple[int, dict]:
    """Status and body that the server ends the connection with; pieces are sent as it takes them."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10):
            raw = await reader.read()
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /health/live HTTP/1.1\r\nX: ", b"x" * MUCH),
        (b"GET /health/live HTTP/1.1\r\n", b"X: y\r\n" * (MUCH // 6)),
        (b"GET /health/live HTTP/1.1\r\nX: " + b"x" * MUCH + b"\r\n\r\n",),
        (b"GET /health/live HTTP/1.1\r\n", b"x" * MUCH),
        (b"GET /health/live?" + b"x" * MUCH,),
        (b"GET /health/live?" + b"x" * MUCH + b" HTTP/1.1\r\n\r\n",),
        (POST, b"1\r\n{\r\n0\r\n", b"X: y\r\n" * (MUCH // 6)),
    ],
    ids=["value", "many", "whole", "name", "url", "whole url", "trailers"],
)
async def test_a_head_without_end_is_431_whatever_part_of_it_grows(router, pieces):
    async with router(wait=False) as http:
        status, error = await said(http, *pieces)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert str(MAX_HEAD_BYTES) in error["message"]
        assert (await http.get("/health/live")).status_code == 200


async def test_a_trailer_without_end_ends_the_connection(router):
    async with router(wait=False) as http:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(POST + b"1\r\n{\r\n0\r\nX: ")
        with pytest.raises(ConnectionError):
            await flooded(writer)
        writer.close()


async def flooded(writer: asyncio.StreamWriter) -> None:
    for _ in range(1000):
        writer.write(b"x" * MAX_HEAD_BYTES)
        await writer.drain()


async def test_a_head_may_have_as_much_as_the_cap_again_and_again(router):
    async with router(wait=False) as http:
        for _ in range(3):  # on one connection
            headers = {"X": "x" * (MAX_HEAD_BYTES - 500)}
            assert (await http.get("/health/live", headers=headers)).status_code == 200
            body = b'{"tokens": [' + b"1, " * MAX_HEAD_BYTES + b"1]}"
            assert (await http.post("/detokenize", content=body)).status_code == 503


async def test_what_is_no_http_is_answered_as_other_mistakes_are(router):
    async with router(wait=False) as http:
        status, error = await said(http, b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert (status, error["code"], error["type"]) == (400, "invalid_request", "invalid_request_error")
