"""A whole router on a free port in front of fake replicas, for tests that speak HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import settings

from paceline.router.app import serve_router
from paceline.router.config import RouterConfig

settings.register_profile("router", deadline=None)  # shared cores: time says nothing about the code
settings.load_profile("router")


@asynccontextmanager
async def running_router(*replicas: str, wait: bool = True, **settings) -> AsyncIterator[httpx.AsyncClient]:
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = RouterConfig(port=0, replicas=replicas, **{"drain_seconds": 0.2} | settings)
    serving = asyncio.create_task(serve_router(config, ready=url.set_result, stop=stop))
    await asyncio.wait({serving, url}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if not url.done():
        await asyncio.wait_for(serving, 1)  # raises what went wrong
    try:
        async with httpx.AsyncClient(base_url=url.result(), timeout=20) as client:
            if wait:
                await until(lambda: ready(client))
            yield client
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


async def until(condition, timeout: float = 5.0) -> None:
    """Waits for a condition, plain or async, and fails with it if it does not come true."""
    async with asyncio.timeout(timeout):
        while True:
            answer = condition()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def router():
    return running_router
