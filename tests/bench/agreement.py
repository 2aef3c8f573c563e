"""Does a server that is measured compute the model? How often its greedy token is the one of fp32, over plain text.

Servers are asked over HTTP for one token after each of many beginnings of a text; the reference is transformers in
fp32, made in a process of its own. Ids are compared as text, which is all that every server tells.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("README.md", "docs/operations.md", "docs/multi-node.md", "LICENSE")
LENGTH = 512  # ids of each text
PLACES = range(64, LENGTH, 16)  # ids of a beginning


@dataclass(frozen=True)
class Beginning:
    ids: list[int]
    next_text: str  # of the likeliest id


def reference(model: Path) -> list[Beginning]:
    """Of a Hugging Face folder. Ids that are no text of their own are left out."""
    command = [sys.executable, "-m", "tests.bench.agreement", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    beginnings = []
    for ids, best in json.loads(done.stdout.splitlines()[-1]):
        for place in PLACES:
            text = tokenizer.decode([best[place - 1]]).strip()
            if text and "�" not in text:
                beginnings.append(Beginning(ids[:place], text))
    return beginnings


def agreement(url: str, model_name: str, beginnings: list[Beginning]) -> float:
    """Share of beginnings after which the server goes on as the reference does."""
    same = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for beginning in beginnings:
            body = {"model": model_name, "prompt": beginning.ids, "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body).raise_for_status()
            same += answer.json()["choices"][0]["text"].strip() == beginning.next_text
    return same / len(beginnings)


def _likeliest(model: Path) -> list[tuple[list[int], list[int]]]:
    """Of each text its ids, and at each place the id that fp32 puts next."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    told = []
    for name in TEXTS:
        ids = tokenizer.encode((ROOT / name).read_text(), add_special_tokens=False).ids[:LENGTH]
        with torch.inference_mode():
            told.append((ids, network(torch.tensor([ids])).logits[0].argmax(-1).tolist()))
    return told


if __name__ == "__main__":
    print(json.dumps(_likeliest(Path(sys.argv[1]))))
