"""A GGUF file alone is a checkpoint: its tensors are the Hugging Face folder's, whatever type they are stored in."""

import contextlib
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.gguf import GGUFCheckpoint, folder_name
from paceline.worker.gguf_families import FAMILIES
from paceline.worker.gguf_file import GGUFFile
from paceline.worker.models.spec import RopeScaling
from paceline.worker.sources import resolve
from paceline.worker.tensor_view import halves_order
from tests.models import gguf_weights, interleave, tiny_llama_folder, write_gguf

Q = gguf.GGMLQuantizationType
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("tiny") / "llama", attention_bias=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """256 values a row, as types with blocks of 256 need."""
    return tiny_llama_folder(tmp_path_factory.mktemp("wide") / "llama", hidden_size=256, intermediate_size=256)


def dequantizable() -> list[str]:
    """The types that the gguf package turns into floats, found by asking it."""
    names = []
    for kind in Q:
        _, row_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, row_bytes), np.uint8), kind)
        except (NotImplementedError, ValueError):
            continue
        names.append(kind.name)
    return sorted(set(names) - set(PLAIN))


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as error:
        open_checkpoint(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_types_give_the_folders_tensors_exactly(folder, tmp_path, kind):
    ours, theirs = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", kind)), open_checkpoint(folder)
    assert set(ours.names()) == set(theirs.names())
    assert ours.stored_dtype == str(PLAIN[kind]).removeprefix("torch.")
    for name in theirs.names():
        expected = theirs.get(name)
        if expected.ndim == 2:
            expected = expected.to(PLAIN[kind])
        assert ours.shape(name) == tuple(expected.shape)
        assert torch.equal(ours.get(name), expected), name
        assert ours.get(name).dtype == expected.dtype


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_types_give_what_the_gguf_package_makes_of_them(folder, tmp_path, kind):
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", kind))
    theirs = open_checkpoint(folder)
    for name in theirs.names():
        weight = theirs.get(name).numpy()
        if weight.ndim == 2:
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, Q[kind]), Q[kind])
        assert np.array_equal(checkpoint.get(name).numpy(), weight), name


@pytest.mark.parametrize("kind", dequantizable())
def test_every_type_that_the_gguf_package_dequantizes_is_read(wide, tmp_path, kind):
    _, block_bytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    row_bytes = 256 // gguf.GGML_QUANT_SIZES[Q[kind]][0] * block_bytes
    raw = np.random.default_rng(0).integers(0, 256, (384, row_bytes), np.uint8)
    checkpoint = open_checkpoint(write_gguf(wide, tmp_path / "m.gguf", raw={"output.weight": (kind, raw)}))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, Q[kind])
        values = checkpoint.get("lm_head.weight").numpy()
        some = checkpoint.get("lm_head.weight", slice(100, 200)).numpy()
    assert values.shape == (384, 256)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(some, expected[100:200], equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (96, 64), (3, 8192), (5, 32768)])
