"""The library of kernels: the small ones against their slow twins, and what happens where it is missing."""

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.worker.attention.base import select
from paceline.worker.attention.torch import TorchAttention
from paceline.worker.kernels import elements, native
from paceline.worker.layers.activation import ACTIVATIONS, gated
from paceline.worker.layers.norm import RMSNorm
from paceline.worker.layers.rotary import rotate
from tests.worker.cores import instructions

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = st.sampled_from(list(TOLERANCE))
sizes = st.integers(1, 150)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "_load", lambda: (None, "the library was not built"))


def twin_of(function, *args):
    """What a layer gives where there is no library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_load", lambda: (None, "the library was not built"))
        return function(*args)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


@given(dtypes, st.integers(0, 70), sizes)
@settings(deadline=None, max_examples=40)
def test_a_norm_is_torchs(dtype, rows, size):
    norm = RMSNorm(size, 1e-5, dtype=dtype, device=CPU)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(rows, size)
    assert_close(norm(x), twin_of(norm, x))


def test_a_norm_takes_heads_that_lie_among_others():
    norm = RMSNorm(16, 1e-5, dtype=torch.float32, device=CPU)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 6, 16)[:, 1:4]
    assert_close(norm(x), twin_of(norm, x))


@given(dtypes, st.integers(1, 70), st.integers(1, 5), st.integers(1, 80), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_a_rotation_is_torchs_and_leaves_the_rest_alone(dtype, tokens, heads, half, rest):
    dim = 2 * half
    both = torch.randn(tokens, heads + 2, dim + rest).to(dtype)
    x, others = both[:, :heads], both[:, heads:].clone()
    cos, sin = torch.randn(2, tokens, 1, dim).to(dtype)
    expected = twin_of(rotate, x.clone(), cos, sin)
    assert_close(rotate(x, cos, sin), expected)
    assert torch.equal(both[:, heads:], others)


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(dtypes, st.integers(0, 70), sizes)
@settings(deadline=None, max_examples=10)
def test_a_gate_is_torchs(name, dtype, tokens, size):
    x = (8 * torch.randn(tokens, 2 * size)).to(dtype)
    assert_close(gated(name)(x), twin_of(gated(name), x))


def test_gates_hold_at_the_ends():
    x = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30] + [1.0] * 5])
    for name in elements.GATES:
        assert gated(name)(x).tolist() == [[0.0, 0.0, 0.0, 200.0, pytest.approx(1e30)]]


@pytest.mark.parametrize("name", ["avx512", "avx2", "plain"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_older_instructions_give_the_same_within_rounding(name, dtype):
    norm = RMSNorm(70, 1e-5, dtype=dtype, device=CPU)
    torch.nn.init.normal_(norm.weight)
    x, heads, turn = torch.randn(9, 70), torch.randn(9, 3, 26).to(dtype), torch.randn(2, 9, 1, 20).to(dtype)

    def results():
        return norm(x), rotate(heads.clone(), *turn), gated("silu")(norm(x)), gated("gelu_new")(norm(x))

    expected = results()
    with instructions(name):
        for ours, theirs in zip(results(), expected, strict=True):
            assert_close(ours, theirs)


def test_instructions_that_are_not_there_are_not_taken():
    assert not native.use_instructions("avx9000")


def test_rows_come_out_the_same_alone_and_among_many():
    norm = RMSNorm(576, 1e-5, dtype=torch.float32, device=CPU)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(200, 576)
    assert torch.equal(norm(x)[7:8], norm(x[7:8]))
    assert torch.equal(gated("silu")(x)[7:8], gated("silu")(x[7:8]))


def test_without_the_library_torch_does_the_work(without_kernels):
    assert isinstance(select("auto", CPU, torch.bfloat16, 64), TorchAttention)
    assert not elements.takes(torch.zeros(1), torch.float32)


def test_a_missing_library_is_logged_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "PATH", tmp_path / "none.so")
    native._load.cache_clear()
    with caplog.at_level(logging.WARNING, logger="paceline.worker"):
        assert native.library() is None
        assert native.library() is None
    native._load.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "kernels of our own are not used, torch does their work more slowly: "
        "the library was not built (no C++ compiler?)"
    ]


def test_a_broken_library_is_a_missing_one(monkeypatch, tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native, "PATH", path)
    native._load.cache_clear()
    assert "cannot be loaded" in native.why_not()
    native._load.cache_clear()


def test_the_library_brings_no_second_pool_of_threads():
    """In a process of its own: what is loaded stays loaded."""
    code = (
        "from paceline.worker.kernels import native\n"
        "assert native.library() is not None\n"
        "names = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rpartition('/')[2]}\n"
        "assert len(names) == 1, names\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@given(dtypes, st.integers(0, 5), st.integers(1, 400), sizes, st.integers(1, 64))
@settings(deadline=None, max_examples=40)
def test_the_best_scores_are_computed_again_and_the_others_stay(dtype, rows, num, size, num_best):
    x, weight = torch.randn(rows, size), torch.randn(num, size).to(dtype)
    rough = x @ weight.float().T + torch.randn(rows, num) * 0.1
    best = rough.topk(min(num_best, num)).indices
    exact = torch.bmm(weight[best].float(), x.unsqueeze(2)).squeeze(2)
    expected = rough.scatter(1, best, exact)
    torch.testing.assert_close(elements.rescore_(rough.clone(), x, weight, num_best), expected, atol=1e-4, rtol=1e-4)


def test_scores_that_are_no_numbers_stay_none():
    scores, x, weight = torch.randn(2, 300), torch.randn(2, 8), torch.randn(300, 8)
    scores[0, 7] = torch.nan
    found = elements.rescore_(scores.clone(), x, weight, 32)
    assert found[0, 7].isnan()
    assert not found[1].isnan().any()
