"""A GGUF file of any family is the folder that it was made from: the same spec, tensors and logits."""

from functools import cache
from types import SimpleNamespace

import gguf
import pytest
import torch
from msgspec.structs import replace

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.gguf_families import FAMILIES as GGUF_FAMILIES
from paceline.worker.models import architectures
from tests.models import edit_json, tiny_llama_folder
from tests.worker.crew import gang_config
from tests.worker.drive import Driver, rank_of
from tests.worker.families import FAMILIES, WINDOW
from tests.worker.gguf_writer import ARCHITECTURES, write_family
from tests.worker.oracle import check, maker
from tests.worker.test_models_llama import Recorder

# What no GGUF file can say: which layers of these have a window or no rotation, biases, a second way of writing.
UNWRITTEN = (
    "qwen2, windows from the second layer on",
    "gemma3, multimodal",
    "smollm3, windows",
    "cohere2, biases",
    "gpt2, as first published",
)
WRITTEN = [name for name in FAMILIES if name not in UNWRITTEN]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its folder, its file, and transformers' logits."""
    make = maker(FAMILIES, lambda: tmp_path_factory.mktemp("gguf"))

    @cache
    def with_file(name: str) -> SimpleNamespace:
        folder = make(name).folder
        return SimpleNamespace(folder=folder, file=write_family(folder, folder / "m.gguf"), logits=make(name).logits)

    return with_file


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_gives_the_oracles_logits(made, name):
    rank = rank_of(made(name).file, num_threads=1)
    recorder = Recorder(rank)
    check(Driver(rank), recorder.take, made(name).logits, 7)


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "phi3", "cohere2"])
def test_two_ranks_read_their_shares_of_a_file(made, crew, name):
    gang = crew.gang(gang_config(made(name).file, 2, 1))
    check(Driver(gang), gang.take, made(name).logits, 7)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_has_the_folders_spec(made, name):
    ours, theirs = open_checkpoint(made(name).file).spec, open_checkpoint(made(name).folder).spec
    if theirs.rope_scaling is not None:  # files have factors worked out
        assert ours.rope_scaling.kind == theirs.rope_scaling.kind
        ours, theirs = replace(ours, rope_scaling=None), replace(theirs, rope_scaling=None)
    if theirs.attention_scale is not None:
        assert ours.attention_scale == pytest.approx(theirs.attention_scale)
        ours, theirs = replace(ours, attention_scale=None), replace(theirs, attention_scale=None)
    assert ours == theirs


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_has_the_folders_tensors_and_any_part_of_them(made, name):
    ours, theirs = open_checkpoint(made(name).file), open_checkpoint(made(name).folder)
    assert set(ours.names()) == set(theirs.names())
    for tensor in theirs.names():
        expected = theirs.get(tensor)
        assert ours.shape(tensor) == tuple(expected.shape), tensor
        assert torch.allclose(ours.get(tensor), expected, atol=1e-6), tensor
        assert torch.allclose(ours.get(tensor, slice(5, 12)), expected[5:12], atol=1e-6), tensor
        if expected.ndim == 2:
            part = ours.get(tensor, slice(8, 16), slice(20, 50))
            assert torch.allclose(part, expected[8:16, 20:50], atol=1e-6), tensor


@pytest.mark.parametrize("name", ["gpt2", "neox", "phi3", "cohere2", "granite"])
def test_a_quantized_file_has_about_the_folders_tensors(made, tmp_path, name):
    ours = open_checkpoint(write_family(made(name).folder, tmp_path / "m.gguf", "Q8_0"))
    theirs = open_checkpoint(made(name).folder)
    for tensor in theirs.names():
        whole, expected = ours.get(tensor), theirs.get(tensor)
        assert torch.allclose(whole, expected, atol=expected.abs().max().item() / 100), tensor
        assert torch.equal(ours.get(tensor, slice(5, 12)), whole[5:12]), tensor
        if whole.ndim == 2:
            assert torch.equal(ours.get(tensor, slice(8, 16), slice(20, 50)), whole[8:16, 20:50]), tensor


def test_every_family_of_files_is_one_that_can_be_served_and_has_a_row():
    known = {name for family in GGUF_FAMILIES.values() for name in (family.hf, family.hf_windowed) if name}
    assert known <= architectures().keys()
    assert set(GGUF_FAMILIES) == {ARCHITECTURES[FAMILIES[name].architecture] for name in WRITTEN}


def test_the_tables_name_architectures_and_tensors_as_the_gguf_package_does():
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for name in GGUF_FAMILIES:
        stems = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[by_name[name]]}
        buffers = {"rope_freqs", "rope_factors_long", "rope_factors_short", "blk.{bid}.attn_rot_embd"}
        experts = {stem for stem in stems if "_exps" in stem or "gate_inp" in stem}
        assert stems - buffers - experts - set(GGUF_FAMILIES[name].names) <= {"blk.{bid}.attn_qkv"}, name


