"""A router before a fake replica, in a process of its own: what tests do with the GIL then does not slow it.

It prints where it is, serves until its standard input ends, and prints what it noticed: errors in the log, what was
left running, and the slowest answer of `/health/live`, in seconds, to a thread that asked all the while.
"""

import asyncio
import http.client
import json
import logging
import sys
import threading
import time

from paceline.router.app import serve_router
from paceline.router.config import RouterConfig
from tests.e2e.server import free_port
from tests.fakes import FakeReplica

# Small, so that a request that works is short.
LIMITS = {"max_n": 3, "max_prompts": 3, "max_choices": 6, "max_logprobs": 3, "max_body_values": 20_000}


class Troubles(logging.Handler):
    """Every record that carries an exception or is an error: there should be none."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))


class Pulse(threading.Thread):
    def __init__(self, address: str):
        super().__init__()
        self.slowest = 0.0
        self._ended = threading.Event()
        self._connection = http.client.HTTPConnection(address, timeout=30)

    def run(self) -> None:
        while not self._ended.wait(0.02):
            began = time.perf_counter()
            self._connection.request("GET", "/health/live")
            self._connection.getresponse().read()
            self.slowest = max(self.slowest, time.perf_counter() - began)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.slowest


async def main() -> None:
    troubles, stop, url = Troubles(), asyncio.Event(), asyncio.get_running_loop().create_future()
    logging.getLogger().addHandler(troubles)
    async with FakeReplica(text="Hello.", per_frame=50, bounded=True) as fake:
        config = RouterConfig(port=0, grpc_port=free_port(), replicas=(fake.address,), drain_seconds=1, **LIMITS)
        serving = asyncio.create_task(serve_router(config, ready=url.set_result, stop=stop))
        pulse = Pulse((await url).removeprefix("http://"))
        print(json.dumps({"url": url.result(), "grpc_port": config.grpc_port}), flush=True)
        pulse.start()
        await asyncio.to_thread(sys.stdin.read)
        left = len(fake.running)
        slowest = await asyncio.to_thread(pulse.end)
        stop.set()
        await serving
    print(json.dumps({"troubles": troubles.found[:3], "left": left, "slowest": slowest}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
