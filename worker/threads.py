"""How many threads compute, decided before torch is imported. Knows nothing of models or plans.

Exactly one thread of a process touches torch; it owns one OpenMP pool of ``num_threads``. A second pool, or a pool
wider than the cores that are ours, costs more than it brings.
"""

import os
from collections.abc import MutableMapping

# How long an idle OpenMP thread spins before it sleeps. Measured, SmolLM2 bf16, one row, two threads on two cores:
# alone a step takes 13 ms with libgomp's default and 19 ms with this; beside busy neighbours, 130 ms or more and 40 ms.
SPIN_COUNT = "1000"


def available() -> int:
    """Cores that this process may run on (its affinity mask, not the host's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(num_threads: int | None = None, environ: MutableMapping[str, str] | None = None) -> int:
    """Sets what OpenMP reads once, when torch loads it. Called by the owner of the process, before importing torch.

    Returns the thread count. What the user has set already is left alone.
    """
    environ = os.environ if environ is None else environ
    count = num_threads or available()
    for name, value in (("OMP_NUM_THREADS", count), ("MKL_NUM_THREADS", count), ("GOMP_SPINCOUNT", SPIN_COUNT)):
        environ.setdefault(name, str(value))
    return count


def apply(num_threads: int | None = None) -> int:
    """Holds torch to the count, from the thread that will run the steps. Returns the count in force."""
    import torch

    if num_threads and num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
