"""What formats of weights cost in quality: how often the best token stays the best, and how far distributions move.

    python -m tests.bench.quality [--model NAME] [--tokens N] [FORMAT[/DTYPE] ...]

Over the repository's own documentation and code, in windows of 512 tokens, each against the same model in float32
without quantization: the share of positions whose most likely token is the same, and the mean of KL(float32 || format)
in nats.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.worker.attention.base import StepAttention
from paceline.worker.batch import build_batch
from paceline.worker.quant.formats import NAMES
from paceline.worker.sources import resolve
from tests.worker.drive import Driver, Row, rank_of

ROOT = Path(__file__).parents[2]
WINDOW = 512


@dataclass(frozen=True)
class Quality:
    """Of ``num_tokens`` positions. ``divergence``: mean KL in nats."""

    num_tokens: int
    top1: float
    divergence: float

    def __str__(self) -> str:
        return f"top-1 {self.top1:.4f}, KL {self.divergence:.5f} over {self.num_tokens} tokens"


class Reader:
    """A loaded model that reads texts."""

    def __init__(self, model: Path, dtype: str, quantization: str | None = None):
        self.rank = rank_of(
            model,
            dtype=dtype,
            quantization=quantization,
            max_model_len=WINDOW + 1,
            max_num_batched_tokens=WINDOW,
            max_num_seqs=1,
            num_kv_blocks=WINDOW // 16 + 1,
        )

    def tokenize(self, text: str) -> list[int]:
        return Tokenizer.from_str(self.rank.card.tokenizer_json).encode(text, add_special_tokens=False).ids

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """fp32 [ids, vocabulary]: after each id, of all that may follow."""
        runner, driver = self.rank.runner, Driver(self.rank)
        driver.admit(0, ids)
        plan = driver.plan(Row(0, 0, len(ids)))
        runner.table.apply(plan)
        batch = build_batch(plan, runner.table, runner.cache.block_size)
        attn = StepAttention.of(runner.backend, runner.cache, batch)
        hidden = runner.model(runner.model.embed(batch.ids, batch.positions), batch.positions, attn)
        logits = runner.model.logits(hidden)
        assert logits is not None
        return logits[:, : self.rank.card.vocab_size].log_softmax(1)


def windows(ids: list[int], num_tokens: int) -> list[list[int]]:
    starts = range(0, num_tokens, WINDOW)
    return [ids[start : min(start + WINDOW, num_tokens)] for start in starts]


def compare(expected: list[torch.Tensor], found: Iterable[torch.Tensor]) -> Quality:
    same, divergence, num_tokens = 0, 0.0, 0
    for right, other in zip(expected, found, strict=True):
        same += int((right.argmax(1) == other.argmax(1)).sum())
        divergence += float((right.exp() * (right - other)).sum())
        num_tokens += len(right)
    return Quality(num_tokens, same / num_tokens, divergence / num_tokens)


def text() -> str:
    """Prose and code in about equal parts."""
    files = ("docs/architecture.md", "router/service.py", "docs/operations.md", "worker/runner.py")
    return "\n".join((ROOT / file).read_text()[:4_000] for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("formats", nargs="*", metavar="FORMAT[/DTYPE]")
    args = parser.parse_args()
    model = Path(resolve(args.model))
    reader = Reader(model, "float32")
    ids = windows(reader.tokenize(text()), args.tokens)
    expected = [reader.logprobs(part) for part in ids]
    for name in args.formats or ("none", *NAMES):
        quantization, _, dtype = name.partition("/")
        other = Reader(model, dtype or "auto", None if quantization == "none" else quantization)
        print(f"{name:16} {compare(expected, map(other.logprobs, ids))}", flush=True)


if __name__ == "__main__":
    main()
