"""paceline beside its peers on one machine: the same load on each in turn, and the table of docs/performance.md.

    python -m tests.bench.peers [--rounds N] [--rows NAME ...] [--ours NAME ...] [--peers NAME ...] [--write]

All servers are started first; then, row by row, each is measured in turn (A B C A B C ...) while the others are
paused. A figure is the median of the rounds, a ratio the median of the rounds' ratios, to the setting of a peer that
was best in that row. What was measured is kept in a file, so that rows can be measured again one by one; the table says
what it holds and nothing else.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.router.bench.figures import Figures
from paceline.worker.kernels import native
from tests.bench import metal
from tests.bench.agreement import agreement, reference
from tests.bench.peer_rows import BY_NAME, IN_PROCESS, Row, Values, wear_in
from tests.bench.peer_table import METAL_ROWS, table, write_table
from tests.bench.servers import MODEL, NAME, PEERS, Running, start_llamacpp, start_paceline, vllm_settings
from tests.e2e.server import PACELINE
from tests.prove.lines import BENCH, ROOT, NotHere

RESULTS = ROOT / "build" / "peers.json"


def starters(ours: Iterable[str], peers: Iterable[str], flags: list[str], folder: Path) -> list[Callable[[], Running]]:
    """``ours``: bf16, or formats of --quantization."""
    known = {
        "vllm": [setting.start for setting in vllm_settings()],
        "llamacpp": [start_llamacpp],
    }
    formats = [[] if name == "bf16" else ["--quantization", name] for name in ours]
    mine = [
        partial(start_paceline, name, [*format, *flags], folder) for name, format in zip(ours, formats, strict=True)
    ]
    # OpenVINO has no server. Ours come last: they are asleep for as short a time as can be.
    return [*(start for peer in peers for start in known.get(peer, [])), *mine]


class Session:
    """Everything that was measured, by row, server and round, in a file that is written after each round.

    ``each`` is entered around every single measurement: to have the machine for oneself, where others use it.
    """

    def __init__(self, path: Path, each: Callable[[], AbstractContextManager] = nullcontext):
        self._path = path
        self._each = each
        empty: dict[str, Any] = {"rows": {}, "servers": {}, "metal": {}, "in_process": {}, "missing": []}
        self.results = (json.loads(path.read_text()) if path.exists() else empty) | {"missing": []}

    def miss(self, reason: str) -> None:
        """A peer that is not here."""
        self.results["missing"].append(reason)
        self._keep()

    def about(self, servers: list[Running]) -> None:
        """How each came up, and whether it computes the model. Afterwards none is fresh any more."""
        beginnings = reference(MODEL)
        for server in servers:
            with self._alone(server, servers):
                share = agreement(server.url, NAME, beginnings)
                wear_in(server)
            _say(f"{_key(server)}: ready in {server.ready_seconds:.1f} s, top-1 {share:.3f}")
            told = {"ready_seconds": server.ready_seconds, "top_1": share, "num_top_1": len(beginnings)}
            self.results["servers"][_key(server)] = told
        self._keep()

    def measure(self, row: Row, servers: list[Running], num_rounds: int) -> None:
        """Afresh: what the row held is dropped."""
        kept: dict[str, list[Values]] = {_key(server): [] for server in servers}
        metal_runs: list[dict[str, float]] = []
        for number in range(num_rounds):
            if row.name in METAL_ROWS:
                with self._alone(None, servers):
                    metal_runs.append(metal.measure_apart()._asdict())
            for server in servers:
                with self._alone(server, servers):
                    kept[_key(server)].append(row.measure(server, number))
                _say(f"{row.name} {number + 1}/{num_rounds} {_key(server)}: {_shown(kept[_key(server)][-1])}")
        self.results["rows"][row.name] = kept
        if metal_runs:
            self.results["metal"][row.name] = metal_runs
        self._keep()

    def measure_in_process(self, ours: Iterable[str], servers: list[Running], num_rounds: int) -> None:
        """OpenVINO and our engine, each loaded anew in every round. Raises NotHere."""
        kept: dict[str, list[Values]] = {"openvino": [], **{f"paceline {name}": [] for name in ours}}
        for number in range(num_rounds):
            with self._alone(None, servers):
                kept["openvino"].append(_openvino())
            for name in ours:
                with self._alone(None, servers):
                    kept[f"paceline {name}"].append(_engine(name, number))
            last = "; ".join(f"{name}: {_shown(rounds[-1])}" for name, rounds in kept.items())
            _say(f"in process {number + 1}/{num_rounds} {last}")
        self.results["in_process"] = kept
        self._keep()

    def _alone(self, server: Running | None, servers: list[Running]) -> AbstractContextManager:
        """One is awake, the others sleep, before and afterwards all do."""
        stack = ExitStack()
        stack.enter_context(self._each())
        for other in servers:
            other.pause()
        if server is not None:
            server.resume()
            stack.callback(server.pause)
        return stack

    def _keep(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.results, indent=1))


def _openvino() -> Values:
    script, python = BENCH / "peers" / "openvino_batch.py", PEERS / "openvino" / "bin" / "python"
    if not script.exists() or not python.exists():
        raise NotHere("openvino is not installed")
    done = subprocess.run([python, script], capture_output=True, text=True, check=True, timeout=600)
    found = re.findall(r"(\d+) out tok/s, (\d+) total tok/s", done.stdout)
    return {
        text: float(total if kind == "total" else output)
        for (output, total), (kind, text, _, _) in zip(found, IN_PROCESS, strict=True)
    }


def _engine(name: str, seed: int) -> Values:
    values = {}
    for kind, text, workload, count in IN_PROCESS:
        with tempfile.NamedTemporaryFile() as file:
            command = [PACELINE, "bench", "--engine", "--model", str(MODEL), "--workload", workload]
            command += ["--num-requests", str(count), "--concurrency", str(count), "--seed", str(seed)]
            command += ["--num-kv-blocks", "4096", "--max-model-len", "4096", "--json", file.name]
            command += [] if name == "bf16" else ["--quantization", name]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            figures = msgspec.convert(json.loads(Path(file.name).read_text())["figures"], Figures)
        values[text] = figures.total_tokens_per_s if kind == "total" else figures.output_tokens_per_s
    return values


def _key(server: Running) -> str:
    return f"{server.name} {server.setting}"


def _shown(values: Values) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in values.items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def started(
    session: Session, ours: Iterable[str], peers: Iterable[str], flags: Iterable[str] = ()
) -> Iterator[list[Running]]:
    """All of them, each asleep; the session knows who is not here."""
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Running] = []
        try:
            for start in starters(ours, peers, list(flags), Path(folder)):
                try:
                    servers.append(start())
                    servers[-1].pause()
                except (NotHere, RuntimeError, subprocess.TimeoutExpired) as reason:
                    session.miss(str(reason))
            session.about(servers)
            yield servers
        finally:
            for server in servers:
                server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--ours", nargs="*", default=["bf16"], help="bf16, or formats of --quantization")
    parser.add_argument("--peers", nargs="*", choices=["vllm", "llamacpp", "openvino"], default=["vllm", "llamacpp"])
    parser.add_argument("--flags", default="", help="more flags for paceline")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="write the table into docs/performance.md")
    args = parser.parse_args()
    session = Session(args.results)
    with started(session, args.ours, args.peers, args.flags.split()) as servers:
        for name in args.rows:
            session.measure(BY_NAME[name], servers, args.rounds)
        if "openvino" in args.peers:
            try:
                session.measure_in_process(args.ours, servers, args.rounds)
            except NotHere as reason:
                session.miss(str(reason))
    text = table(session.results)
    print(text)
    if args.write:
        write_table(text, native.instructions())


if __name__ == "__main__":
    main()
