"""`paceline models` and `paceline fits`, as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import write_json

PACELINE = str(Path(sys.executable).with_name("paceline"))
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PACELINE, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


def test_models_are_listed_with_the_way_they_run():
    lines = run("models").stdout.splitlines()
    [qwen3] = [line for line in lines if line.startswith("qwen3 ")]
    assert "Qwen3ForCausalLM" in qwen3
    assert qwen3.split()[-1] == "yes"
    [fallback] = [line for line in lines if line.startswith("fallback ")]
    assert "transformers" in fallback


def test_the_list_needs_no_torch():
    code = "import sys, paceline.worker.supported as s; assert s.supported() and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_count_is_a_few_lines_for_people(folder):
    done = run("fits", str(folder), "--gpu", "H100", "-tp", "2")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "H100 x 2 (--tensor-parallel-size 2): fits"
    assert [line.split()[0] for line in rest] == ["weights", "KV", "pool", "requests"]
    assert "of 40,960 tokens at once" in rest[-1]


def test_a_model_that_does_not_fit_says_what_would(folder):
    done = run("fits", str(folder / "config.json"), "--gpu", "24")
    assert done.returncode == 0
    assert done.stdout.startswith("24 GiB: does not fit")
    assert "40,960 tokens fit with --tensor-parallel-size 4" in done.stdout


def test_json_has_a_line_for_each_gpu(folder):
    told = [json.loads(line) for line in run("fits", str(folder), "--json").stdout.splitlines()]
    assert [one["gpu"] for one in told] == ["H200", "H100", "A100", "L40S"]
    assert [one["fits"] for one in told] == [True, True, True, False]
    assert told[0]["weight_bytes"] == told[3]["weight_bytes"]
    assert told[3]["suggestion"] == {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}


def test_what_cannot_be_counted_is_one_sentence(tmp_path):
    done = run("fits", str(tmp_path))
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