def test_short_and_long_rows_are_dequantized_alike(folder, tmp_path, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    raw = gguf.quants.quantize(values, Q.Q8_0)
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", raw={"output.weight": ("Q8_0", raw)}))
    assert np.array_equal(checkpoint.get("lm_head.weight").numpy(), gguf.quants.dequantize(raw, Q.Q8_0))


def test_all_kinds_of_quantization_are_among_those():
    assert {"Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "TQ1_0", "MXFP4"} <= set(dequantizable())


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("rows", [slice(0, 16), slice(16, 48), slice(5, 11), slice(60, 64)])
@pytest.mark.parametrize("name", [Q_PROJ, Q_PROJ.replace("weight", "bias"), "model.embed_tokens.weight"])
def test_rows_are_rows_of_the_whole(folder, tmp_path, kind, rows, name):
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", kind))
    assert torch.equal(checkpoint.get(name, rows), checkpoint.get(name)[rows])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("columns", [slice(0, 32), slice(32, 64), slice(5, 11), slice(20, 50), slice(63, 64)])
@pytest.mark.parametrize("rows", [None, slice(16, 48)])
def test_columns_are_columns_of_the_whole_wherever_they_cut_a_block(folder, tmp_path, kind, columns, rows):
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", kind))
    for name in (Q_PROJ, Q_PROJ.replace("q_proj", "o_proj")):
        assert torch.equal(checkpoint.get(name, rows, columns), checkpoint.get(name, rows)[:, columns])


def test_only_the_blocks_that_hold_the_columns_are_decoded(folder, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", "Q8_0"))
    decoded = []
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda raw, kind: decoded.append(raw.size) or dequantize(raw, kind))
    checkpoint.get(Q_PROJ, slice(0, 16), slice(40, 50))
    assert decoded == [16 * 34]  # of each row the second block of 32 values, which is 34 bytes long


def test_queries_turned_in_ggmls_order_and_in_ours_are_the_same_queries():
    """ggml turns the pairs (0, 1), (2, 3), ...; Hugging Face turns (i, i + half): same angles, other rows."""
    num_heads, head_dim = 3, 8
    weight = np.random.default_rng(0).normal(size=(num_heads * head_dim, 5))
    hidden, angles = np.arange(5.0), np.arange(1.0, 1 + head_dim // 2)
    turn = np.exp(1j * angles)
    ours = (weight @ hidden).reshape(num_heads, 2, -1)
    ours = (ours[:, 0] + 1j * ours[:, 1]) * turn
    theirs = (interleave(weight, num_heads) @ hidden).reshape(num_heads, -1, 2)
    theirs = (theirs[..., 0] + 1j * theirs[..., 1]) * turn
    assert np.allclose(ours, theirs)
    assert np.array_equal(interleave(weight, num_heads)[halves_order(num_heads, head_dim)], weight)


def test_names_are_translated_and_unknown_ones_left_for_the_loader_to_refuse(folder, tmp_path):
    assert folder_name("blk.11.ffn_down.weight", FAMILIES["llama"]) == "model.layers.11.mlp.down_proj.weight"
    assert folder_name("output.weight", FAMILIES["llama"]) == "lm_head.weight"
    assert folder_name("blk.0.ffn_gate_inp.weight", FAMILIES["llama"]) == "blk.0.ffn_gate_inp.weight"
    one = np.ones(3, np.float32)
    unknown = ("blk.0.attn_sinks.weight", "blk.0.ffn_gate_inp", "extra")
    extra = dict.fromkeys((*unknown, "blk.0.attn_rot_embd"), ("F32", one))
    names = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", raw=extra)).names()
    assert set(unknown) <= set(names)
    assert "blk.0.attn_rot_embd" not in names


# The spec


def test_the_spec_is_the_folders(folder, wide, tmp_path):
    for source in (folder, wide):
        assert open_checkpoint(write_gguf(source, tmp_path / "m.gguf")).spec == open_checkpoint(source).spec


def test_a_file_without_an_output_matrix_is_tied(folder, tmp_path):
    tied = tiny_llama_folder(tmp_path / "tied", tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_gguf(tied, tmp_path / "m.gguf"))
    assert checkpoint.spec.tie_embeddings
    assert "lm_head.weight" not in checkpoint.names()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeScaling(kind="linear", factor=4.0, original_max_position=256),
        ),
        (
            {"llama.rope.scale_linear": 2.0},
            RopeScaling(kind="linear", factor=2.0, original_max_position=256),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            RopeScaling(kind="yarn", factor=4.0, original_max_position=64, attention_factor=0.1 * np.log(4.0) + 1.0),
        ),
    ],
)
def test_rotary_scaling_is_read_from_metadata(folder, tmp_path, extra, expected):
    assert open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", extra=extra)).spec.rope_scaling == expected


