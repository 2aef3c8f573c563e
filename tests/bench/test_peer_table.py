"""The table of peers says what was measured: medians, ratios round by round, each peer at its best setting."""

import pytest

from tests.bench import peer_table
from tests.bench.peer_table import Shape, table, write_table

SMOLLM2 = Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152)


def results(**changes):
    def rounds(figure, *values):
        return [{figure: value} for value in values]

    about = {"ready_seconds": 6.0, "top_1": 0.99, "num_top_1": 200}
    return {
        "servers": {"paceline bf16": about, "vllm both cores": about, "vllm one core": about},
        "rows": {
            "decode-1": {
                "paceline bf16": rounds("output", 100.0, 120.0, 90.0),
                "vllm both cores": rounds("output", 50.0, 50.0, 50.0),
                "vllm one core": rounds("output", 60.0, 40.0, 60.0),
            }
        },
        "metal": {},
        "in_process": {},
        "missing": ["llamacpp is not installed"],
    } | changes


def row_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_a_ratio_is_the_median_of_the_rounds_ratios_to_the_best_setting():
    assert (
        row_of(table(results()), "| decode, 1 stream")
        == "| decode, 1 stream, tokens/s | 100 | 60.0 (one core) | 1.67 |"
    )


def test_of_latencies_the_lowest_setting_is_the_best():
    def gaps(longest):
        return [{"output": 1.0, "itl_p99": longest / 2, "itl_max": longest}] * 3

    rows = {"mixed": {"paceline bf16": gaps(100), "vllm both cores": gaps(400), "vllm one core": gaps(800)}}
    assert row_of(table(results(rows=rows)), "| mixed, between tokens, longest").endswith("| 400 (both cores) | 0.25 |")


def test_rows_and_peers_that_were_not_measured_are_told_or_left_out():
    text = table(results())
    assert "prefill" not in text
    assert "Not run: llamacpp is not installed." in text


def test_a_share_of_the_machine_is_the_median_of_the_rounds_shares(monkeypatch):
    monkeypatch.setattr(Shape, "of", classmethod(lambda cls, folder: SMOLLM2))
    runs = [{"read_gb_s": gb_s, "bf16_gflop_s": 900.0} for gb_s in (40.0, 80.0, 20.0)]
    text = table(results(metal={"decode-1": runs}))
    share = 100 * SMOLLM2.weight_bytes / 1e9 / 40
    assert f"40 GB/s read, decode of 1 stream in bf16 had {share:.2f} of it" in text


def test_the_cost_of_a_token_follows_from_the_config():
    assert 268e6 < SMOLLM2.weight_bytes < 270e6
    each = SMOLLM2.prefill_flops(1024, 1) / 1024
    assert 0.24e9 < each < 0.26e9  # without the head, of which a prompt needs one row


def test_only_the_part_of_machines_like_this_one_is_rewritten(tmp_path, monkeypatch):
    page = tmp_path / "performance.md"
    wide, narrow = map(peer_table.begin, ("avx512_bf16", "avx2"))
    whole = f"before\n\n{wide}\n\nwide\n\n{peer_table.END}\n\nbetween\n\n{narrow}\n\nold\n\n{peer_table.END}\n\nafter\n"
    page.write_text(whole)
    monkeypatch.setattr(peer_table, "PAGE", page)
    write_table("new\n", "avx2")
    assert page.read_text() == whole.replace("old", "new")
    with pytest.raises(ValueError, match="no part that begins with <!-- peers on plain"):
        write_table("new\n", "plain")
