"""Formats of weights, their products, and models that are loaded with them."""

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from paceline.proto.errors import StartupError
from paceline.worker.card import fingerprint
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.config import RankConfig
from paceline.worker.fits import fits, read_model
from paceline.worker.layers.linear import Linear, pack
from paceline.worker.loader import narrow_layers, weight_bytes
from paceline.worker.models import model_class
from paceline.worker.quant import product
from paceline.worker.quant.formats import BF16, FORMATS, KEPT, NAMES, Format, NarrowWeight, find
from paceline.worker.quant.product import KernelProduct, PlainProduct, product_bytes, product_of, why_no_kernel
from tests.models import tiny_llama_folder, write_gguf
from tests.worker.cores import instructions, needs_kernel, num_threads
from tests.worker.crew import gang_config
from tests.worker.drive import Driver, rank_of

CPU = torch.device("cpu")
FP32 = torch.float32
NARROW = {**FORMATS, **KEPT}
# How far a product may be from that of the plain weight: rounding of inputs to 16 bits, or to 8.
NEAR = {16: 1e-4, 8: 2e-2}
WITH_PRODUCTS = ["avx512_bf16", "avx2"]  # sets of instructions


def weight(out_size: int, in_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize(("name", "error"), [("int8", 0.006), ("Q8_0", 0.007), ("int4", 0.09), ("Q4_0", 0.1)])
def test_a_format_is_as_near_as_its_bits_allow(name, error):
    plain = weight(70, 128)
    narrow = NARROW[name].narrow(plain.clone())
    assert int(narrow.values.max()) < 1 << narrow.format.bits
    assert (narrow.plain() - plain).norm() < error * plain.norm()


@pytest.mark.parametrize("name", NARROW)
def test_groups_of_zeros_and_of_equal_values_stay_what_they_are(name):
    plain = torch.zeros(32, 128)
    plain[3] = 0.25
    torch.testing.assert_close(NARROW[name].narrow(plain.clone()).plain(), plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("seed", range(4))
def test_a_quantized_file_s_integers_are_found_again(kind, seed):
    raw = gguf.quants.quantize(weight(48, 256, seed).numpy(), Q[kind])
    stored = torch.from_numpy(gguf.quants.dequantize(raw, Q[kind]))
    assert torch.equal(KEPT[kind].narrow(stored.clone()).plain(), stored)


def test_eight_bits_with_a_minimum_hold_what_four_bits_held():
    stored = KEPT["Q4_1"].narrow(weight(32, 256)).plain()
    torch.testing.assert_close(FORMATS["int8"].narrow(stored.clone()).plain(), stored, atol=2e-4, rtol=0)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(NARROW)),
    by=st.sampled_from(WITH_PRODUCTS),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 6),
    rows=st.integers(1, 40),
    threads=st.integers(1, 3),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_the_kernel_agrees_with_the_plain_weight(name, by, outputs, groups, rows, threads, extras):
    has_bias, has_add, is_bf16 = extras
    narrow = NARROW[name].narrow(weight(outputs, groups * NARROW[name].group))
    bias = torch.randn(outputs) if has_bias else None
    x = torch.randn(rows, narrow.values.shape[1]) * torch.rand(rows, 1) * 10
    add = torch.randn(rows, outputs) if has_add else None
    if is_bf16:
        x = x.bfloat16()
    with num_threads(threads), instructions(by):
        found = KernelProduct(narrow, bias, product._kernel())(x, add, FP32)
    expected = PlainProduct(narrow, bias, FP32)(x, add, FP32)
    limit = NEAR[narrow.format.input_bits] * x.float().abs().amax() * narrow.plain().norm(dim=1).amax() + 1e-5
    assert (found - expected).abs().max() <= limit


@needs_kernel
@pytest.mark.parametrize("by", WITH_PRODUCTS)
@pytest.mark.parametrize("name", [*NARROW, "bf16"])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(name, by):
    plain = weight(100, 192)
    narrow = NarrowWeight(BF16, plain.bfloat16()) if name == "bf16" else NARROW[name].narrow(plain)
    x, add = torch.randn(250, 192).bfloat16(), torch.randn(250, 100)
    multiply = KernelProduct(narrow, None, product._kernel())
    with num_threads(3), instructions(by):
        together = multiply(x, add)
    with num_threads(1), instructions(by):
        for row in (0, 1, 100, 249):
            assert torch.equal(multiply(x[row : row + 1], add[row : row + 1]), together[row : row + 1])


