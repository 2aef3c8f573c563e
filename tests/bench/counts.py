"""What a step costs, counted instead of timed: the same on every machine, so that a test can hold it.

    python -m tests.bench.counts     all counts, and what the ops of a decode step are

Counted are ops that torch dispatches (views too), calls into kernels of our own, and calls of Python functions of ours,
for one turn of the engine's loop: schedule, batch, model, sampler, commit.
"""

import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from paceline.worker.attention.base import BACKENDS
from paceline.worker.kernels import native
from tests.e2e.engine import Bench
from tests.models import tiny_llama_folder

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / room}/" for room in ("proto", "worker", "cluster"))
PROMPT_LEN = 20  # with what is drawn, in the middle of a block of 16


@dataclass
class Counts:
    ops: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    python: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> tuple[int, int, int]:
        """Ops, kernels, Python calls."""
        return self.ops.total(), self.kernels.total(), self.python.total()


class _Dispatched(TorchDispatchMode):
    def __init__(self, ops: Counter[str]):
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> Counts:
    """On this thread. Comprehensions are no calls, as in later Pythons."""
    counts = Counts()

    def profile(frame, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
            counts.python[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    with _counted_kernels(counts.kernels), _Dispatched(counts.ops):
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
    return counts


@contextmanager
def _counted_kernels(kernels: Counter[str]) -> Iterator[None]:
    """Calls of the library's functions, by whoever holds them."""
    library = native.library()
    if library is None:
        yield
        return
    kind = library._FuncPtr

    def call(function, *arguments):
        kernels[function.__name__] += 1
        return ctypes._CFuncPtr.__call__(function, *arguments)  # type: ignore[attr-defined]

    kind.__call__ = call
    try:
        yield
    finally:
        del kind.__call__


def decode(bench: Bench, batch: int) -> Counts:
    """The second step that draws for all of them."""
    bench.new(check=False, max_num_batched_tokens=PROMPT_LEN * batch)
    _add(bench, batch)
    for _ in range(2):
        bench.engine.step()
    return count(bench.engine.step)


def prefill(bench: Bench, batch: int) -> Counts:
    """One step with the whole prompts of all."""
    bench.new(check=False, max_num_batched_tokens=PROMPT_LEN * batch)
    _add(bench, batch)
    return count(bench.engine.step)


def _add(bench: Bench, batch: int) -> None:
    for number in range(batch):
        prompt = [(7 * place + number) % 300 + 3 for place in range(PROMPT_LEN)]
        bench.scheduler.add(bench.request(f"{number}", prompt, 8), 0.0)


def usable_backends() -> list[str]:
    """The reference, and our own kernels where they were built."""
    return [name for name in BACKENDS if name != "cpu" or native.library() is not None]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for backend in usable_backends():
            bench = Bench(tiny_llama_folder(Path(folder) / backend), attention_backend=backend, max_model_len=64)
            for name, step in (("decode", decode), ("prefill", prefill)):
                for batch in (1, 16):
                    ops, kernels, calls = step(bench, batch).totals
                    print(f"{backend} {name} {batch}: {ops} ops, {kernels} kernels, {calls} Python calls")
            for kind, counter in vars(decode(bench, 1)).items():
                print(f"  {kind}: {', '.join(f'{name} {times}' for name, times in counter.most_common())}")


if __name__ == "__main__":
    main()
