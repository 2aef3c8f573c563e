"""From what peers.py has measured to the table of docs/performance.md. It says what was measured and nothing else."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.peer_rows import IN_PROCESS, ROWS, Values
from tests.bench.servers import MODEL
from tests.prove.lines import ROOT

METAL_ROWS = ("decode-1", "prefill")  # whose shares of the machine are told
PAGE = ROOT / "docs" / "performance.md"
END = "<!-- /peers -->"


def table(results: dict[str, Any]) -> str:
    lines = []
    ours = [key for key in results["servers"] if key.startswith("paceline")]
    for mine in ours:
        lines += [f"**{mine}**", "", *_server_table(results, mine), ""]
    if results["in_process"]:
        lines += ["In process, each loaded anew in every round:", "", *_in_process_table(results["in_process"]), ""]
    lines += [*_metal_lines(results), *_server_lines(results)]
    lines += [f"Not run: {name}." for name in results["missing"]]
    return "\n".join(lines)


def _server_table(results: dict[str, Any], mine: str) -> list[str]:
    peers = sorted({key.split(" ")[0] for key in results["servers"]} - {"paceline"}, reverse=True)
    head = ["", mine, *(name for peer in peers for name in (f"{peer}, best setting", "ratio"))]
    rows = [head, ["---"] * len(head)]
    for row in ROWS:
        held = results["rows"].get(row.name, {})
        if mine not in held:
            continue
        for figure, text, more_is_better in row.figures:
            cells = [text, _median(held[mine], figure)]
            for peer in peers:
                settings = {key: rounds for key, rounds in held.items() if key.startswith(peer)}
                cells += _beside(held[mine], settings, figure, more_is_better)
            rows.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _beside(mine: list[Values], settings: dict[str, list[Values]], figure: str, more_is_better: bool) -> list[str]:
    """The best setting's median with its name, and the median of the rounds' ratios to it."""
    if not settings:
        return ["-", "-"]
    best = (max if more_is_better else min)(
        settings, key=lambda key: statistics.median(values[figure] for values in settings[key])
    )
    pairs = zip(mine, settings[best], strict=False)
    ratios = [our[figure] / their[figure] for our, their in pairs if their[figure]]
    setting = best.partition(" ")[2]
    return [
        f"{_median(settings[best], figure)} ({setting})",
        f"{statistics.median(ratios):.2f}" if ratios else "-",
    ]


def _in_process_table(held: dict[str, list[Values]]) -> list[str]:
    ours = [key for key in held if key != "openvino"]
    head = ["", "OpenVINO GenAI, Q4_1", *(name for key in ours for name in (key, "ratio"))]
    rows = [head, ["---"] * len(head)]
    for _, text, _, _ in IN_PROCESS:
        cells = [text, _median(held["openvino"], text)]
        for key in ours:
            ratios = [our[text] / their[text] for our, their in zip(held[key], held["openvino"], strict=True)]
            cells += [_median(held[key], text), f"{statistics.median(ratios):.2f}"]
        rows.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def shares_of_the_machine(results: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """By row: what the machine gave, and the share of it that the bf16 server had, whose bytes and operations are
    known. Medians over the rounds, in each of which both were measured."""
    found = {}
    for row, runs in results["metal"].items():
        held = results["rows"].get(row, {}).get("paceline bf16")
        if held and runs:
            figure, unit, each = Shape.of(MODEL).costs[row]
            shares = [values[figure] * each / 1e9 / run[unit] for values, run in zip(held, runs, strict=True)]
            found[row] = statistics.median(run[unit] for run in runs), statistics.median(shares)
    return found


def _metal_lines(results: dict[str, Any]) -> list[str]:
    told = {"decode-1": "GB/s read, decode of 1 stream", "prefill": "GFLOP/s of bf16 products, prefill"}
    lines = [
        f"The machine gave {whole:,.0f} {told[row]} in bf16 had {share:.2f} of it."
        for row, (whole, share) in shares_of_the_machine(results).items()
    ]
    return [" ".join(lines), ""] if lines else []


def _server_lines(results: dict[str, Any]) -> list[str]:
    told = [
        f"| {key} | {about['ready_seconds']:.1f} | {about['top_1']:.3f} of {about['num_top_1']} |"
        for key, about in results["servers"].items()
    ]
    return ["| | start to ready, s | top-1 agreement with fp32 |", "| --- | --- | --- |", *told, ""]


@dataclass(frozen=True)
class Shape:
    """Of a Llama with a tied head: what a token costs, from its config alone."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @classmethod
    def of(cls, folder: Path) -> "Shape":
        config = json.loads((folder / "config.json").read_text())
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        return cls(*(config[name] for name in (*names, "intermediate_size", "vocab_size")))

    @property
    def _linear(self) -> int:
        """Weights of all layers' linears."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def weight_bytes(self) -> int:
        """That a step reads, in bf16."""
        return 2 * (self._linear + self.hidden * self.vocab)

    @property
    def costs(self) -> dict[str, tuple[str, str, float]]:
        """By row: its figure, the machine's, and what one of the former takes of the latter."""
        each = self.prefill_flops(1024, 4) / 1028
        return {"decode-1": ("output", "read_gb_s", self.weight_bytes), "prefill": ("total", "bf16_gflop_s", each)}

    def prefill_flops(self, prompt_len: int, num_generated: int) -> float:
        """Of one request: linears for every token but the last, causal attention, the head where an id is drawn."""
        linear = 2 * self._linear * (prompt_len + num_generated - 1)
        attention = self.layers * 2 * self.heads * self.head_dim * prompt_len**2
        return linear + attention + 2 * self.hidden * self.vocab * num_generated


def begin(instructions: str) -> str:
    """Of the part of the page that machines with these instructions write: figures of others do not compare."""
    return f"<!-- peers on {instructions}: written by tests/bench/peers.py -->"


def write_table(text: str, instructions: str) -> None:
    """Raises ValueError where the page has no part for it."""
    page = PAGE.read_text()
    before, found, rest = page.partition(mark := begin(instructions))
    if not found:
        raise ValueError(f"{PAGE.name} has no part that begins with {mark}")
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{mark}\n\n{text.strip()}\n\n{END}{after}")


def _median(rounds: list[Values], figure: str) -> str:
    value = statistics.median(values[figure] for values in rounds)
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
