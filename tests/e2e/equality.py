"""Eighty requests to a real server over the four ways: the same text, ids, logprobs, reason and usage, or it fails.

One at a time, and each once before it counts: what the prefix cache holds and which rows share a step is then the same
for all four, so that even logprobs in bf16 must be equal to the last bit.
"""

from typing import Any

import grpc.aio
import httpx

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from tests.router.fronts import WAYS, ask

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Ein Satz auf Deutsch: Äpfel und Öl",
    "1, 2, 3, 4, 5,",
)
TALKS = (
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
)
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
HOW: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 12},
    {"temperature": 0, "max_tokens": 8, "logprobs": 3},
    {"seed": 11, "temperature": 0.9, "top_p": 0.95, "max_tokens": 12},
    {"seed": -3, "n": 3, "max_tokens": 8, "top_k": 40},
    {"seed": 5, "n": 2, "max_tokens": 8, "logprobs": 1, "presence_penalty": 0.5},
    {"temperature": 0, "max_tokens": 24, "stop": [" the", "\n", "."]},
    {"seed": 8, "max_tokens": 10, "ignore_eos": True, "frequency_penalty": 0.4, "min_p": 0.05},
    {"seed": 2, "max_tokens": 10, "logit_bias": {"28": 5, "30": -100}, "repetition_penalty": 1.1},
    {"temperature": 0, "max_tokens": 6, "echo": True, "logprobs": 2},
    {"seed": 4, "min_tokens": 8, "max_tokens": 14, "stop": [" ", "."], "include_stop_str_in_output": True},
    {"temperature": 0, "max_tokens": 30, "structured_outputs": {"json": PLACE}},
    {"seed": 6, "n": 2, "max_tokens": 12, "logprobs": 1, "structured_outputs": {"regex": "[A-Z][a-z]{2,8}[.!]"}},
    {"seed": 7, "max_tokens": 12, "structured_outputs": {"choice": ["yes", "no", "vielleicht", "글쎄요"]}},
    {"seed": 9, "max_tokens": 16, "skip_special_tokens": False, "ignore_eos": True, "cache_salt": "mine"},
    {"temperature": 0, "max_tokens": 8, "truncate_prompt_tokens": 4, "add_special_tokens": False},
    {
        "temperature": 0,
        "max_tokens": 16,
        "structured_outputs": {"grammar": 'start: "a" ("-" /[0-9]/)+ "!"'},
        "priority": 2,
    },
)
CONTINUED = [*TALKS[0], {"role": "assistant", "content": "The capital of Italy is"}]


async def eighty_requests(http_url: str, grpc_address: str) -> str:
    """Raises AssertionError with the request and the way that differs; returns one line for people."""
    num_tokens = 0
    async with (
        httpx.AsyncClient(base_url=http_url, timeout=120) as http,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        bodies = await _bodies(http, channel)
        assert len(bodies) == 80
        for at, body in enumerate(bodies):
            await ask(WAYS[0], http, channel, body)
            first = await ask(WAYS[0], http, channel, body)
            assert first.error is None, f"request {at}, {body}: {first.error}"
            assert first.usage is not None
            assert all(choice.ids and choice.reason for choice in first.choices), f"request {at}, {body}"
            for way in WAYS[1:]:
                other = await ask(way, http, channel, body)
                assert other == first, f"request {at}, {body}:\n{WAYS[0]}: {first}\n{way}: {other}"
            num_tokens += first.usage[1]
    kinds = {"messages": 0, "text": 0, "ids": 0}
    for body in bodies:
        kinds["messages" if "messages" in body else "text" if isinstance(body["prompt"], str) else "ids"] += 1
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"80 requests ({shown}) x 4 ways: text, ids, logprobs, reason, usage equal; {num_tokens} tokens each"


async def _bodies(http: httpx.AsyncClient, channel: grpc.aio.Channel) -> list[dict[str, Any]]:
    """Sixteen ways to ask with five prompts each: two texts, two conversations, one list of ids."""
    ids = [await _same_ids(http, channel, text) for text in TEXTS]
    bodies = []
    for at, how in enumerate(HOW):
        bodies += [{"prompt": TEXTS[(at + more) % len(TEXTS)]} | how for more in range(2)]
        bodies += [{"prompt": ids[(at + 2) % len(ids)]} | how]
        bodies += [{"messages": TALKS[(at + more) % len(TALKS)]} | _for_chat(how) for more in range(2)]
    bodies[-1] |= {"messages": CONTINUED, "continue_final_message": True}
    return bodies


def _for_chat(how: dict[str, Any]) -> dict[str, Any]:
    """What a chat has not, it has in its own way: a prompt that is gone on from, and its logprobs by two fields."""
    how = {name: value for name, value in how.items() if name not in ("echo", "add_special_tokens")}
    return how | {"logprobs": True, "top_logprobs": how["logprobs"]} if "logprobs" in how else how


async def _same_ids(http: httpx.AsyncClient, channel: grpc.aio.Channel, text: str) -> list[int]:
    over_http = (await http.post("/tokenize", json={"prompt": text})).json()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    over_grpc = await stub.Tokenize(pb.TokenizeRequest(text=text))
    assert over_http == {
        "tokens": list(over_grpc.token_ids),
        "count": over_grpc.count,
        "max_model_len": over_grpc.max_model_len,
    }
    return over_http["tokens"]
