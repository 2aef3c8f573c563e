"""Kernel calls that are written down once and run again: the same as when they are made one by one."""

import logging

import pytest
import torch

from paceline.worker.kernels import elements, native
from paceline.worker.kernels.program import NotOurs, Program, _Memory
from paceline.worker.quant import product
from paceline.worker.quant.formats import BF16, FORMATS, NarrowWeight
from paceline.worker.quant.product import KernelProduct
from tests.models import tiny_llama_folder
from tests.worker.cores import needs_kernel, num_threads
from tests.worker.drive import Driver, Row, rank_of
from tests.worker.families import FAMILIES

CAPACITY = 40
ONES = torch.ones(8)


@pytest.fixture(params=["bf16", *FORMATS])
def layer(request):
    """Norms and products in turn: x fp32 [tokens, 64] -> fp32 [tokens, 64]."""
    torch.manual_seed(0)
    weights = [torch.randn(128, 64) * 0.1, torch.randn(64, 128) * 0.1]
    narrow = [
        NarrowWeight(BF16, weight.bfloat16()) if request.param == "bf16" else FORMATS[request.param].narrow(weight)
        for weight in weights
    ]
    up, down = (KernelProduct(weight, None, product._kernel()) for weight in narrow)
    ones = torch.ones(128)

    def compute(x):
        wide = up(elements.rms_norm(x, ones[:64], 1e-5, torch.bfloat16), dtype=torch.float32)
        return down(elements.rms_norm(wide, ones, 1e-5, torch.bfloat16), x)

    return compute


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_program_gives_the_bits_of_its_calls_for_any_number_of_tokens(layer, threads):
    x = torch.zeros(CAPACITY, 64)
    with torch.inference_mode(), num_threads(threads):
        program = Program(lambda: layer(layer(x)), CAPACITY)
        for num_tokens in (CAPACITY, 1, 7, 0, 33):
            new = torch.randn(num_tokens, 64)
            x[:num_tokens] = new
            program.run(num_tokens)
            assert torch.equal(program.result[:num_tokens], layer(layer(new)))


@needs_kernel
def test_memory_is_used_again_so_that_more_layers_need_no_more(layer):
    x = torch.zeros(CAPACITY, 64)

    def deep(y, depth):
        for _ in range(depth):
            y = layer(y)
        return y

    with torch.inference_mode():
        few, many = (Program(lambda depth=depth: deep(x, depth), CAPACITY) for depth in (3, 30))
    assert many.num_calls == 10 * few.num_calls
    assert len(many._memory._kept) == len(few._memory._kept)


def test_a_view_keeps_the_memory_of_what_was_let_go():
    memory = _Memory()
    with torch.inference_mode(), memory:
        whole = torch.empty(4, 32)
        part = whole.view(2, 64)[:, :8]
        del whole
        other = torch.empty(4, 32)
        assert other.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        kept = part.untyped_storage().data_ptr()
        del part
        again = torch.empty(4, 32)
    assert again.untyped_storage().data_ptr() == kept


@needs_kernel
@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.bfloat16(), "to"),
        (lambda x: x.t().contiguous(), "contiguous|clone"),
        (lambda x: elements.rms_norm(x[:3], ONES, 1e-5, torch.float32), "rows"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name_and_calls_work_as_before(compute, reason):
    x = torch.ones(16, 8)
    with torch.inference_mode():
        with pytest.raises(NotOurs, match=reason):
            Program(lambda: compute(x), 16)
        assert torch.equal(elements.rms_norm(x, ONES, 0.0, torch.float32), x)


def steps(rank) -> list[list[int]]:
    """Prompts in chunks, decodes beside them, and a decode alone."""
    driver = Driver(rank, seed=3)
    rows = [
        [Row(0, 0, 12, 0), Row(1, 0, 30)],
        [Row(0, 12, 9), Row(1, 30, 1)],
        [Row(0, 21, 1), Row(1, 31, 1)],
        [Row(0, 22, 1)],
    ]
    for slot, length in ((0, 21), (1, 30)):
        driver.admit(slot, [(7 * i + slot) % 300 + 3 for i in range(length)])
    return [list(driver.step(*step).ids) for step in rows]


@needs_kernel
def test_a_model_gives_the_same_ids_as_one_program_and_call_by_call(tmp_path):
    folder = tiny_llama_folder(tmp_path / "tiny")
    whole = rank_of(folder, dtype="bfloat16", num_threads=2)
    assert whole.runner.layers._captured is not None
    single = rank_of(folder, dtype="bfloat16", num_threads=1)
    single.runner.layers._captured = None
    assert steps(whole) == steps(single)


@needs_kernel
def test_a_model_with_more_than_our_kernels_do_runs_call_by_call_and_says_so(tmp_path, caplog):
    folder = tmp_path / "tiny"
    FAMILIES["qwen3"].make(folder)
    with caplog.at_level(logging.INFO, "paceline.worker"):
        rank = rank_of(folder, dtype="bfloat16", num_threads=1)
    assert rank.runner.layers._captured is None
    assert "call by call: no kernel of ours does" in caplog.text
    assert all(steps(rank))


def test_without_the_library_layers_are_the_models(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_load", lambda: (None, "the library was not built"))
    rank = rank_of(tiny_llama_folder(tmp_path / "tiny"), num_threads=1)
    assert rank.runner.layers is rank.runner.model
