"""More than a server takes, and what waits too long. The server is to be started with FLAGS and be idle."""

import asyncio
import time
from typing import NamedTuple

import aiohttp
import httpx

from tests.e2e.disconnects import engine_metrics

# Two that run, four that wait; a budget that prefills the prompts at once.
FLAGS = ("--max-num-seqs", "2", "--max-waiting-requests", "4", "--max-model-len", "1024", "--num-threads", "1")
LONG = {"prompt": [20] * 8, "max_tokens": 200, "ignore_eos": True}


class Figures(NamedTuple):
    """Seconds: the slowest refusal, the slowest liveness, and how long one waited that expired in the queue."""

    refusal: float
    live: float
    queued: float


async def overload(url: str) -> Figures:
    """20 requests at once: 6 x 200 and 14 x 429, each at once and with a hint; health answers all the while. Then one
    that expires in the queue: 504, and nothing of it was computed."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        refusals, health = await _twenty_at_once(http)
        await _four_count_four(http)
        queued = await _expires_in_the_queue(http, url)
    return Figures(max(refusals), max(health), queued)


async def _twenty_at_once(http: httpx.AsyncClient) -> tuple[list[float], list[float]]:
    """By a client that takes a fraction of a millisecond a request: twenty of httpx's would be half of the time."""
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(str(http.base_url), connector=limits) as session:
        for _ in range(3):
            await asyncio.gather(*(_live(session) for _ in range(21)))  # connections, opened beforehand
        return await _flood(session)


async def _live(session: aiohttp.ClientSession) -> int:
    async with session.get("/health/live") as response:
        return response.status


async def _flood(session: aiohttp.ClientSession) -> tuple[list[float], list[float]]:
    async def ask() -> tuple[int, str | None, dict, float]:
        began = time.perf_counter()
        async with session.post("/v1/completions", json=LONG) as response:
            body = await response.json()
            return response.status, response.headers.get("retry-after"), body, time.perf_counter() - began

    asked = [asyncio.create_task(ask()) for _ in range(20)]
    health = []
    while not all(task.done() for task in asked):
        began = time.perf_counter()
        assert await _live(session) == 200
        health.append(time.perf_counter() - began)
        async with session.get("/health/ready") as response:
            assert response.status == 200, "full is not unready"
        await asyncio.sleep(0.01)
    answers = [await task for task in asked]
    assert sorted(status for status, *_ in answers) == [200] * 6 + [429] * 14
    refused = [answer for answer in answers if answer[0] == 429]
    for _, retry_after, body, _ in refused:
        assert int(retry_after or 0) >= 1
        assert body["error"]["code"] == "overloaded"
    return [seconds for *_, seconds in refused], health


async def _four_count_four(http: httpx.AsyncClient) -> None:
    """Three with n = 4 ask for twelve places of six: one gets its four."""
    answers = await asyncio.gather(*(http.post("/v1/completions", json=LONG | {"n": 4}) for _ in range(3)))
    assert sorted(response.status_code for response in answers) == [200, 429, 429]


async def _expires_in_the_queue(http: httpx.AsyncClient, url: str) -> float:
    await asyncio.sleep(1.5)  # until the last load is told
    before = await engine_metrics(url)
    running = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(2)]
    await asyncio.sleep(0.1)
    began = time.perf_counter()
    late = await http.post("/v1/completions", json=LONG | {"prompt": [21] * 500}, headers={"X-Queue-Timeout-Ms": "200"})
    took = time.perf_counter() - began
    assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_timeout"), late.text
    assert [(await task).status_code for task in running] == [200, 200]
    await asyncio.sleep(1.5)
    after = await engine_metrics(url)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 16
    cached = after["cached_prompt_tokens_total"] - before["cached_prompt_tokens_total"]
    assert after["computed_tokens_total"] - before["computed_tokens_total"] == 2 * (8 + 199) - cached
    return took
