"""The library of our own kernels, or why it is not there. Knows no tensors: callers hand it pointers.

It is built when paceline is installed (setup.py), never at start. Threads are those of torch: importing torch makes the
symbols of its OpenMP runtime known to the whole process, and the library, which is linked to none, takes them.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime, before the library

PATH = Path(__file__).with_name("libpaceline.so")

log = logging.getLogger("paceline.worker")


def library() -> ctypes.CDLL | None:
    """None where it cannot be used; then `why_not` says why, and the log does, once."""
    return _load()[0]


def why_not() -> str | None:
    """None where it can be used, else the reason as half a sentence."""
    return _load()[1]


def instructions() -> str:
    """The instruction set that its kernels use: the best that this processor has."""
    loaded = library()
    assert loaded is not None
    name = loaded.paceline_instructions
    name.restype = ctypes.c_char_p
    return name().decode()


def use_instructions(name: str) -> bool:
    """Takes another set (avx512_bf16, avx512, avx2, plain), for tests. Whether this processor has it."""
    loaded = library()
    assert loaded is not None
    return bool(loaded.paceline_use_instructions(name.encode()))


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return ctypes.CDLL(str(PATH)), None
    except OSError as error:
        built = PATH.exists()
        reason = f"the library cannot be loaded ({error})" if built else "the library was not built (no C++ compiler?)"
        log.warning("kernels of our own are not used, torch does their work more slowly: %s", reason)
        return None, reason
