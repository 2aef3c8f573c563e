"""A step may not get slower unnoticed: what it does is counted (counts.py), and held under bounds that lie here.

A change that needs more raises them, and says in its review what for; one that needs less lowers them.
"""

import pytest

from paceline.worker.kernels import native
from tests.bench.counts import Counts, decode, prefill
from tests.e2e.engine import Bench
from tests.models import tiny_llama_folder
from tests.worker.cores import needs_kernel

# A step of two layers, one sequence: (ops of torch, calls of our kernels, calls of our Python functions).
BOUNDS = {
    "cpu": {"decode": (82, 11, 175), "prefill": (82, 11, 210)},
    "torch": {"decode": (138, 0, 170), "prefill": (138, 0, 200)},
}
BF16_OPS, BF16_CALLS = 60, 135  # of 16 sequences, whatever the number of layers
PER_DECODE = 2  # Python calls for each further sequence that decodes: it is planned and its id is taken in
# Ops and Python calls for each further sequence that is admitted. The reference attends to prompts one by one.
PER_ADMISSION = {"cpu": (6, 40), "torch": (36, 50)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("counts") / "model")


@pytest.fixture(params=["cpu", "torch"])
def bench(request, model, monkeypatch):
    """With our kernels, where they were built, and with torch alone."""
    backend = request.param
    if backend == "torch" or native.library() is None:
        monkeypatch.setattr(native, "library", lambda: None)
        backend = "torch"
    bench = Bench(model, attention_backend=backend, max_model_len=64)
    yield backend, bench
    bench.close()


@pytest.mark.parametrize("step", [decode, prefill], ids=lambda step: step.__name__)
def test_a_step_stays_within_its_bounds(bench, step):
    backend, engine = bench
    counts = step(engine, 1)
    most = BOUNDS[backend][step.__name__]
    assert all(counted <= bound for counted, bound in zip(counts.totals, most, strict=True)), _told(counts, most)


@needs_kernel
@pytest.mark.parametrize("layers", [2, 6])
def test_in_bf16_all_layers_are_one_call(tmp_path, layers):
    """Beside it the last norm, the head, and the best logits once more."""
    folder = tiny_llama_folder(tmp_path / "model", num_hidden_layers=layers)
    bench = Bench(folder, dtype="bfloat16", attention_backend="cpu", max_model_len=64)
    counts = decode(bench, 16)
    bench.close()
    assert counts.kernels["paceline_replay"] == 1
    most = (BF16_OPS, 4, BF16_CALLS)
    assert all(counted <= bound for counted, bound in zip(counts.totals, most, strict=True)), _told(counts, most)


def test_a_decoding_sequence_more_costs_no_op_and_next_to_no_python(bench):
    _, engine = bench
    one, many = decode(engine, 1), decode(engine, 16)
    assert many.ops == one.ops
    assert many.kernels == one.kernels
    assert many.python.total() - one.python.total() <= 15 * PER_DECODE, many.python - one.python


def test_an_admission_costs_a_few_ops_whatever_the_model_is(bench):
    backend, engine = bench
    one, many = prefill(engine, 1), prefill(engine, 16)
    num_ops, num_calls = PER_ADMISSION[backend]
    assert many.ops.total() - one.ops.total() <= 15 * num_ops, many.ops - one.ops
    assert many.kernels == one.kernels
    assert many.python.total() - one.python.total() <= 15 * num_calls, many.python - one.python


def _told(counts: Counts, most: tuple[int, int, int]) -> str:
    lines = [f"{counts.totals} of {most} (ops, kernels, Python calls)"]
    return "\n".join([*lines, *(f"{kind}: {counter.most_common(30)}" for kind, counter in vars(counts).items())])
