"""The five lines of issue 6: speed, beside the peers and beside the machine. Lines 1 to 3 are measured once, together;
the table goes where docs/performance.md has it."""

import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from paceline.worker.attention.base import select
from paceline.worker.attention.cpu import CpuAttention
from paceline.worker.kernels import native
from paceline.worker.sources import resolve
from tests.bench import peers, quality
from tests.bench.peer_rows import BY_NAME, IN_PROCESS
from tests.bench.peer_table import shares_of_the_machine, table, write_table
from tests.bench.servers import PEERS, vllm_settings
from tests.prove import issue_1, issue_3, issue_4
from tests.prove.lines import Line, NotHere, load, metric, server

ROUNDS = 3
OURS = ("bf16", "w8a8", "int4")
FAST = "w8a8"  # of --quantization, with which line 2 is measured
# Who is measured in which row: the settings and peers that its promises name.
WITH_EVERYONE, WITH_FAST = ("decode-1",), ("decode-16", "prefill")
WITH_BF16 = ("steady-16", "mixed", "shared", "steady-64", "goodput")

# Row, figure, bound: of the ratio to vLLM at its best setting.
BESIDE_VLLM = (
    ("decode-1", "output", 1.6),
    ("decode-16", "output", 1.6),
    ("prefill", "total", 1.15),
    ("steady-16", "output", 1.5),
    ("steady-64", "output", 1.5),
    ("shared", "output", 1.5),
    ("goodput", "goodput", 1.5),
)
GAPS_BESIDE_VLLM = (("mixed", "itl_p99", 0.25), ("mixed", "itl_max", 0.25))
FAST_BESIDE_VLLM = (("decode-1", "output", 2.5), ("decode-16", "output", 2.2), ("prefill", "total", 1.5))
QUALITY = {"int8": (0.98, 0.01), "w8a8": (0.95, 0.05)}  # top-1 at least, KL at most


@cache
def measured() -> dict[str, Any]:
    """By all three lines. Raises NotHere."""
    if not (PEERS / "vllm").exists():
        raise NotHere("needs the peers, which bench/peers/setup.sh beside the checkout installs")
    peers.RESULTS.unlink(missing_ok=True)
    session = peers.Session(peers.RESULTS)
    with peers.started(session, OURS, ("vllm", "llamacpp")) as servers:
        both = [one for one in servers if one.setting in (vllm_settings()[0].name, "bf16")]
        fast = [one for one in servers if one.setting == FAST]
        session.measure_in_process([FAST], servers, ROUNDS)
        for rows, those in ((WITH_EVERYONE, servers), (WITH_FAST, [*both, *fast]), (WITH_BF16, both)):
            for name in rows:
                session.measure(BY_NAME[name], those, ROUNDS)
    write_table(table(session.results), native.instructions())
    return session.results


