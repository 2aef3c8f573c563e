"""Fixtures that several rooms share. A skip is allowed only if tests/skips.txt lists it."""

from pathlib import Path

import pytest

from paceline.worker.sources import resolve

ALLOWED_SKIPS = [
    line.split("#")[0].strip()
    for line in (Path(__file__).parent / "skips.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in model's GGUF file, fetched once."""
    return resolve("smollm2")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    for report in terminalreporter.stats.get("skipped", []):
        if not any(allowed in report.nodeid for allowed in ALLOWED_SKIPS):
            terminalreporter.write_line(f"not in tests/skips.txt: {report.nodeid}", red=True)


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if exitstatus == 0 and any(not any(a in r.nodeid for a in ALLOWED_SKIPS) for r in skipped):
        session.exitstatus = 1
