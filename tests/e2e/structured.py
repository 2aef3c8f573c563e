"""Answers that must obey schemas, over HTTP: each that says it is finished is validated by another library."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import jsonschema
from jsonschema import Draft202012Validator as Validator

from tests.e2e.schemas import Schema

ASK = [{"role": "user", "content": "Answer with JSON only. Describe a person, a place or a thing you like."}]


async def obey(url: str, schemas: Sequence[Schema], concurrency: int = 16, **fields: Any) -> str:
    """Raises AssertionError with the schema and the text; returns one line for people."""
    finished, cut, num_tokens = 0, 0, 0
    places = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, number: int, schema: Schema) -> dict[str, Any]:
        format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = {"messages": ASK, "seed": number, "response_format": format} | fields
        async with places:
            response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, f"{response.text}: {json.dumps(schema, ensure_ascii=False)}"
        return response.json()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        answers = await asyncio.gather(*(one(client, number, schema) for number, schema in enumerate(schemas)))
    for schema, answer in zip(schemas, answers, strict=True):
        num_tokens += answer["usage"]["completion_tokens"]
        for choice in answer["choices"]:
            if choice["finish_reason"] != "stop":
                cut += 1
                continue
            finished += 1
            text = choice["message"]["content"]
            try:
                Validator(schema, format_checker=Validator.FORMAT_CHECKER).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{text!r} does not obey {json.dumps(schema, ensure_ascii=False)}") from error
    return f"{finished} of {finished + cut} finished, all valid; {cut} cut at max_tokens; {num_tokens} tokens"