class Bounds:
    """Figures beside their bounds; ``told`` raises AssertionError with all of them where one does not hold."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._missed: list[str] = []

    def add(self, name: str, value: float, bound: float, at_most: bool = False) -> None:
        holds = value <= bound if at_most else value >= bound
        sign = "<=" if at_most else ">="
        text = f"{name} {value:.3g} ({sign} {bound:g})"
        (self._texts if holds else self._missed).append(text)

    def told(self) -> str:
        held = "; ".join(self._texts)
        assert not self._missed, f"missed: {'; '.join(self._missed)}; held: {held}"
        return held


def ratio(row: str, figure: str, ours: str, peer: str, more_is_better: bool = True) -> float:
    """Median over rounds, to the setting of the peer that was best."""
    held = measured()["rows"][row]
    settings = {key: rounds for key, rounds in held.items() if key.startswith(peer)}
    best = (max if more_is_better else min)(settings.values(), key=lambda rounds: median(v[figure] for v in rounds))
    return median(_times(our[figure], their[figure]) for our, their in zip(held[ours], best, strict=True))


def _times(our: float, their: float) -> float:
    """Of two nothings no times at all."""
    return our / their if their else math.inf if our else 0.0


def beside_vllm() -> str:
    bounds = Bounds()
    for row, figure, bound in BESIDE_VLLM:
        bounds.add(row, ratio(row, figure, "paceline bf16", "vllm"), bound)
    for row, figure, bound in GAPS_BESIDE_VLLM:
        bounds.add(f"{row} {figure}", ratio(row, figure, "paceline bf16", "vllm", False), bound, at_most=True)
    return bounds.told()


def integers() -> str:
    bounds = Bounds()
    for row, figure, bound in FAST_BESIDE_VLLM:
        bounds.add(f"{FAST} {row} to vLLM", ratio(row, figure, f"paceline {FAST}", "vllm"), bound)
    held = measured()["in_process"]
    for _, text, _, _ in IN_PROCESS:
        rounds = zip(held[f"paceline {FAST}"], held["openvino"], strict=True)
        bounds.add(f"{text} to OpenVINO", median(our[text] / their[text] for our, their in rounds), 1.2)
    bounds.add("int4 decode-1 to llama.cpp", ratio("decode-1", "output", "paceline int4", "llamacpp"), 1.3)
    model = Path(resolve("smollm2"))
    reader = quality.Reader(model, "float32")
    ids = quality.windows(reader.tokenize(quality.text()), 2_000)
    expected = [reader.logprobs(part) for part in ids]
    for name, (top1, divergence) in QUALITY.items():
        found = quality.compare(expected, map(quality.Reader(model, "auto", name).logprobs, ids))
        bounds.add(f"{name} top-1", found.top1, top1)
        bounds.add(f"{name} KL", found.divergence, divergence, at_most=True)
    return bounds.told()


def metal() -> str:
    bounds = Bounds()
    shares = shares_of_the_machine(measured())
    for row, bound in (("decode-1", 0.75), ("prefill", 0.7)):
        whole, share = shares[row]
        bounds.add(f"{row}, of {whole:,.0f},", share, bound)
    return bounds.told()


def start_and_size() -> str:
    """With the model cached; resident memory after a load."""
    bounds = Bounds()
    flags = ("--num-kv-blocks", "4096", "--max-model-len", "4096")
    starts = []
    for _ in range(4):  # of which the first fills caches, and the last is under load
        with server(*flags) as running:
            starts.append(running.ready_seconds)
            if len(starts) < 4:
                continue
            load(running, "prefill", concurrency=8, requests=64)
            known = sum(metric(running, f"paceline_engine_rank_{name}") for name in ("weight_bytes", "kv_bytes"))
            resident = _replica_bytes(running.process.pid)
    bounds.add("ready, s,", median(starts[1:]), 8, at_most=True)
    torchs = int(subprocess.run([sys.executable, "-c", TORCHS_OWN], capture_output=True, text=True, check=True).stdout)
    text = f"{known / 1e6:.0f} MB of weights and KV and {torchs / 1e6:.0f} of torch's own"
    bounds.add(f"resident {resident / 1e6:.0f} MB by {text}", resident / (known + torchs), 1.6, at_most=True)
    return bounds.told()


TORCHS_OWN = "import psutil, torch; torch.ones(9).sum(); print(psutil.Process().memory_info().rss)"


def _replica_bytes(root: int) -> int:
    """Of the process that holds the model: the largest."""
    return max(process.memory_info().rss for process in psutil.Process(root).children(recursive=True))


def equality() -> str:
    """Lines of issues 1, 3 and 4 that compare ids and logits, with the backend that is taken on a CPU."""
    backend = select("auto", torch.device("cpu"), torch.bfloat16, 64)
    assert isinstance(backend, CpuAttention), native.why_not()
    lines = (issue_1.same_as_transformers, issue_1.same_as_itself, issue_3.equal, issue_4.families)
    return "; ".join(line() for line in lines)


LINES: list[Line] = [
    Line("6.1", "ahead of vLLM in bf16", beside_vllm),
    Line("6.2", "ahead of all with narrow weights, and what they cost", integers),
    Line("6.3", "share of the metal", metal),
    Line("6.4", "start and size", start_and_size),
    Line("6.5", "equality with the cpu backend", equality),
]