# What files leave to the reader


@pytest.mark.parametrize(
    ("name", "num_layers", "windowed"),
    [("gemma2", 4, [0, 2]), ("gemma3", 7, [0, 1, 2, 3, 4, 6]), ("cohere2", 5, [0, 1, 2, 4]), ("exaone4", 4, [0, 1, 2])],
)
def test_without_a_pattern_the_familys_own_layers_have_the_window(tmp_path, name, num_layers, windowed):
    types = ["sliding_attention" if layer in windowed else "full_attention" for layer in range(num_layers)]
    FAMILIES[name].make(tmp_path / "model", num_hidden_layers=num_layers, layer_types=types)
    path = write_family(tmp_path / "model", tmp_path / "m.gguf", attention__sliding_window_pattern=None)
    assert open_checkpoint(path).spec.windows == tuple(WINDOW if i in windowed else 0 for i in range(num_layers))


def test_a_pattern_may_be_a_number(made, tmp_path):
    path = write_family(made("gemma3").folder, tmp_path / "m.gguf", attention__sliding_window_pattern=2)
    assert open_checkpoint(path).spec.windows == (WINDOW, 0, WINDOW, 0, WINDOW)


def test_a_window_of_0_is_none(made, tmp_path):
    path = write_family(made("phi3").folder, tmp_path / "m.gguf", attention__sliding_window=0)
    assert open_checkpoint(path).spec.windows == ()


def test_the_largest_gemma_scales_scores_by_its_width(made, tmp_path):
    """As nothing in its files says: 46 layers, hidden size 64 over 4 heads."""
    metadata = {"block_count": 46, "attention__key_length": 8, "attention__value_length": 8, "attention__scale": None}
    metadata["rope__dimension_count"] = 8
    path = write_family(made("gemma2").folder, tmp_path / "m.gguf", **metadata)
    assert open_checkpoint(path).spec.attention_scale == 16**-0.5
    path = write_family(made("gemma2").folder, tmp_path / "m.gguf", **(metadata | {"block_count": 26}))
    assert open_checkpoint(path).spec.attention_scale == 8**-0.5


# Refusals


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("qwen2", {"attention__sliding_window": 16}, "qwen2.attention.sliding_window 16"),
        ("granite", {"rope__scaling__finetuned": False}, "granite.rope.scaling.finetuned"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "gemma3.attention.sliding_window_pattern"),
        ("cohere2", {"attention__layer_norm_epsilon": None}, "cohere2.attention.layer_norm_epsilon"),
        ("neox", {"rope__dimension_count": 5}, "gptneox.rope.dimension_count 5"),
        ("gpt2", {"block_count": None}, "gpt2.block_count"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_its_key(made, tmp_path, name, metadata, says):
    with pytest.raises(StartupError) as error:
        open_checkpoint(write_family(made(name).folder, tmp_path / "m.gguf", **metadata))
    assert says in str(error.value)
    assert str(error.value).endswith(".")


# Split files


@pytest.fixture
def parts(tmp_path):
    folder = tiny_llama_folder(tmp_path / "llama")
    first = write_family(folder, tmp_path / "m.gguf", part=8)
    return SimpleNamespace(folder=folder, files=sorted(first.parent.glob("m-*.gguf")))


def test_a_split_file_is_read_as_a_whole_whichever_part_is_named(parts):
    assert len(parts.files) == 3
    theirs = open_checkpoint(parts.folder)
    identities = set()
    for path in parts.files:
        ours = open_checkpoint(path)
        assert set(ours.names()) == set(theirs.names())
        assert all(torch.equal(ours.get(name), theirs.get(name)) for name in theirs.names())
        identities.add(ours.identity())
    assert len(identities) == 1


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_part_that_is_not_there_is_named(parts, gone):
    path = parts.files[gone]
    path.unlink()
    with pytest.raises(StartupError, match=f"lacks 1 of the 3 parts of this model \\({path.name}\\)"):
        open_checkpoint(parts.files[(gone + 1) % 3])


def test_parts_are_found_by_their_names(parts):
    lonely = parts.files[0].rename(parts.files[0].with_name("model.gguf"))
    with pytest.raises(StartupError, match="is one of 3 parts, which are found by their names"):
        open_checkpoint(lonely)


def test_parts_of_another_model_are_refused(parts, tmp_path):
    edit_json(parts.folder / "config.json", architectures=["Qwen2ForCausalLM"])
    other = write_family(parts.folder, tmp_path / "n.gguf", part=12)
    assert other.name == "n-00001-of-00002.gguf"
    parts.files[1].write_bytes(other.read_bytes())
    with pytest.raises(StartupError, match="is not part 2 of 3"):
        open_checkpoint(parts.files[0])