@needs_kernel
@pytest.mark.parametrize("by", WITH_PRODUCTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, 200])
@pytest.mark.parametrize("in_size", [64, 70])
def test_bf16_by_the_kernel_agrees_with_torch(rows, in_size, by):
    plain, bias = weight(70, in_size).bfloat16(), torch.randn(70).bfloat16()
    x, add = torch.randn(rows, in_size).bfloat16(), torch.randn(rows, 70)
    ours, theirs = pack(plain, bias, torch.bfloat16), functional.linear(x.float(), plain.float(), bias.float())
    assert isinstance(ours, KernelProduct)
    with instructions(by):
        torch.testing.assert_close(ours(x).float(), theirs, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(ours(x, add), theirs + add, atol=1e-4, rtol=1e-4)
        assert ours(x, dtype=FP32).dtype == FP32
        x[0, 0] = float("nan")
        assert ours(x)[0].isnan().all()


@pytest.mark.parametrize("name", NARROW)
def test_bytes_are_known_before(name):
    narrow = NARROW[name].narrow(weight(70, 128))
    assert product_of(narrow, None, FP32).nbytes == product_bytes(NARROW[name], 128, 70, FP32)


def test_without_the_kernel_a_narrow_weight_is_multiplied_as_a_plain_one(monkeypatch):
    monkeypatch.setattr(product.native, "library", lambda: None)
    monkeypatch.setattr(product.native, "why_not", lambda: "it is not there")
    assert why_no_kernel() == "it is not there"
    linear = Linear(64, 48, bias=True, dtype=torch.bfloat16)
    linear.narrow_to(FORMATS["int8"])
    linear.weight.copy_(weight(48, 64))
    linear.bias.zero_()
    linear.pack()
    assert isinstance(linear.packed, PlainProduct)
    assert linear.packed.nbytes == product_bytes(FORMATS["int8"], 64, 48, torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(linear(x).float(), x.float() @ weight(48, 64).T, atol=0.05, rtol=0.05)


def test_a_file_of_one_kind_keeps_it_and_mixed_parts_take_eight_bits():
    assert find("gguf", ["Q4_0", "Q4_0"]) is KEPT["Q4_0"]
    for kinds in (["Q4_0", "Q4_1"], ["Q6_K"], [""]):
        assert find("gguf", kinds) is FORMATS["int8"]


@pytest.mark.parametrize(
    ("format", "device", "dtype", "in_size", "said"),
    [
        (FORMATS["int8"], CPU, FP32, 64, None),
        (FORMATS["int8"], torch.device("cuda"), FP32, 64, "on a CPU only"),
        (FORMATS["int8"], CPU, torch.float16, 64, "--dtype bfloat16 or float32"),
        (FORMATS["int4"], CPU, FP32, 48, "48 inputs on a rank, which are no multiple of 32"),
    ],
)
def test_a_format_says_why_not(format: Format, device, dtype, in_size, said):
    reason = format.why_not(device, dtype, in_size)
    assert reason is None if said is None else said in reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("narrow"))


def test_unknown_formats_and_layers_that_cannot_have_one_are_refused_by_flag(folder):
    with pytest.raises(StartupError, match="--quantization fp3 is not known; int8, w8a8, int4, gguf are"):
        rank_of(folder, quantization="fp3")
    with pytest.raises(StartupError, match="--quantization int8 cannot be had here: it goes with --dtype"):
        rank_of(folder, quantization="int8", dtype="float16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_answers_in_every_format_and_weighs_what_was_said(folder, name, dtype):
    rank = rank_of(folder, quantization=name, dtype=dtype)
    assert len(Driver(rank).generate(0, [1, 5, 9], 4)) == 4
    spec = open_checkpoint(folder).spec
    model = model_class(spec)(spec, rank.dtype)
    narrow_layers(model, {}, name, CPU)
    assert weight_bytes(model, CPU) == rank.held.weight_bytes
    assert f"with {name} weights" in rank.describe()


def test_a_file_kept_as_it_is_answers_as_its_plain_weights_do(folder, tmp_path):
    file = write_gguf(folder, tmp_path / "m.gguf", kind="Q8_0")
    plain, kept = (Driver(rank_of(file, quantization=name)).generate(0, [1, 5, 9], 8) for name in (None, "gguf"))
    assert plain == kept


def test_the_fingerprint_tells_formats_apart(folder):
    checkpoint = open_checkpoint(folder)
    prints = {fingerprint(checkpoint, "bfloat16", name) for name in (None, *NAMES)}
    assert len(prints) == 1 + len(NAMES)


def test_fits_counts_narrow_weights(folder):
    def need(name: str | None) -> int:
        config = RankConfig(model="", served_model_name="m", quantization=name, max_model_len=64)
        return fits(read_model(folder), config, "24", "cpu").needs[0].weights

    assert need("int4") < need("int8") < need(None)


@pytest.mark.parametrize("name", ["int8"])
def test_tensor_ranks_with_narrow_shares_answer_as_one_rank(folder, crew, name):
    gang = crew.gang(gang_config(folder, 2, 1, quantization=name))
    together = Driver(gang).generate(0, [1, 5, 9], 6)
    assert together == Driver(rank_of(folder, quantization=name)).generate(0, [1, 5, 9], 6)
    assert max(held.weight_bytes for held in gang.held) < rank_of(folder, quantization=name).held.weight_bytes
