"""Backends against attention written out, row by row, over a cache whose blocks lie scattered; and one another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.proto.errors import StartupError
from paceline.proto.request import SamplingParams
from paceline.proto.step import SlotInit, StepPlan, column
from paceline.worker.attention.base import BACKENDS, select
from paceline.worker.attention.cpu import CpuAttention
from paceline.worker.attention.torch import TorchAttention, _runs
from paceline.worker.batch import build_batch
from paceline.worker.kv_cache import KVCache
from paceline.worker.models.spec import ModelSpec
from paceline.worker.shards import Shards
from paceline.worker.table import SlotTable
from tests.worker.cores import instructions

BLOCK, MAX_LEN, DIM = 4, 256, 16
COMPUTED_BY = {"torch": TorchAttention, "cpu": CpuAttention}


@pytest.fixture(params=COMPUTED_BY)
def backend(request):
    return COMPUTED_BY[request.param]()


def spec_of(num_heads: int, num_kv_heads: int, window: int = 0, dim: int = DIM) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        hidden_size=num_heads * dim,
        intermediate_size=1,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        vocab_size=1,
        max_position=MAX_LEN,
        norm_eps=1e-5,
        windows=(window,) if window else (),
    )


def attend(q, k, v, scale, window=0, softcap=0.0, sinks=None):
    """One query over its whole context: q [heads, dim], k and v [context, kv_heads, dim], sinks [heads]."""
    group = q.shape[0] // k.shape[1]
    k, v = (x[-window:].repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,chd->hc", q, k).mul(scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None]), 1)
    weights = scores.softmax(-1)[:, : len(k)]
    return torch.einsum("hc,chd->hd", weights, v).flatten()


class Case:
    """Sequences with random keys and values; ``rows`` (slot, start, length, write) of one step over them.

    ``options`` are the backend's: window, softcap, sinks (True: random ones). Blocks that a window left are somebody
    else's, with large values.
    """

    def __init__(self, rows, num_heads=6, num_kv_heads=2, dtype=torch.float32, dim=DIM, block=BLOCK, **options):
        torch.manual_seed(0)
        self.rows, self.block, self.options = rows, block, {"scale": 1 / math.sqrt(dim), **options}
        if options.get("sinks"):
            self.options["sinks"] = torch.randn(num_heads, dtype=dtype)
        max_len = max(MAX_LEN, *(start + length for _, start, length, _ in rows)) // block * block + block
        window = options.get("window", 0)
        slots = max(row[0] for row in rows) + 1
        self.table = SlotTable(slots, max_len, block)
        params = SamplingParams(seed=0)
        admissions = [
            SlotInit(slot=s, epoch=0, token_ids=column(), num_prompt=0, choice=0, params=params) for s in range(slots)
        ]
        self.table.apply(StepPlan(step_id=1, admissions=admissions))
        per_slot = max_len // block
        blocks = 1 + torch.randperm(slots * per_slot).view(slots, per_slot)
        self.table.block_table[0] = blocks.numpy()
        spec = spec_of(num_heads, num_kv_heads, window, dim)
        self.cache = KVCache(spec, Shards.of(spec).of_rank(), slots * per_slot, block, dtype, torch.device("cpu"))
        self.k, self.v = (torch.randn(slots, max_len, num_kv_heads, dim, dtype=dtype) for _ in range(2))
        self.q = torch.randn(slots, max_len, num_heads, dim, dtype=dtype)
        self.filled_by = None

    def fill(self, backend) -> None:
        """With what earlier steps left: all before, and the chunk where it writes nothing. How it lies there is the
        backend's affair."""
        self.filled_by = backend
        known = [(slot, 0, start if write else start + length, 1) for slot, start, length, write in self.rows]
        known = [row for row in known if row[2]]
        if known:
            self.step(backend, known)
        window = self.options.get("window", 0)
        if not window:
            return
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor[0] = 1e4
        for slot, start, _, _ in self.rows:
            self.table.block_table[0, slot, : max(start - window + 1, 0) // self.block] = 0

    def run(self, backend, rows=None) -> list[torch.Tensor]:
        """Output of every row, [length, heads * dim], in the order of ``rows``, which may be others than the case's."""
        if self.filled_by is None:
            self.fill(backend)
        assert isinstance(backend, type(self.filled_by)), "each backend has its own order of the cache"
        return self.step(backend, rows or self.rows)

    def step(self, backend, rows) -> list[torch.Tensor]:
        slots, starts, lengths, writes = zip(*rows, strict=True)
        zeros = column([0] * len(slots))
        plan = StepPlan(
            step_id=2,
            chunk_slots=column(slots),
            chunk_epochs=zeros,
            chunk_starts=column(starts),
            chunk_lens=column(lengths),
            chunk_tokens=column([-1] * len(slots)),
            chunk_takes=zeros,
            chunk_writes=column(writes),
            num_drafts=zeros,
        )
        batch = build_batch(plan, self.table, self.block)
        spans = [rows[row] for row in batch.order]
        q, k, v = (torch.cat([x[s, a : a + n] for s, a, n, _ in spans]) for x in (self.q, self.k, self.v))
        metadata = backend.prepare(batch, self.block, 0, self.options.get("window", 0))
        out = backend.forward(q, k, v, self.cache.keys[0], self.cache.values[0], metadata, **self.options)
        by_row = dict(zip(batch.order.tolist(), out.split(batch.lengths.tolist()), strict=True))
        return [by_row[row] for row in range(len(rows))]

    def expected(self) -> list[torch.Tensor]:
        k, v, q = self.k.float(), self.v.float(), self.q.float()
        return [
            torch.stack([attend(q[s, p], k[s, : p + 1], v[s, : p + 1], **self.options) for p in range(a, a + n)])
            for s, a, n, _ in self.rows
        ]


CASES = {
    "one decode": [(0, 37, 1, 1)],
    "the first token of all": [(0, 0, 1, 1)],
    "decodes of one length": [(s, 30, 1, 1) for s in range(3)],
    "decodes of many lengths": [(s, n, 1, 1) for s, n in enumerate((200, 0, 3, 4, 70, 15, 16, 133))],
    "a whole prompt": [(0, 0, 19, 1)],
    "a later chunk": [(0, 13, 7, 1)],
    "a block-aligned chunk": [(0, 16, 8, 1)],
    "all at once": [(0, 5, 9, 1), (1, 80, 1, 1), (2, 0, 12, 1), (3, 2, 1, 1), (4, 64, 5, 1)],
    "rows that write nothing": [(0, 40, 1, 0), (1, 40, 1, 1), (2, 8, 3, 0)],
}


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("case", CASES)
def test_every_row_sees_its_own_context_and_no_more(case, heads, backend):
    step = Case(CASES[case], *heads)
    for ours, theirs in zip(step.run(backend), step.expected(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


LONG = {
    "a prompt of more than one tile": [(0, 0, 200, 1)],
    "a later chunk of more than one tile": [(0, 70, 150, 1), (1, 3, 140, 1)],
}
OPTIONS: dict[str, dict] = {
    "only itself": {"window": 1},
    "a window within a block": {"window": 3},
    "a window of whole blocks": {"window": 16},
    "a window wider than a tile": {"window": 131},
    "a soft cap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all of them": {"window": 21, "softcap": 1.5, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES | LONG)
def test_windows_soft_caps_and_sinks_are_as_written_out(case, options, backend):
    step = Case((CASES | LONG)[case], **OPTIONS[options])
    for ours, theirs in zip(step.run(backend), step.expected(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"window": 21}, {"window": 131}, {"window": 21, "softcap": 1.5}])
@pytest.mark.parametrize("rows", [CASES["all at once"], *LONG.values()], ids=["all at once", *LONG])
def test_bf16_is_close(rows, options, backend):
    step = Case(rows, dtype=torch.bfloat16, **options)
    for ours, theirs in zip(step.run(backend), step.expected(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=0.03, rtol=0)


@st.composite
def steps(draw):
    """Shapes that some model has, and a step of decodes and chunks over scattered blocks."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 7, 20)))
    row = st.tuples(
        st.one_of(st.integers(0, 150), st.integers(0, 150), st.integers(1000, 1100)),
        st.one_of(st.just(1), st.integers(1, 70)),
        st.sampled_from((1, 1, 1, 0)),
    )
    rows = [(slot, *row) for slot, row in enumerate(draw(st.lists(row, min_size=1, max_size=4)))]
    return {
        "rows": rows,
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "dim": draw(st.sampled_from((16, 24, 40, 64, 80, 128, 256))),
        "block": draw(st.sampled_from((1, 4, 16, 24))),
        "window": draw(st.sampled_from((0, 0, 1, 30, 64, 1030))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 0.9, 50.0))),
        "sinks": draw(st.sampled_from((None, True))),
    }


@given(steps())
@settings(deadline=None, max_examples=25)
def test_the_kernel_gives_what_torch_gives(step):
    for ours, theirs in zip(Case(**step).run(CpuAttention()), Case(**step).run(TorchAttention()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["avx512", "avx2", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_older_instructions_give_the_same_within_rounding(name, dtype):
    rows = [(0, 1000, 90, 1), (1, 80, 1, 1), (2, 0, 33, 1), (3, 2, 1, 0)]
    for options in ({}, {"window": 40, "softcap": 1.5, "sinks": True}):
        case = Case(rows, 9, 3, dtype, dim=40, **options)
        expected = case.run(CpuAttention())
        with instructions(name):
            outs = case.run(CpuAttention())
        for ours, theirs in zip(outs, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)


@given(steps())
@settings(deadline=None, max_examples=10)
def test_in_bf16_the_kernel_is_as_close_to_the_truth_as_torch(step):
    case = Case(**step, dtype=torch.bfloat16)
    wide = Case(**step)
    for name in ("q", "k", "v"):
        setattr(wide, name, getattr(case, name).float())
    if case.options["sinks"] is not None:
        wide.options["sinks"] = case.options["sinks"].float()
    truth = torch.cat([row.flatten() for row in wide.run(TorchAttention())])
    ours, theirs = (
        torch.cat([row.flatten() for row in Case(**step, dtype=torch.bfloat16).run(backend)]).float()
        for backend in (CpuAttention(), TorchAttention())
    )
    assert (ours - truth).abs().max() <= 1.2 * (theirs - truth).abs().max() + 2**-7


@given(steps(), st.data())
@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_alone_and_in_company_in_pieces_and_whole(dtype, step, data):
    whole = Case(**step, dtype=dtype)
    outs = whole.run(CpuAttention())
    index = data.draw(st.integers(0, len(outs) - 1))
    slot, start, length, write = step["rows"][index]
    cut = data.draw(st.integers(1, length))
    for first, num in ((start, cut), (start + cut, length - cut)):
        if num:
            alone = whole.run(CpuAttention(), [(slot, first, num, write)])
            assert torch.equal(alone[0], outs[index][first - start : first - start + num])


def test_only_blocks_within_the_window_are_gathered():
    step = Case([(0, 200, 1, 1), (1, 150, 6, 1)], window=10)
    assert _gathered(step) == [4, 4]  # positions 191 to 200, and 141 to 155


def _gathered(step: Case) -> list[int]:
    seen: list[int] = []

    class Watched(TorchAttention):
        def prepare(self, *args):
            metadata = super().prepare(*args)
            parts = (*metadata.decodes, *metadata.chunks)
            seen.extend(len(part.blocks) for part in parts if part.blocks is not None)
            return metadata

    step.fill(Watched())
    seen.clear()
    step.run(step.filled_by)
    return seen


def test_keys_and_values_of_the_step_are_in_the_cache_afterwards(backend):
    step = Case([(0, 5, 9, 1), (1, 20, 1, 1)])
    step.run(backend)
    for slot, position in ((0, 5), (0, 13), (1, 20)):
        block = step.table.block_table[0, slot, position // BLOCK]
        torch.testing.assert_close(step.cache.keys[0][block, position % BLOCK], step.k[slot, position])
        torch.testing.assert_close(step.cache.values[0][block, position % BLOCK], step.v[slot, position])


def test_what_is_no_number_stays_in_its_row(backend):
    step = Case([(0, 30, 1, 1), (1, 2, 20, 1), (2, 40, 1, 1)])
    step.fill(backend)
    step.q[0, 30] = step.v[1, 3] = math.nan
    outs = step.run(backend)
    assert outs[0].isnan().all()
    assert outs[1][1:].isnan().all()
    assert not outs[2].isnan().any()


def test_a_row_that_writes_nothing_leaves_its_blocks_alone(backend):
    step = Case([(0, 10, 1, 0)])
    step.fill(backend)
    before = step.cache.keys[0][1:].clone()
    step.run(backend)
    assert torch.equal(step.cache.keys[0][1:], before)


def test_decodes_of_unlike_lengths_are_not_padded_to_the_longest():
    import numpy as np

    runs = _runs(np.array([1, 2, 9, 10, 10, 200, 210, 4000]))
    assert runs == [(0, 5), (5, 7), (7, 8)]
    assert _runs(np.array([], dtype=np.int64)) == []


def test_block_copies_take_every_source_as_it_was():
    spec = spec_of(2, 1)
    cache = KVCache(spec, Shards.of(spec).of_rank(), 4, BLOCK, torch.float32, torch.device("cpu"))
    for block in range(5):
        cache.keys[0][block] = block
    copies = column([0, 0]), column([1, 2]), column([2, 3])
    cache.copy_blocks(StepPlan(step_id=1, copy_groups=copies[0], copy_srcs=copies[1], copy_dsts=copies[2]))
    assert [int(cache.keys[0][block].mean()) for block in range(5)] == [0, 1, 1, 2, 4]


def test_an_unknown_backend_is_refused_with_what_would_work():
    with pytest.raises(StartupError, match=r"--attention-backend flush is not known; would work here: .*torch"):
        select("flush", torch.device("cpu"), torch.float32, 64)


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setitem(BACKENDS, "missing", ("paceline.worker.attention.missing", "MissingAttention"))
    with pytest.raises(StartupError, match=r"--attention-backend missing cannot run here: .*cannot be imported"):
        select("missing", torch.device("cpu"), torch.float32, 64)
    assert isinstance(select("torch", torch.device("cpu"), torch.bfloat16, 64), TorchAttention)


def test_on_a_cpu_our_kernel_goes_first():
    assert isinstance(select("auto", torch.device("cpu"), torch.bfloat16, 64), CpuAttention)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cuda", torch.bfloat16, 64, "on the CPU"),
        ("cpu", torch.float16, 64, "bfloat16 and float32"),
        ("cpu", torch.bfloat16, 100, "multiple of 8"),
        ("cpu", torch.bfloat16, 64, None),
    ],
)
def test_our_kernel_says_where_it_cannot_run(device, dtype, head_dim, reason):
    answer = CpuAttention.why_not(torch.device(device), dtype, head_dim)
    assert answer is None if reason is None else reason in answer
