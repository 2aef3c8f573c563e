"""What becomes of a service when one of its replica's ranks is harmed while it streams. For tests and the prover."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

PROMPT = [5, 6, 7, 8, 9, 10, 11]
PATIENCE = 120.0  # seconds after which a test gives up waiting


@dataclass
class Broken:
    """``endings``: the last line of each stream. Seconds count from the harm: to the last ending, and until requests
    are answered again."""

    endings: list[str]
    seconds_to_end: float
    seconds_back: float
    answer: list[int]  # to PROMPT, from the gang that came back

    @property
    def num_errors(self) -> int:
        """Streams that ended with an error event."""
        return sum('"error"' in ending for ending in self.endings)


async def break_a_rank(url: str, harm: Callable[[], object], num_streams: int = 8, max_tokens: int = 2000) -> Broken:
    """``harm`` is called once every stream has begun. They must be too long to end by themselves."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http, asyncio.timeout(2 * PATIENCE):
        begun = [asyncio.Event() for _ in range(num_streams)]
        streams = [asyncio.create_task(_stream(http, i, max_tokens, event)) for i, event in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        began = time.monotonic()
        harm()
        endings = await asyncio.gather(*streams)
        ended = time.monotonic()
        answer = await _answer_in_the_end(http)
        return Broken(endings, ended - began, time.monotonic() - began, answer)


async def ids_of(http: httpx.AsyncClient, prompt: list[int], max_tokens: int = 8, **fields) -> list[int]:
    """Greedy. Raises httpx.HTTPStatusError."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body | fields)
    return answer.raise_for_status().json()["choices"][0]["token_ids"]


async def _answer_in_the_end(http: httpx.AsyncClient) -> list[int]:
    while True:
        try:
            return await ids_of(http, PROMPT)
        except httpx.HTTPStatusError:
            await asyncio.sleep(0.1)


async def _stream(http: httpx.AsyncClient, number: int, max_tokens: int, begun: asyncio.Event) -> str:
    body = {"prompt": [*PROMPT, number], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    last = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                begun.set()
                last = line
    return last
