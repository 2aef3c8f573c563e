"""Tiny models of families with transformers' logits of one sequence, and a rank that computes the same ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.worker.drive import Driver, Row
from tests.worker.families import Tiny
from tests.worker.test_models_llama import close, ids_of

NUM_PROMPT, NUM_DECODES = 45, 20  # the prompt is longer than the window already
IDS = ids_of(NUM_PROMPT + NUM_DECODES)


@dataclass(frozen=True)
class Made:
    """``logits``: transformers', of the prompt's last id and of all that follow."""

    folder: Path
    model: Any
    logits: torch.Tensor


def maker(families: Mapping[str, Tiny], new_folder: Callable[[], Path]) -> Callable[[str], Made]:
    """By name, each made when it is first asked for."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            folder = new_folder() / "model"
            model = families[name].make(folder)
            with torch.no_grad():
                logits = model(torch.tensor([IDS])).logits[0, NUM_PROMPT - 1 :].float()
            known[name] = Made(folder, model, logits)
        return known[name]

    return make


def check(driver: Driver, take: Callable[[], torch.Tensor], theirs: torch.Tensor, chunk: int | None) -> None:
    """The sequence by prefill and decodes. ``take`` hands out the logits of the steps since it was last called."""
    slot = driver.admit(3, IDS[:NUM_PROMPT])
    driver.prefill(slot, NUM_PROMPT, chunk)
    for position in range(NUM_PROMPT, len(IDS)):
        driver.step(Row(slot, position, 1, token=IDS[position]))
    driver.release(slot)
    ours = take()
    assert ours.shape == theirs.shape
    assert close(ours, theirs), f"chunk {chunk}: differs by {(ours - theirs).abs().max():.2e}"