def test_llama3_scaling_comes_as_divisors(folder, tmp_path):
    divisors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", raw={"rope_freqs.weight": ("F32", divisors)}))
    assert checkpoint.spec.rope_scaling == RopeScaling(kind="factors", factors=tuple(divisors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.names()


def test_sampling_recommendations_are_read(folder, tmp_path):
    extra = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", extra=extra))
    assert checkpoint.generation_defaults == {"temperature": 0.6, "top_k": 20}


def test_identity_sees_weights_and_metadata(folder, tmp_path):
    one = open_checkpoint(write_gguf(folder, tmp_path / "1.gguf")).identity()
    assert open_checkpoint(write_gguf(folder, tmp_path / "2.gguf")).identity() == one
    assert open_checkpoint(write_gguf(folder, tmp_path / "3.gguf", extra={"general.name": "x"})).identity() != one
    norm = gguf_weights(folder)["output_norm.weight"] + 1
    changed = write_gguf(folder, tmp_path / "4.gguf", raw={"output_norm.weight": ("F32", norm)})
    assert open_checkpoint(changed).identity() != one


# Refusals


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"llama.block_count": None}, "lacks the metadata key llama.block_count"),
        ({"llama.context_length": None}, "lacks the metadata key llama.context_length"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "rotary scaling 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 but heads of 16"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.head_count_kv": [2, 1]}, "layers of different shape"),
        ({"llama.attention.head_count": 0}, "head_count 0, which is no count"),
        ({"llama.attention.head_count": "four"}, "head_count 'four', which is no count"),
        ({"llama.attention.head_count_kv": 3}, "over 3 KV heads"),
        ({"general.alignment": 0}, "general.alignment 0"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_metadata_of_no_plain_llama_is_refused(folder, tmp_path, extra, says):
    assert says in refusal(write_gguf(folder, tmp_path / "m.gguf", extra=extra))


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), arch="mamba")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'mamba' (general.architecture), which is not supported; supported: llama" in refusal(
        tmp_path / "m.gguf"
    )


def test_a_file_of_metadata_alone_is_refused(folder, tmp_path):
    whole = GGUFFile(write_gguf(folder, tmp_path / "whole.gguf"))
    content = bytearray((tmp_path / "whole.gguf").read_bytes()[: whole.header_len])
    content[8:16] = bytes(8)  # the count of tensors
    (tmp_path / "m.gguf").write_bytes(content)
    assert "holds no tensors" in refusal(tmp_path / "m.gguf")


def test_a_type_that_cannot_be_dequantized_is_refused_with_its_tensor(folder, tmp_path):
    raw = {"output.weight": ("I32", np.zeros((384, 64), np.int32))}
    message = refusal(write_gguf(folder, tmp_path / "m.gguf", raw=raw))
    assert "Tensor output.weight" in message
    assert "I32" in message


@pytest.mark.parametrize("cut", [0, 3, 10, 24, 100, 2000, 0.3, 0.6, 0.99, -1])
def test_a_file_cut_anywhere_is_refused(folder, tmp_path, cut):
    content = write_gguf(folder, tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    assert "download it again" in refusal(path)


@pytest.mark.parametrize("start", [b"<html>", b"GGUF\x01\0\0\0", b"GGUF\0\0\0\x03"], ids=["page", "v1", "big-endian"])
def test_what_is_no_current_gguf_is_refused(tmp_path, start):
    path = tmp_path / "m.gguf"
    path.write_bytes(start + bytes(100))
    assert "GGUF" in refusal(path)


def test_no_byte_of_the_header_makes_it_crash(folder, tmp_path):
    """Damage gives a sentence or another model, never a strange exception."""
    content = bytearray(write_gguf(folder, tmp_path / "whole.gguf").read_bytes())
    header = GGUFFile(tmp_path / "whole.gguf").header_len
    random = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    for at in random.integers(0, header, 150):
        damaged = bytearray(content)
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(StartupError):
            open_checkpoint(path)


# The real file


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve("smollm2")


def test_the_header_of_the_real_file_reads_as_the_gguf_package_reads_it(smollm2):
    ours, theirs = GGUFFile(smollm2), gguf.GGUFReader(smollm2)
    read = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(read) == set(ours.metadata)
    for key, value in read.items():
        assert ours.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert [(t.name, t.kind, t.shape[::-1], t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, t.tensor_type, tuple(t.shape.tolist()), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_the_real_file_gives_transformers_tensors(smollm2):
    from transformers import AutoModelForCausalLM

    checkpoint = GGUFCheckpoint(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    expected = model.state_dict()
    assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}
    assert checkpoint.spec.tie_embeddings
    for name in checkpoint.names():
        if any(part in name for part in ("embed_tokens", "model.norm", "layers.0.", "layers.29.")):
            assert torch.equal(checkpoint.get(name), expected[name]), name


def test_a_real_file_cut_short_is_refused(smollm2, tmp_path):
    path = Path(shutil.copy(smollm2, tmp_path / "m.gguf"))
    with path.open("r+b") as file:
        file.truncate(50_000_000)
    assert "is truncated: its tensors end at byte 98,362,432 but the file has 50,000,000" in refusal(path)
