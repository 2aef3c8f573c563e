"""What is asked: prompts of random ids and how many ids are wanted back. Pure: a seed decides all of it.

    steady   prompt 64 to 192, output 32 to 128        chats
    decode   prompt 16, output 256                     the bandwidth of decoding
    prefill  prompt 1024, output 4                     the arithmetic of prompts
    mixed    9 of 10 as steady, the 10th 2048 and 32   does a long prompt hold up the rest?
    shared   one prefix of 1024, 32 own, output 16     the prefix cache
    skewed   prompt 32, output 8; the 10th 384         does one long answer hold up the rest?

Ids are random, so that servers do equal work and no cache knows a prompt that it has not been given.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

NUM_SPECIAL = 1000  # the first ids of a vocabulary are control tokens and bytes in many models
EVERY = 10  # of mixed and skewed: the last of so many is another


class Job(NamedTuple):
    prompt_ids: list[int]
    num_wanted: int  # ids of the answer


class _Dice:
    """Draws for one workload. ``prefix`` is drawn first, so that every job of a seed shares it."""

    def __init__(self, seed: str, vocab_size: int):
        self._rng = random.Random(seed)
        self._ids = range(min(NUM_SPECIAL, vocab_size // 2), vocab_size)
        self.prefix = self.ids(1024)

    def ids(self, length: int) -> list[int]:
        return self._rng.choices(self._ids, k=length)

    def between(self, least: int, most: int) -> int:
        return self._rng.randint(least, most)


def _steady(dice: _Dice, number: int) -> Job:
    return Job(dice.ids(dice.between(64, 192)), dice.between(32, 128))


def _decode(dice: _Dice, number: int) -> Job:
    return Job(dice.ids(16), 256)


def _prefill(dice: _Dice, number: int) -> Job:
    return Job(dice.ids(1024), 4)


def _mixed(dice: _Dice, number: int) -> Job:
    return Job(dice.ids(2048), 32) if _is_another(number) else _steady(dice, number)


def _shared(dice: _Dice, number: int) -> Job:
    return Job(dice.prefix + dice.ids(32), 16)


def _skewed(dice: _Dice, number: int) -> Job:
    return Job(dice.ids(32), 384 if _is_another(number) else 8)


def _is_another(number: int) -> bool:
    return number % EVERY == EVERY - 1


WORKLOADS: dict[str, Callable[[_Dice, int], Job]] = {
    "steady": _steady,
    "decode": _decode,
    "prefill": _prefill,
    "mixed": _mixed,
    "shared": _shared,
    "skewed": _skewed,
}


def draw(workload: str, num_jobs: int, seed: int | str, vocab_size: int) -> list[Job]:
    """Two workloads of one seed have no prompt in common."""
    dice = _Dice(f"{workload}/{seed}", vocab_size)
    return [WORKLOADS[workload](dice, number) for number in range(num_jobs)]
