"""Every head, column, id and layer of a model is held by the ranks once, in order, and KV groups stay whole."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.errors import StartupError
from paceline.worker.shards import Part, Shards
from tests.worker.test_loader import spec_of


@st.composite
def shapes(draw):
    """A spec, and sizes of groups that it can be cut to."""
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    spec = spec_of(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        num_layers=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(96, 20000)),
        vocab_size=draw(st.integers(96, 200000)),
    )
    return spec, draw(st.integers(1, kv_heads * group)), draw(st.integers(1, spec.num_layers))


def sizes(parts) -> list[int]:
    return [part.size for part in parts]


def assert_covers(parts: tuple[Part, ...], whole: int) -> None:
    assert parts[0].start == 0
    assert parts[-1].stop == whole
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert all(part.size > 0 and part.whole == whole for part in parts)


@given(shapes())
def test_everything_is_held_once_and_in_order(shape):
    spec, tp, pp = shape
    shards = Shards.of(spec, tp, pp)
    assert {len(parts) for parts in (shards.heads, shards.kv_heads, shards.mlp, shards.vocab)} == {tp}
    assert len(shards.layers) == pp
    assert_covers(shards.heads, spec.num_heads)
    assert_covers(shards.mlp, spec.intermediate_size)
    assert_covers(shards.vocab, spec.vocab_size)
    assert_covers(shards.layers, spec.num_layers)
    if tp <= spec.num_kv_heads:
        assert_covers(shards.kv_heads, spec.num_kv_heads)
    else:
        assert set(sizes(shards.kv_heads)) == {1}
        assert {part.start for part in shards.kv_heads} == set(range(spec.num_kv_heads))


@given(shapes())
def test_a_rank_has_the_kv_heads_of_its_query_heads_and_no_other(shape):
    spec, tp, _ = shape
    shards = Shards.of(spec, tp)
    group = spec.num_heads // spec.num_kv_heads
    for heads, kv_heads in zip(shards.heads, shards.kv_heads, strict=True):
        assert {head // group for head in range(heads.start, heads.stop)} == set(range(kv_heads.start, kv_heads.stop))
        assert heads.size % kv_heads.size == 0  # query heads share KV heads evenly on each rank, too


@given(shapes())
def test_shares_are_about_equal(shape):
    spec, tp, pp = shape
    shards = Shards.of(spec, tp, pp)
    for parts in (shards.mlp, shards.vocab):
        assert max(sizes(parts)) - min(sizes(parts)) <= max(1, max(sizes(parts)) // 16)
    assert max(sizes(shards.layers)) - min(sizes(shards.layers)) <= 1
    assert shards.layers[-1].size == min(sizes(shards.layers))  # the last stage has the head, too


def test_columns_come_in_multiples_that_products_like_where_that_is_possible():
    wide = Shards.of(spec_of(num_heads=32, num_kv_heads=8, intermediate_size=14336, vocab_size=128256), 3)
    assert sizes(wide.mlp) == [74 * 64, 75 * 64, 75 * 64]
    assert all(size % 64 == 0 for size in sizes(wide.vocab))
    assert sizes(Shards.of(spec_of(intermediate_size=192), 2).mlp) == [96, 96]


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"),
    [(1, [9], [3]), (2, [6, 3], [2, 1]), (3, [3, 3, 3], [1, 1, 1]), (4, [2, 1, 3, 3], [1] * 4)],
)
def test_nine_heads_over_three_kv_heads(tp, heads, kv_heads):
    shards = Shards.of(spec_of(num_heads=9, num_kv_heads=3), tp)
    assert (sizes(shards.heads), sizes(shards.kv_heads)) == (heads, kv_heads)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"), [(30, 4, [7, 8, 8, 7]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2])]
)
def test_layers_left_over_go_to_the_middle_then_to_the_first_stage(layers, pp, expected):
    assert sizes(Shards.of(spec_of(num_layers=layers), 1, pp).layers) == expected


@pytest.mark.parametrize("tp", [0, 5, 64])
def test_more_ranks_than_heads_are_refused_with_the_sizes_that_work(tp):
    with pytest.raises(StartupError, match=rf"--tensor-parallel-size {tp} does not fit .* 4 heads; 1 to 4 work\."):
        Shards.of(spec_of(), tp)


@pytest.mark.parametrize("pp", [0, 3])
def test_more_stages_than_layers_are_refused_with_the_sizes_that_work(pp):
    with pytest.raises(StartupError, match=rf"--pipeline-parallel-size {pp} does not fit .* 2 layers; 1 to 2 work\."):
        Shards.of(spec_of(), 1, pp)


def test_the_table_is_known_where_no_torch_is():
    code = "import sys, paceline.worker.shards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
