"""Architectures without a family here, through the real command over HTTP: the ids of transformers' generate."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server import serving
from tests.worker.test_fallback import TINY, greedy
from tests.worker.test_models_llama import ids_of

NUM_TOKENS = 16


@pytest.mark.parametrize("name", ["starcoder2", "mixtral", "stablelm"])
def test_ids_over_http_are_those_of_generate(tmp_path, name):
    model = TINY[name].make(tmp_path / "model")
    prompts = [ids_of(length, seed=length) for length in (3, 17, 40, 64)]
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    flags = ["--model", str(tmp_path / "model"), "--served-model-name", "tiny", "--dtype", "float32"]
    flags += ["--num-threads", "1", "--num-kv-blocks", "128", "--max-num-batched-tokens", "24"]
    with serving(tmp_path / "log", *flags) as server, ThreadPoolExecutor(len(prompts)) as pool:
        for _ in ("cold", "warm"):
            assert list(pool.map(lambda prompt: ask(server.url, prompt), prompts)) == expected
    said = f"architecture {TINY[name].architecture} through transformers (fallback)"
    assert (tmp_path / "log").read_text().count(said) == 1


def ask(url: str, prompt: list[int]) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]
