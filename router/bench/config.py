"""What `paceline bench` is told. Frozen; the command line makes it."""

import msgspec


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of ``workload`` (workloads.py) are sent in a closed loop: ``concurrency`` of them are always open. With
    ``rate`` they come in an open loop instead, so many a second, at random times.

    ``slo`` (goodput.py) asks for the most load within limits, ``rate`` and ``concurrency`` are then searched for.
    ``engine``: no server, the model is loaded into this process. ``vocab_size`` None: the engine's, or one that nearly
    every model has. ``price_per_hour``: of the machine, in whatever currency. ``json`` and ``plot`` name files.
    """

    url: str = "http://127.0.0.1:8000"
    engine: bool = False
    workload: str = "steady"
    num_requests: int = 64
    num_warmups: int = 2
    concurrency: int = 16
    rate: float | None = None
    slo: str | None = None
    seed: int = 1
    vocab_size: int | None = None
    price_per_hour: float | None = None
    json: str | None = None
    plot: str | None = None
