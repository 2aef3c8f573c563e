"""How a command's process lives: what it starts in which order, what signals do, and how it ends, leaving nothing.

It takes frozen configs and knows no flags. Ray and torch come in where they are needed, not when this is imported.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import msgspec
import typer
import uvloop
from rich.console import Console

from paceline.proto.errors import StartupError
from paceline.proto.laps import Laps

log = logging.getLogger("paceline")


def serve_all(cluster_config: Any, router_config: Any, console: Console) -> None:
    """Cluster first, then the port: nothing listens before a replica serves."""
    start_seconds: dict[str, float] = {}

    def on_phase(phase: str, seconds: float) -> None:
        log.info("start: %s took %.2f s", phase, seconds)
        start_seconds[phase] = seconds

    laps = Laps(on_phase)
    _prepare_ray(cluster_config)
    from paceline.cluster.launch import Cluster

    laps.lap("imports")
    # Read while Ray and the replicas start, in which this process only waits.
    threading.Thread(target=import_module, args=("paceline.router.app",), daemon=True).start()
    cluster = Cluster(cluster_config)
    try:
        with _interruptible(), console.status("starting Ray") as shown:
            address, loaded = cluster.start(_progress(console, shown), on_phase)
        for line in "\n".join(loaded).splitlines():
            log.info(line)
        router_config = msgspec.structs.replace(router_config, controller=address)
        uvloop.run(route(router_config, cluster_config.replica.rank.served_model_name, start_seconds))
    except KeyboardInterrupt:
        log.info("interrupted")
    finally:
        with _uninterruptible():
            cluster.stop()
    log.info("stopped")


def run(running: Coroutine[Any, Any, int]) -> None:
    """Runs to the end; its status is the process's."""
    code = uvloop.run(running)
    log.info("stopped")
    if code:
        raise typer.Exit(code)


def run_controller(config: Any) -> None:
    _prepare_ray(config)
    from paceline.cluster.run import run_controller as running

    run(running(config, ready=lambda address: log.info("controller listens on %s", address)))


def run_replica(config: Any) -> None:
    from paceline.cluster.run import run_replica as running

    listening = "replica listens on %s and loads"
    run(
        running(
            config,
            listening=lambda address: log.info(listening, address),
            ready=lambda address: log.info("replica at %s is ready", address),
        )
    )


async def route(config: Any, model_name: str | None = None, start_seconds: Mapping[str, float] | None = None) -> int:
    """A router, until it is told to stop. Nothing is greeted without a name: the model may not be known yet.
    ``start_seconds``: phases of the start before this."""
    from paceline.router.app import serve_router

    def greet(url: str) -> None:
        log.info("listening on %s", url)
        if model_name:
            _greet(url, model_name, needs_key=config.api_key_file is not None)

    stop, now = _told()
    await serve_router(config, ready=greet, stop=stop, now=now, start_seconds=start_seconds)
    return 0


async def bench_server(config: Any, console: Console, model: str | None, api_key: str | None) -> int:
    """``config``: of bench/config.py; ``model`` None: the first that the server tells. Raises StartupError."""
    from paceline.router.bench.server import ServerTarget
    from paceline.router.bench_cli import Bench
    from paceline.router.client import Client, Refused

    client = Client(config.url, api_key=api_key)
    try:
        model = model or client.json("/v1/models")["data"][0]["id"]
    except Refused as refused:
        raise StartupError(f"{client.url}: {refused}") from refused
    return await Bench(config, console, ServerTarget(config.url, model, api_key), model).run()


async def bench_engine(config: Any, console: Console, replica_config: Any) -> int:
    """The engine of ``replica_config`` runs here, on a thread of its own. Raises StartupError."""
    from paceline.cluster.run import hosting
    from paceline.router.bench.engine import EngineTarget
    from paceline.router.bench_cli import Bench

    async with hosting(replica_config) as (host, card):
        return await Bench(config, console, EngineTarget(host, card), card.name, card.vocab_size).run()


def _told() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGINT or SIGTERM: stop, and stop now. A third ends the process, whatever
    hangs."""
    stop, now = asyncio.Event(), asyncio.Event()

    def tell() -> None:
        if now.is_set():
            os._exit(130)
        if stop.is_set():
            now.set()
        else:
            log.info("stopping: what runs may finish; once more ends it")
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell)
    return stop, now


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM interrupts a blocking start as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _uninterruptible() -> Iterator[None]:
    """Impatience must not leave processes behind."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _prepare_ray(config: Any) -> None:
    """What Ray reads when it is imported. A token for this run: Ray's ports run code for whoever may speak to them.

    Ray would run its workers at niceness 15, so that a replica's step gave way to everything else on the machine, the
    router's least work included: beside one busy neighbour it would get a thirtieth of a core.
    """
    if not config.ray_address:
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }


def _progress(console: Console, shown: Any) -> Callable[[dict[str, str]], None]:
    """Shows states as they change: in place, or as lines where nobody watches a terminal."""
    last = ""

    def tell(states: dict[str, str]) -> None:
        nonlocal last
        line = ", ".join(f"{name} {state}" for name, state in states.items()) or "starting"
        if line != last and not console.is_terminal:
            log.info(line)
        last = line
        shown.update(line)

    return tell


def _greet(url: str, model_name: str, needs_key: bool) -> None:
    body = {"model": model_name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    print(f"paceline serves {model_name} on {url}")
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if needs_key else [])]
    flags = " ".join(f"-H '{header}'" for header in headers)
    print(f"try:\n  curl {url}/v1/chat/completions {flags} \\\n    -d '{json.dumps(body)}'")
    sys.stdout.flush()
