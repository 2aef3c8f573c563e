"""What computes under a test: how many threads, by which instructions, and whether our kernels run here."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.worker.kernels import native
from paceline.worker.quant.product import why_no_kernel

needs_kernel = pytest.mark.skipif(why_no_kernel() is not None, reason="our kernels are not built, or not for this CPU")


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Kernels of this set, or of the best where the processor does not have it."""
    best = native.instructions()
    native.use_instructions(name)
    try:
        yield
    finally:
        assert native.use_instructions(best)
