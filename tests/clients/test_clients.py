"""The clients that people have, unmodified, against the whole service."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.cases.stack import stack
from tests.models import tiny_llama_folder

MESSAGES = [{"role": "user", "content": "hello"}]
BASE = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
NODE = Path(__file__).parent


class Thing(BaseModel):
    color: Literal["red", "green"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with stack(tiny_llama_folder(tmp_path_factory.mktemp("clients") / "tiny", seed=3)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(running) -> str:
    return running.chat(max_tokens=12)["choices"][0]["message"]["content"]


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def test_openai_whole_streamed_and_by_its_stream_helper(client, expected):
    whole = client.chat.completions.create(**BASE)
    assert whole.choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**BASE, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    with client.chat.completions.stream(**BASE, stop=expected[6:9]) as events:  # its helper takes no cut answer
        assert events.get_final_completion().choices[0].message.content == expected[:6]


def test_openai_parses_structured_answers(client):
    for seed in range(3):
        done = client.chat.completions.parse(
            **BASE | {"max_tokens": 60, "temperature": 1}, seed=seed, response_format=Thing
        )
        assert isinstance(done.choices[0].message.parsed, Thing)


def test_openai_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**BASE | {"temperature": 9})
    assert (raised.value.param, raised.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**BASE | {"model": "gpt"})


def test_openai_completions_with_logprobs_and_echo(client):
    done = client.completions.create(model="tiny", prompt="hello", max_tokens=3, logprobs=2, echo=True, temperature=0)
    assert done.choices[0].text.startswith("hello")
    assert done.choices[0].logprobs.token_logprobs[0] is None
    assert len(done.choices[0].logprobs.tokens) == done.usage.total_tokens


async def test_openai_async(running, expected):
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(**BASE, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        assert await asyncio.gather(*(one() for _ in range(8))) == [expected] * 8
        parsed = await client.chat.completions.parse(**BASE | {"max_tokens": 60}, response_format=Thing)
        assert isinstance(parsed.choices[0].message.parsed, Thing)


def test_langchain_invokes_streams_batches_and_structures(running, expected):
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=running.url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=12)
    answer = llm.invoke("hello")
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(llm.stream("hello"))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert [one.content for one in llm.batch(["hello", "hello"])] == [expected] * 2
    longer = llm.model_copy(update={"max_tokens": 60})
    assert isinstance(longer.with_structured_output(Thing, method="json_schema").invoke("hello"), Thing)


def test_litellm_whole_streamed_and_async(running, expected):
    import litellm

    options = {
        "model": "openai/tiny",
        "api_base": running.url + "/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 12,
    }
    assert litellm.completion(**options).choices[0].message.content == expected
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert asyncio.run(litellm.acompletion(**options)).choices[0].message.content == expected
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options | {"temperature": 9})


def test_openai_for_javascript(running, expected):
    assert shutil.which("node"), "Node.js is needed: `make setup-dev` installs the client with npm"
    command = ["node", str(NODE / "client.mjs"), running.url + "/v1"]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] == told["streamed"] == told["helper"] == expected
    assert told["usage"] == told["stream_usage"]
    assert told["indices"] == [[0, "length"]] or told["indices"] == [[0, "stop"]]
    assert told["completion"] <= 6
    assert Thing.model_validate(told["parsed"])
    assert told["models"] == ["tiny"]
    assert told["error"] == ["BadRequestError", 400, "temperature", "invalid_value"]
