"""What a line is, and the tools that lines share: pytest in a subprocess, a server, the load generator."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.server import Server, serving

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT.parent / "shared" / "bench"


class NotHere(Exception):
    """What the line needs is not on this machine; the message says what."""


@dataclass(frozen=True)
class Line:
    """``run`` returns the figure, or raises where the line does not hold."""

    number: str
    text: str
    run: Callable[[], str]


def run_pytest(*arguments: str, timeout: float = 1200, env: dict[str, str] | None = None) -> str:
    """What the run printed, if all passed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | (env or {}),
    )
    if done.returncode:
        print(done.stdout[-4000:])
        raise AssertionError(f"pytest {' '.join(arguments)} failed")
    return done.stdout


def passed(output: str) -> str:
    """How many tests ran, from a quiet run's dots."""
    dots = sum(len(re.findall(r"\.", line)) for line in output.splitlines() if re.fullmatch(r"[.s]+(\s*\[.*\])?", line))
    return f"{dots} tests passed"


@contextmanager
def server(*flags: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log", *flags) as running:
        yield running


def metrics(running: Server) -> str:
    """As Prometheus reads them."""
    return httpx.get(running.url + "/metrics", timeout=10).text


def metric(running: Server, name: str) -> float:
    """Over all that have the name, whatever their labels."""
    lines = metrics(running).splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{|\s)", line))


def load(running: Server, workload: str, *, concurrency: int, requests: int, seed: int = 1) -> dict:
    """One run of the shared load generator; its figures by name."""
    tool = BENCH / "load.py"
    if not tool.exists():
        raise NotHere(f"needs {tool.relative_to(ROOT.parent)}, which lies beside the checkout where one is")
    command = [sys.executable, str(tool), "--url", running.url, "--model", "smollm2", "--workload", workload]
    command += ["--concurrency", str(concurrency), "--requests", str(requests), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failed"] == figures["short"] == 0, figures
    return figures
