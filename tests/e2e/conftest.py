import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e.engine import Bench

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())


@dataclass(frozen=True)
class Oracle:
    """transformers on the same file, in fp32."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    greedy: Callable[[list[int], int], tuple[list[int], list[float]]]  # ids, gaps between the two best logits


@pytest.fixture(scope="session")
def oracle(smollm2_path) -> Oracle:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = smollm2_path.parent, smollm2_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()

    @torch.inference_mode()
    def greedy(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        ids, gaps, cache, fresh = [], [], None, torch.tensor([prompt])
        for _ in range(count):
            out = model(fresh, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            fresh = torch.tensor([[ids[-1]]])
        return ids, gaps

    return Oracle(
        encode=lambda text: tokenizer(text)["input_ids"],
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        greedy=greedy,
    )


@pytest.fixture(scope="session")
def bench(smollm2_path) -> Bench:
    return Bench(smollm2_path)
