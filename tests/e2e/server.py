"""Starts `paceline serve` as a user does, and ends it. Used by the end-to-end tests and by the prover."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PACELINE = str(Path(sys.executable).with_name("paceline"))
OURS = ("raylet", "gcs_server", "ray::", "paceline serve")


def free_port() -> int:
    """Below the range from which the system gives out ports: what starts meanwhile cannot be given this one."""
    while True:
        port = random.randint(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def our_processes() -> set[int]:
    """Every process of Ray or paceline on this machine, by id."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(name in line for name in OURS) and process.status() != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path
    ready_seconds: float

    def interrupt(self, timeout: float = 10) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout)


def start(log: Path, *flags: str, env: dict[str, str] | None = None, timeout: float = 120) -> Server:
    """Waits until a replica is attached. Raises RuntimeError with the log's end when it does not come up."""
    port = free_port()
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PACELINE, "serve", "--port", str(port), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, 0.0)
    while time.monotonic() - began < timeout and process.poll() is None:
        if _ready(server.url):
            server.ready_seconds = time.monotonic() - began
            return server
        time.sleep(0.1)
    end(process)
    raise RuntimeError(f"paceline serve did not come up:\n{log.read_text()[-3000:]}")


@contextmanager
def serving(log: Path, *flags: str, **options) -> Iterator[Server]:
    server = start(log, *flags, **options)
    try:
        yield server
    finally:
        end(server.process)


def run_to_its_end(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [PACELINE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | {"COLUMNS": "120"})


def _ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url + "/health/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def end(process: subprocess.Popen) -> None:
    """By the signal of a terminal, or, if that takes too long, by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
