"""What the machine itself gives: bytes read from memory and bf16 products, a second. The rest is measured against it.

    python -m tests.bench.metal     one line of JSON

Each is the best of a few ways, and the median of its runs: what a program could reach, not what one library does. The
bytes lie in a buffer much larger than any cache. It knows nothing of models.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

NUM_BYTES = 512 << 20
ROUNDS = 7
SIZES = (1024, 2048, 4096)


class Metal(NamedTuple):
    read_gb_s: float
    bf16_gflop_s: float


def measure_apart() -> Metal:
    """In a process of its own: threads and memory are gone afterwards."""
    done = subprocess.run([sys.executable, "-m", "tests.bench.metal"], capture_output=True, text=True, check=True)
    return Metal(**json.loads(done.stdout.splitlines()[-1]))


def measure() -> Metal:
    import torch

    with torch.inference_mode():
        return Metal(_read(torch) / 1e9, _multiply(torch) / 1e9)


def _read(torch) -> float:
    """Bytes a second: sums of two types, and a product of one row with packed weights, as a decode step has it."""
    floats = torch.ones(NUM_BYTES // 4)
    integers = torch.ones(NUM_BYTES // 8, dtype=torch.int64)
    ways = [floats.sum, integers.sum]
    if torch.backends.mkldnn.is_available():
        width = 4096
        dtype = _dtype(torch)
        weight = torch.ones(NUM_BYTES // dtype.itemsize // width, width, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        row = torch.ones(1, width, dtype=dtype)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], ""))
    return NUM_BYTES / min(map(_seconds, ways))


def _multiply(torch) -> float:
    """Floating-point operations a second, of square products."""
    rates = []
    for size in SIZES:
        a, b = (torch.ones(size, size, dtype=_dtype(torch)) for _ in range(2))
        rates.append(2 * size**3 / _seconds(lambda a=a, b=b: a @ b))
    return max(rates)


def _dtype(torch):
    """What has no instructions for bf16 multiplies it as fp32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _seconds(work: Callable[[], object]) -> float:
    work()
    runs = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)


if __name__ == "__main__":
    print(json.dumps(measure()._asdict()))
