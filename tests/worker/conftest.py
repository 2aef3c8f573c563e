"""One crew of processes for all tests that need several ranks: importing torch takes seconds in each."""

import pytest

from tests.worker.crew import Crew


@pytest.fixture(scope="package")
def crew():
    crew = Crew(4)
    yield crew
    crew.close()
