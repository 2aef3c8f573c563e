"""What must agree before ranks may speak to each other: a table for the log, a sentence for each thing that is wrong.

A collective among ranks that differ hangs, or computes nonsense; here it is a refusal that says which and where. Pure:
facts in, text out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.cluster.messages import Facts, Hello
from paceline.proto.units import GIB, MIB

LOOPBACK = "127."


class Report(NamedTuple):
    """What one rank said of itself. ``rank`` r is in stage r // tensor_parallel_size."""

    rank: int
    hello: Hello
    facts: Facts


# What must be equal on all ranks, and what helps where it is not.
EQUALS: tuple[tuple[str, Callable[[Report], str], str], ...] = (
    ("paceline", lambda r: r.hello.paceline, "install one version on all hosts"),
    ("Python", lambda r: r.hello.python, "use one version on all hosts"),
    ("torch", lambda r: r.facts.torch, "install one version on all hosts"),
    ("the kind of device", lambda r: r.facts.device_kind, "set --device"),
    ("the dtype", lambda r: r.facts.dtype, "set --dtype"),
    ("the attention backend", lambda r: r.facts.backend, "set --attention-backend"),
    ("the model's files", lambda r: r.facts.model, "copy one version of them to all hosts"),
)

COLUMNS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("rank", lambda r: str(r.rank)),
    ("host", lambda r: r.hello.host),
    ("address", lambda r: f"{r.hello.ip} {r.hello.interface}"),
    ("pid", lambda r: str(r.hello.pid)),
    ("device", lambda r: r.facts.device_name or "-"),
    ("free", lambda r: _size(r.facts.free_device_memory)),
    ("host free", lambda r: _size(r.facts.free_host_memory)),
    ("/dev/shm", lambda r: _size(r.hello.free_shared_memory)),
    ("cores", lambda r: str(r.hello.cores)),
    ("python", lambda r: r.hello.python),
    ("torch", lambda r: r.facts.torch or "-"),
    ("paceline", lambda r: r.hello.paceline),
    ("schema", lambda r: r.hello.step_schema[:8]),
    ("dtype", lambda r: r.facts.dtype or "-"),
    ("attention", lambda r: r.facts.backend or "-"),
    ("model", lambda r: r.facts.model[:8] or "-"),
)


def table(reports: Sequence[Report]) -> str:
    """A line of headings and one per rank."""
    rows = [[name for name, _ in COLUMNS]] + [[cell(report) for _, cell in COLUMNS] for report in reports]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def problems(reports: Sequence[Report], *, tensor_parallel_size: int, step_schema: str) -> list[str]:
    """What forbids a start, most telling first; ``step_schema`` is the engine's own."""
    return [
        *_troubles(reports),
        *_engine(reports, step_schema),
        *_differences(reports),
        *_split_stages(reports, tensor_parallel_size),
        *_shared_devices(reports),
        *_unreachable(reports),
        *_shared_memory(reports),
    ]


def _troubles(reports: Sequence[Report]) -> Iterable[str]:
    for trouble, those in _by(reports, lambda r: r.facts.trouble).items():
        if trouble:
            who = "all ranks" if len(those) == len(reports) else _ranks(those)
            yield f"{who}: {trouble.rstrip('.')}"


def _engine(reports: Sequence[Report], step_schema: str) -> Iterable[str]:
    """Ranks that agree with each other may still not understand their engine's plans."""
    for theirs, those in _by(reports, lambda r: r.hello.step_schema).items():
        if theirs != step_schema:
            yield (
                f"the step schema of {_ranks(those)} is {theirs}, their engine's {step_schema}: install one version of "
                "paceline on all hosts"
            )


def _differences(reports: Sequence[Report]) -> Iterable[str]:
    """A rank in trouble knows not all of its facts: what it does not know, does not differ."""
    for name, of, remedy in EQUALS:
        values = {value: those for value, those in _by(reports, of).items() if value}
        if len(values) > 1:
            told = ", ".join(f"{value} on {_ranks(those)}" for value, those in values.items())
            yield f"{name} differs: {told}; {remedy}"


def _split_stages(reports: Sequence[Report], tensor_parallel_size: int) -> Iterable[str]:
    for stage, those in _by(reports, lambda r: str(r.rank // tensor_parallel_size)).items():
        if len({r.hello.host for r in those}) > 1:
            yield (
                f"stage {stage} lies on several hosts, {_ranks(those)}: its {tensor_parallel_size} tensor parallel "
                "ranks must share one; lower --tensor-parallel-size to what one host holds and raise "
                "--pipeline-parallel-size"
            )


def _shared_devices(reports: Sequence[Report]) -> Iterable[str]:
    for device, those in _by(reports, lambda r: r.facts.device_id).items():
        if device and len(those) > 1:
            yield f"{_ranks(those)} were given the same {those[0].facts.device_name}: each rank needs a GPU of its own"


def _unreachable(reports: Sequence[Report]) -> Iterable[str]:
    if len({r.hello.host for r in reports}) > 1 and (local := [r for r in reports if r.hello.ip.startswith(LOOPBACK)]):
        yield (
            f"{_ranks(local)} can be reached from its own host only ({local[0].hello.ip}), but the gang lies on "
            "several: start each node's Ray with --node-ip-address of the network that joins them"
        )


def _shared_memory(reports: Sequence[Report]) -> Iterable[str]:
    for host, those in _by(reports, lambda r: r.hello.host).items():
        needed = sum(r.facts.shared_memory_needed for r in those)
        free = min(r.hello.free_shared_memory for r in those)
        if needed > free:
            yield (
                f"/dev/shm on {host} has {_size(free)} free, its {len(those)} ranks need {_size(needed)}: enlarge it "
                "(docker run --shm-size, in Kubernetes an emptyDir of medium Memory)"
            )


def _by(reports: Iterable[Report], key: Callable[[Report], str]) -> dict[str, list[Report]]:
    groups: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        groups[key(report)].append(report)
    return groups


def _ranks(reports: Sequence[Report]) -> str:
    told = ", ".join(f"{r.rank} ({r.hello.host})" for r in reports)
    return f"rank {told}" if len(reports) == 1 else f"ranks {told}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
