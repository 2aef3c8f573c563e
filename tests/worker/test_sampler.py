"""Drawn ids follow the distribution that was asked for, and depend on (seed, choice, position) alone."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.proto.request import SamplingParams
from paceline.proto.step import SlotInit, StepPlan, column
from paceline.worker.noise import log_exponential, row_keys
from paceline.worker.sampler import Sampler
from paceline.worker.table import SlotTable

VOCAB = 50


def sample(logits, *params, positions=None, choices=None, ids=((),), num_prompt=0, vocab_size=None, eos_ids=()):
    """One draw per row of ``logits``; params and ids repeat over the rows. Returns Drawn."""
    rows = len(logits)
    table = SlotTable(rows, 64, 16)
    admissions = [
        SlotInit(
            slot=row,
            epoch=0,
            token_ids=column(ids[row % len(ids)]),
            num_prompt=num_prompt,
            choice=choices[row] if choices else 0,
            params=params[row % len(params)],
        )
        for row in range(rows)
    ]
    table.apply(StepPlan(step_id=1, admissions=admissions))
    where = np.array(positions if positions is not None else [len(ids[row % len(ids)]) for row in range(rows)])
    return Sampler(vocab_size or logits.shape[1], eos_ids)(logits, np.arange(rows), where, table)


def params(**fields) -> SamplingParams:
    return SamplingParams(**({"seed": 1} | fields))


def logits_of(rows=1, vocab=VOCAB, seed=0, spread=2.0) -> torch.Tensor:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return row.repeat(rows, 1)


def drawn_by_seed(logits_row, count=4000, **fields) -> Counter:
    """Draws of ``count`` different seeds, in batches."""
    found = Counter()
    for first in range(0, count, 500):
        settings = [params(**({"seed": 1000 + first + i} | fields)) for i in range(500)]
        found.update(sample(logits_row.repeat(500, 1), *settings).ids.tolist())
    return found


def chi_square(found: Counter, expected: torch.Tensor) -> float:
    """Standard score of Pearson's statistic; ids expected fewer than 5 times are one cell."""
    count = sum(found.values())
    cells = [(found[i], p * count) for i, p in enumerate(expected.tolist()) if p * count >= 5]
    rest = [(found[i], p * count) for i, p in enumerate(expected.tolist()) if p * count < 5]
    if sum(e for _, e in rest) >= 5:
        cells.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_largest():
    logits = torch.randn(8, VOCAB)
    assert torch.equal(sample(logits, params(temperature=0.0)).ids, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature):
    logits = logits_of()
    assert chi_square(drawn_by_seed(logits, temperature=temperature), (logits[0] / temperature).softmax(-1)) < 4


