"""Structured output through the whole service with a model that says anything: what it finishes obeys its schema."""

import asyncio
import random
from functools import cache

import pytest

from tests.cases.stack import stack
from tests.e2e.schemas import schemas
from tests.e2e.structured import obey
from tests.models import tiny_llama_folder


@cache
def noise(position: int, id: int) -> dict[int, float]:
    rng = random.Random(position * 1009 + id)
    return {follower: rng.gauss(0, 2) for follower in range(384)}


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": True}, {"max_tokens": 20}], ids=["plain", "choices", "cut"])
def test_what_a_model_of_noise_finishes_obeys_its_schema(tmp_path, more):
    folder = tiny_llama_folder(tmp_path / "tiny")
    with stack(folder, script=noise, rank={"num_kv_blocks": 64}) as running:
        told = asyncio.run(obey(running.url, schemas(40), **{"max_tokens": 150, "temperature": 1} | more))
        assert not told.startswith("0 ")
        running.at_rest()
