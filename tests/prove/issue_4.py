"""The five lines of issue 4: the models people run."""

import re
import statistics
import subprocess

from paceline.worker.models import MODELS
from tests.prove.lines import ROOT, Line, passed, run_pytest

LAST = "granite"  # the family that was added last, in a commit of its own
MODELS_FOLDER = "worker/models"


def families() -> str:
    """All rows at one rank, TP 2 and PP 2; then files in the other format."""
    out = run_pytest("tests/worker/test_families.py", "tests/worker/test_gguf_families.py", timeout=1800)
    return f"{len(MODELS)} families: {passed(out)}"


def short_files() -> str:
    modules = sorted({family.module for family in MODELS.values()})
    lengths = {name: len((ROOT / MODELS_FOLDER / f"{name}.py").read_text().splitlines()) for name in modules}
    added = _git("log", "--diff-filter=A", "--format=%h", "--", f"{MODELS_FOLDER}/{LAST}.py").split()[-1]
    touched = _git("show", "--numstat", "--format=", added).split("\n")
    files = {row.split("\t")[2]: row.split("\t")[0] for row in touched if row}
    registry, page, test = f"{MODELS_FOLDER}/__init__.py", "docs/models.md", "tests/worker/families.py"
    assert set(files) == {f"{MODELS_FOLDER}/{LAST}.py", registry, page, test}, files
    assert files[registry] == files[page] == "1"
    told = f"{len(lengths)} files for {len(MODELS)} families, {min(lengths.values())} to {max(lengths.values())} lines"
    median = statistics.median(lengths.values())
    return f"{told}, median {median:.0f}; commit {added} adds {LAST}: file, registry line, test, row of the page"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def windows() -> str:
    out = run_pytest("-s", "tests/e2e/test_windows.py", "tests/worker/test_kv_groups.py",
                     "tests/cluster/engine", env={"PACELINE_EXAMPLES": "2000"})  # fmt: skip
    told = "; ".join(re.findall(r"in use: (.+)", out))
    return f"{passed(out)}; {told}"


def fallback() -> str:
    out = run_pytest("tests/e2e/test_fallback.py", "tests/worker/test_fallback.py")
    return f"three architectures over HTTP give the ids of generate; {passed(out)}"


def fits() -> str:
    return passed(run_pytest("tests/worker/test_fits.py"))


LINES = [
    Line("4.1", "every family gives transformers' logits", families),
    Line("4.2", "a family is short to write", short_files),
    Line("4.3", "windows", windows),
    Line("4.4", "the fallback", fallback),
    Line("4.5", "paceline fits", fits),
]