def filtered(logits, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The distribution written out: top-k, then top-p of what is left, then min-p."""
    weights = logits.softmax(-1)
    order = weights.argsort(descending=True)
    weights = weights[order]
    if top_k:
        weights[top_k:] = 0
    weights /= weights.sum()
    weights[(weights.cumsum(0) - weights) >= top_p] = 0
    weights[weights < min_p * weights[0]] = 0
    return torch.zeros_like(weights).scatter(0, order, weights / weights.sum())


FILTERS = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_softmax_and_nothing_else_is_drawn(filters):
    logits = logits_of(spread=1.0)
    expected = filtered(logits[0], **filters)
    found = drawn_by_seed(logits, **filters)
    assert all(expected[i] > 0 for i in found)
    assert chi_square(found, expected) < 4


@pytest.mark.parametrize("filters", [{"top_p": 0.999}, {"top_k": 6000, "top_p": 0.99}, {"top_k": 700}], ids=str)
def test_filters_are_exact_where_the_kept_set_is_larger_than_the_first_candidates(filters):
    logits = logits_of(vocab=9000, spread=0.3)
    kept = filtered(logits[0], **filters) > 0
    assert kept.sum() > 256
    settings = [params(seed=i, **filters) for i in range(200)]
    ids = sample(logits.repeat(200, 1), *settings).ids
    assert kept[ids].all()
    # The same noise over the kept set written out gives the same ids.
    first, second = row_keys(np.arange(200, dtype=np.uint64), np.zeros(200, np.int32), np.zeros(200, np.int64))
    noise = log_exponential(
        torch.from_numpy(first.copy())[:, None], torch.from_numpy(second.copy())[:, None], _all(9000)
    )
    assert torch.equal(ids, (logits.log_softmax(-1) - noise).masked_fill(~kept, -torch.inf).argmax(-1))


def _all(count):
    return torch.arange(count, dtype=torch.int32)


def test_a_row_draws_the_same_alone_and_among_others_of_every_kind():
    kinds = [
        params(seed=5),
        params(seed=6, temperature=0.0),
        params(seed=7, top_k=4),
        params(seed=8, top_p=0.5),
        params(seed=9, min_p=0.3, frequency_penalty=1.0),
        params(seed=10, logit_bias={3: 5.0}, logprobs=2),
    ]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    ids = ((1, 2, 3, 4),)
    together = sample(logits, *kinds, ids=ids, num_prompt=2).ids.tolist()
    alone = [int(sample(logits[i : i + 1], kind, ids=ids, num_prompt=2).ids) for i, kind in enumerate(kinds)]
    assert together == alone


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy_and_makes_no_nan(temperature):
    logits = torch.randn(4, VOCAB) * 30
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3}):
        assert torch.equal(sample(logits, params(temperature=temperature, **filters)).ids, logits.argmax(-1))


def test_padding_rows_of_the_embedding_are_never_drawn():
    logits = logits_of(rows=200)
    logits[:, 40:] = 100.0
    for fields in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 5}):
        drawn = sample(logits, *[params(**({"seed": i} | fields)) for i in range(200)], vocab_size=40)
        assert int(drawn.ids.max()) < 40
    assert int(drawn.logprobs.top_ids.max()) < 40


# -- penalties and bias ------------------------------------------------------------------------------------------------


def test_presence_and_frequency_count_generated_ids_only():
    # Prompt 1 1 1, then 2 2 3. With flat logits the penalties alone decide: raised by -1 each.
    logits = torch.zeros(1, VOCAB)
    ids = ((1, 1, 1, 2, 2, 3),)
    told = sample(logits, params(temperature=0.0, frequency_penalty=-1.0), ids=ids, num_prompt=3)
    assert told.ids.tolist() == [2]
    told = sample(
        logits + torch.eye(VOCAB)[3] * 0.5, params(temperature=0.0, presence_penalty=-1.0), ids=ids, num_prompt=3
    )
    assert told.ids.tolist() == [3]


def test_repetition_counts_prompt_and_generated_ids_and_pushes_both_signs_down():
    logits = torch.full((1, 6), -10.0)
    logits[0, :4] = torch.tensor([4.0, 3.9, 3.0, 2.5])
    ids = ((0, 1),)  # one of the prompt, one generated
    assert sample(logits, params(temperature=0.0, repetition_penalty=1.5), ids=ids, num_prompt=1).ids.tolist() == [2]
    negative = torch.tensor([[-1.0, -1.2]])
    assert sample(
        negative, params(temperature=0.0, repetition_penalty=1.5), ids=((0,),), num_prompt=1
    ).ids.tolist() == [1]


def test_ids_beyond_the_position_are_not_counted():
    # The table may hold ids of an earlier life beyond the position that is drawn.
    logits = torch.zeros(1, VOCAB)
    ids = ((4, 5, 9, 9, 9),)
    drawn = sample(logits, params(temperature=0.0, frequency_penalty=-1.0), ids=ids, positions=[2], num_prompt=1)
    assert drawn.ids.tolist() == [5]


def test_bias_moves_an_id_and_minus_hundred_bans_it():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 3.0
    assert sample(logits, params(temperature=0.0, logit_bias={11: 4.0})).ids.tolist() == [11]
    assert sample(logits, params(temperature=0.0, logit_bias={7: -100.0, 12: 0.1})).ids.tolist() == [12]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.9}], ids=str)
def test_before_min_tokens_no_end_is_drawn_whatever_speaks_for_it(fields):
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 9, 11]] = torch.tensor([50.0, 49.0, 48.0, 40.0])
    wants = params(min_tokens=2, stop_ids=(9, VOCAB + 3), logit_bias={3: 100.0}, logprobs=1, **fields)
    found = [sample(logits, wants, positions=[5 + i], num_prompt=5, eos_ids=(3, 4)) for i in range(3)]
    assert [int(drawn.ids) for drawn in found] == [11, 11, 3]
    assert found[0].logprobs.by_row()[0][0].top_ids == [3]  # of the raw distribution


def test_min_tokens_are_a_rows_own():
    logits = torch.zeros(4, VOCAB)
    logits[:, 3] = 9.0
    settings = [params(temperature=0.0, min_tokens=k, logit_bias={7: 1.0}) for k in (0, 3, 2, 0)]
    assert sample(logits, *settings, positions=[2] * 4, eos_ids=(3,)).ids.tolist() == [3, 7, 3, 3]


# -- log-probabilities and faults --------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution_and_only_for_rows_that_asked():
    logits = torch.randn(4, VOCAB)
    settings = [
        params(logprobs=3, temperature=0.3, logit_bias={2: 50.0}),
        params(),
        params(logprobs=0, temperature=0.0),
        params(logprobs=1, top_k=1, frequency_penalty=1.0),
    ]
    drawn = sample(logits, *settings)
    told = drawn.logprobs.by_row()
    assert set(told) == {0, 2, 3}
    raw = logits.log_softmax(-1)
    for row, count in ((0, 3), (2, 0), (3, 1)):
        [token] = told[row]
        assert token.logprob == pytest.approx(float(raw[row, drawn.ids[row]]), abs=1e-5)
        top = raw[row].topk(count)
        assert token.top_ids == top.indices.tolist()
        assert token.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    assert drawn.ids[0] == 2


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3, "logprobs": 2}], ids=str)
def test_a_broken_row_is_told_and_its_neighbours_draw_as_without_it(broken, fields):
    logits = torch.randn(3, VOCAB)
    alone = sample(logits, params(**fields)).ids
    logits[1, 17] = broken
    drawn = sample(logits, params(**fields))
    assert torch.isfinite(drawn.peaks).tolist() == [True, False, True]
    assert drawn.ids[[0, 2]].tolist() == alone[[0, 2]].tolist()


# -- noise -------------------------------------------------------------------------------------------------------------


def gumbel(seeds, choices, positions, vocab=2000) -> torch.Tensor:
    first, second = row_keys(np.asarray(seeds, np.uint64), np.asarray(choices), np.asarray(positions))
    keys = (torch.from_numpy(np.ascontiguousarray(word))[:, None] for word in (first, second))
    return -log_exponential(*keys, _all(vocab))


def test_noise_is_gumbel():
    noise = gumbel(range(500), [0] * 500, [3] * 500)
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    uniform = (-(-noise).exp()).exp()
    counts = torch.histc(uniform, 100, 0, 1)
    assert chi_square(Counter(dict(enumerate(counts.int().tolist()))), torch.full((100,), 0.01)) < 4


@pytest.mark.parametrize("what", ["seeds", "high seed words", "choices", "positions", "ids"])
def test_noise_of_neighbouring_counters_is_independent(what):
    rows = np.arange(300)
    zero = np.zeros(300, np.int64)
    noise = {
        "seeds": lambda: gumbel(rows, zero, zero),
        "high seed words": lambda: gumbel(rows.astype(np.uint64) << np.uint64(32), zero, zero),
        "choices": lambda: gumbel(zero, rows, zero),
        "positions": lambda: gumbel(zero, zero, rows),
        "ids": lambda: gumbel(rows, zero, zero).T[:300],
    }[what]()
    correlations = torch.corrcoef(noise)
    correlations.fill_diagonal_(0)
    bound = 5.5 / math.sqrt(noise.shape[1])  # of 45,000 pairs one lies beyond 4.2 standard errors
    assert correlations.abs().max() < bound
    assert correlations.mean().abs() < 0.002
    assert noise.argmax(-1).unique().numel() > 150


def test_positions_of_one_request_draw_the_softmax_too():
    logits = logits_of()
    drawn = sample(logits.repeat(4000, 1), params(seed=77), positions=list(range(4000)))
    assert chi_square(Counter(drawn.ids.tolist()), logits[0].softmax(-1)) < 4


def test_noise_never_changes():
    # A recorded request must draw the same ids after an upgrade: change these numbers only with a version of the API.
    noise = gumbel([1, 2**64 - 1], [0, 3], [7, 123456], vocab=3)
    recorded = torch.tensor([[3.1266, 3.02393, -0.28813], [1.02069, 4.13981, 2.12127]])
    torch.testing.assert_close(noise, recorded, atol=1e-5, rtol=1e-5)
