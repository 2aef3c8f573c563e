"""What is counted from a config alone is what a start finds: weights, bytes per token, blocks, requests."""

from pathlib import Path

import pytest

from paceline.proto.errors import StartupError
from paceline.proto.units import GIB
from paceline.worker.config import RankConfig
from paceline.worker.fits import Fit, fits, read_model
from paceline.worker.supported import supported
from tests.models import edit_json, write_json
from tests.worker.crew import gang_config
from tests.worker.drive import rank_of
from tests.worker.families import FAMILIES
from tests.worker.gguf_writer import write_family

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LIMIT = 0.004  # GiB, for the tiny models


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("fits") / "model"
            FAMILIES[name].make(known[name])
        return known[name]

    return make


@pytest.fixture
def large(tmp_path):
    write_json(tmp_path / "config.json", LARGE)
    return read_model(tmp_path)


def count(spec, gpu: str, device: str = "cpu", **fields) -> Fit:
    return fits(spec, RankConfig(**({"model": "", "served_model_name": "", "dtype": "float32"} | fields)), gpu, device)


def alone(folder: Path, tmp_path: Path) -> Path:
    """Its config.json and nothing else."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "olmo3"])
def test_one_rank_finds_the_room_that_was_counted(made, tmp_path, name):
    rank = rank_of(made(name), num_threads=1, num_kv_blocks=None, rank_memory=LIMIT)
    fit = count(read_model(alone(made(name), tmp_path)), str(LIMIT))
    assert fit.memory is not None
    assert fit.memory.num_kv_blocks == pytest.approx(rank.num_kv_blocks, rel=0.05)
    assert fit.memory.weight_bytes == pytest.approx(rank.memory.weight_bytes, rel=0.05)
    assert fit.needs[0].token == rank.memory.kv_bytes_per_token
    assert fit.memory.max_model_len == rank.memory.max_model_len
    assert fit.memory.full_length_requests == pytest.approx(rank.memory.full_length_requests, rel=0.05, abs=1)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "neox"])
def test_every_rank_of_two_finds_the_room_that_was_counted(made, tmp_path, crew, name, tp, pp):
    gang = crew.gang(gang_config(made(name), tp, pp, num_kv_blocks=None, rank_memory=LIMIT))
    fit = count(read_model(alone(made(name), tmp_path)), str(LIMIT), tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert fit.memory is not None
    assert fit.memory.num_kv_blocks == pytest.approx(gang.num_kv_blocks, rel=0.05)
    for need, held in zip(fit.needs, gang.held, strict=True):
        assert need.weights == pytest.approx(held.weight_bytes, rel=0.05)
        assert need.token == held.kv_bytes_per_token


def test_a_gguf_file_counts_as_its_folder(made):
    path = write_family(made("qwen2"), made("qwen2").parent / "m.gguf")
    assert count(read_model(path), "1") == count(read_model(made("qwen2")), "1")


def test_a_model_of_70b_by_hand(large):
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672) * 2 + 2 * 8192 * 4  # products in bf16, norms in fp32
    weights = 80 * layer + 2 * 128256 * 8192 * 2 + 8192 * 4
    fit = count(large, "200", "cuda", dtype="auto")
    assert fit.needs[0].weights == weights
    assert fit.needs[0].token == 2 * 80 * 8 * 128 * 2
    assert fit.memory is not None
    assert fit.memory.num_kv_blocks == (200 * GIB - weights) // (16 * fit.needs[0].token)
    assert fit.memory.full_length_requests == fit.memory.num_kv_blocks // (131072 // 16)


def test_what_does_not_fit_is_told_with_the_fewest_ranks_that_do(large):
    fit = count(large, "H100", "cuda", dtype="auto")
    assert not fit.is_whole
    assert fit.memory is None
    assert "needs 131.42 GiB" in (fit.reason or "")
    assert fit.suggestion == (4, 1)
    again = count(large, "H100", "cuda", dtype="auto", tensor_parallel_size=4)
    assert again.is_whole
    assert again.suggestion is None


def test_room_for_shorter_requests_is_told_as_such(large):
    fit = count(large, "H100", "cuda", dtype="auto", tensor_parallel_size=2)
    assert fit.memory is not None
    assert not fit.is_whole
    assert 0 < fit.memory.max_model_len < 131072
    assert fit.suggestion == (4, 1)
    assert count(large, "H100", "cuda", dtype="auto", tensor_parallel_size=2, max_model_len=16384).is_whole


def test_where_no_layout_is_large_enough_none_is_suggested(large):
    fit = count(large, "0.5", "cuda", dtype="auto")
    assert fit.reason
    assert fit.suggestion is None


@pytest.mark.parametrize(
    ("gpu", "fields", "says"),
    [
        ("H800", {}, "--gpu H800 is not known; H200, H100, A100, L40S or a number of GiB are"),
        ("-1", {}, "--gpu -1"),
        ("nan", {}, "--gpu nan"),
        ("H100", {"dtype": "int8"}, "--dtype int8"),
        ("H100", {"tensor_parallel_size": 65}, "--tensor-parallel-size 65 does not fit a model of 64 heads"),
        ("H100", {"pipeline_parallel_size": 81}, "--pipeline-parallel-size 81 does not fit a model of 80 layers"),
    ],
)
def test_what_is_not_known_is_refused_by_its_flag(large, gpu, fields, says):
    with pytest.raises(StartupError) as error:
        count(large, gpu, **fields)
    assert says in str(error.value)


def test_a_config_that_is_not_there_or_says_too_little_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"has no config\.json"):
        read_model(tmp_path)
    write_json(tmp_path / "config.json", LARGE)
    edit_json(tmp_path / "config.json", hidden_size=None)
    with pytest.raises(StartupError, match="lacks the field hidden_size"):
        read_model(tmp_path / "config.json")


# Which models there are


def test_models_with_windows_are_said_to_have_them(made):
    windowed = {tiny.architecture for name, tiny in FAMILIES.items() if read_model(made(name)).windows}
    shown = {model.name for model in supported() if windowed & set(model.architectures)}
    assert shown == {model.name for model in supported() if model.windows} - {"qwen3"}  # as Qwen 2, whose row has one
