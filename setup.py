"""Builds the kernels of worker/kernels/ where there is a compiler for them; pyproject.toml has all else.

They are one shared library without Python in it, which `paceline.worker.kernels.native` loads. Nothing depends on it:
where it cannot be built an install goes on without, and what it would do is done by torch.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("worker/kernels")
# Wide vectors as arguments, which are always inlined, and what GCC 12 says of its own headers.
QUIET = ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """No module of Python's, so without Python's version in its name."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        """On all cores: setuptools compiles one file after the other."""
        compile_all = self.compiler.compile

        def compile_at_once(sources: list[str], **options) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(chain.from_iterable(pool.map(lambda source: compile_all([source], **options), sources)))

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    ext_modules=[
        Extension(
            "paceline.worker.kernels.libpaceline",
            sources=sorted(str(path) for path in KERNELS.glob("*.cpp")),
            depends=sorted(str(path) for path in KERNELS.glob("*.h")),
            language="c++",
            # Compiled for OpenMP but not linked to a runtime of it: torch has one loaded, and a second pool of threads
            # would fight the first for the cores. Without contraction a sum is the same wherever it is inlined.
            extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-g0", *QUIET],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
