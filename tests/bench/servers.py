"""The servers that are measured beside each other: started, paused while another one is measured, and ended.

Peers are installed by scripts that lie beside the checkout (`../shared/bench/peers`), outside the repository, under
PEERS. One that is not there raises NotHere, which says so.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from paceline.worker.kernels import native
from tests.e2e import server as paceline
from tests.prove.lines import BENCH, NotHere

PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "paceline-peers"))
MODEL = PEERS / "smollm2-hf"  # the same bf16 weights for all that read safetensors
NAME = "smollm2"
SETTLE_SECONDS = 4.0
START_TIMEOUT = 600  # seconds: a first start may compile, on a machine that others use


@dataclass
class Running:
    """A server that answers. ``setting``: how it was started, for the table."""

    name: str
    setting: str
    url: str
    pid: int
    ready_seconds: float
    _stop: Callable[[], None] = field(repr=False)

    def pause(self) -> None:
        """It keeps its memory and takes no core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Returns when it answers again, and its processes have caught up with what they missed."""
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + _HEALTH[self.name], timeout=5).status_code == 200:
                    time.sleep(SETTLE_SECONDS)
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} ({self.setting}) does not answer any more")

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self._stop()

    def _signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):  # it may have died, and the others are still to be ended
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


_HEALTH = {"paceline": "/health/ready", "vllm": "/health", "llamacpp": "/health"}


def start_paceline(setting: str, flags: list[str], folder: Path) -> Running:
    common = ["--model", str(MODEL), "--served-model-name", NAME, "--max-model-len", "4096", "--num-kv-blocks", "4096"]
    began = paceline.start(folder / f"paceline-{setting}.log", *common, *flags)
    return Running(
        "paceline", setting, began.url, began.process.pid, began.ready_seconds, lambda: paceline.end(began.process)
    )


@dataclass(frozen=True)
class VllmSetting:
    name: str
    cores: str  # those that its threads are bound to
    dtype: str

    def start(self) -> Running:
        flags, env = ["--dtype", self.dtype], {"VLLM_CPU_OMP_THREADS_BIND": self.cores}
        return _by_script("vllm", self.name, "vllm.sh", flags, env)


def vllm_settings() -> tuple[VllmSetting, VllmSetting]:
    """Those that may be its best here, the first of which is measured in all rows. Without instructions for bf16 its
    fp32 is several times as fast, except for one sequence."""
    bf16 = VllmSetting("bf16, both cores", "0-1", "bfloat16")
    if "bf16" in native.instructions():
        return bf16, VllmSetting("bf16, one core", "0", "bfloat16")
    return VllmSetting("fp32, both cores", "0-1", "float32"), bf16


def start_llamacpp() -> Running:
    return _by_script("llamacpp", "Q4_1", "llamacpp.sh", [], {})


def _by_script(name: str, setting: str, script: str, flags: list[str], env: Mapping[str, str]) -> Running:
    path = BENCH / "peers" / script
    if not path.exists() or not (PEERS / name).exists():
        raise NotHere(
            f"{name} is not installed under {PEERS.name}: see {path.parent.name}/setup.sh beside the checkout"
        )
    port = paceline.free_port()
    began = time.monotonic()
    done = subprocess.run(
        ["bash", str(path), str(port), *flags],
        env=os.environ | {"PEERS": str(PEERS)} | env,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{name} did not come up: {done.stderr[-2000:]}")
    pid, seconds = int(done.stdout.split()[-1]), time.monotonic() - began
    return Running(name, setting, f"http://127.0.0.1:{port}", pid, seconds, lambda: _end_group(pid))


def _end_group(pid: int) -> None:
    """The script made it the leader of a group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if _in_group(p.pid, pid)], timeout=15)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except (ProcessLookupError, PermissionError):
        return False
