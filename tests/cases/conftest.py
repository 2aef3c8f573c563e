import pytest

from tests.cases.stack import stack
from tests.models import tiny_llama_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("cases") / "tiny", seed=3)


@pytest.fixture(scope="module")
def tiny(folder):
    """L = 256, POOL = 256, B = 16; the model is random."""
    with stack(folder) as running:
        yield running


@pytest.fixture(autouse=True)
def aftercheck(request):
    """After every case: a plain request is served, and nothing is left behind."""
    yield
    if "tiny" in request.fixturenames:
        request.getfixturevalue("tiny").at_rest()
