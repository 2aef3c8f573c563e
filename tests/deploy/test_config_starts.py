"""The config file that the chart renders is one that every command takes, and that starts `paceline serve`."""

import httpx
import pytest
import yaml

from paceline.router import settings
from tests.deploy.conftest import EXAMPLES
from tests.deploy.test_chart import of_kind
from tests.e2e.server import serving
from tests.models import tiny_llama_folder


@pytest.fixture
def config_file(rendered, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(of_kind(rendered, "ConfigMap")[0]["data"]["config.yaml"])
    return path


@pytest.mark.parametrize("command", ["serve", "router", "controller", "replica"])
def test_every_command_takes_the_rendered_file(config_file, command):
    values = settings.resolve(command, {}, {}, settings.read_file(config_file))
    assert values["log_format"] == "json"
    if command == "router":
        assert values["controller"] == "test-paceline-controller:8470"


def test_the_rendered_file_starts_serve(chart, tmp_path):
    [document] = of_kind(chart.template("--values", str(EXAMPLES[0])), "ConfigMap")
    path = tmp_path / "config.yaml"
    path.write_text(document["data"]["config.yaml"])
    assert yaml.safe_load(path.read_text())["host"] == "0.0.0.0"
    model = str(tiny_llama_folder(tmp_path / "model"))
    flags = ["--config", str(path), "--model", model, "--controller-port", "0", "--max-model-len", "64"]
    with serving(tmp_path / "log", *flags, "--num-threads", "1") as server:
        body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
