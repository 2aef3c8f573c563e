"""A run as a picture: PNG by matplotlib, an optional extra that is imported here alone."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from paceline.proto.errors import StartupError
from paceline.router.bench.figures import Figures, Record, itls, ttfts
from paceline.router.bench.goodput import Slo

MISSING = "--plot needs matplotlib: pip install 'paceline[bench]'"


def require_matplotlib() -> None:
    """Before anything is measured. Raises StartupError."""
    if find_spec("matplotlib") is None:
        raise StartupError(MISSING)


def plot_run(path: str, title: str, records: Sequence[Record]) -> None:
    """What share of requests, and of gaps between chunks, took at most how long."""
    figure, (left, right) = _panels(title)
    for axes, name, values in ((left, "time to first token", ttfts(records)), (right, "between tokens", itls(records))):
        values = sorted(values)
        axes.plot(values, [(place + 1) / len(values) for place in range(len(values))])
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("share")
    _write(figure, path)


def plot_goodput(path: str, title: str, slo: Slo, probes: Sequence[tuple[str, float, Figures]]) -> None:
    """Each limited 99th percentile over the load, its limit as a line. ``probes``: (kind of load, amount, figures)."""
    figure, panels = _panels(title)
    for axes, kind in zip(panels, ("requests a second", "streams"), strict=True):
        tried = sorted((amount, figures) for name, amount, figures in probes if name == kind)
        for color, (limited, limit) in enumerate(slo.limits.items()):
            points = [
                (amount, spread.p99) for amount, figures in tried if (spread := getattr(figures, f"{limited}_ms"))
            ]
            axes.plot(*zip(*points, strict=True), marker="o", color=f"C{color}", label=f"p99 of {limited}")
            axes.axhline(limit, color=f"C{color}", linestyle="--")
        axes.set_xlabel(kind)
        axes.set_ylabel("ms")
        axes.set_yscale("log")
        axes.legend()
    _write(figure, path)


def _panels(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no window and no state of a whole process, as pyplot would bring

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, 2)


def _write(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StartupError(f"--plot {path} cannot be written: {error.strerror}") from error
