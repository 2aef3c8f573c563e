"""Ids of a prompt and text of ids over HTTP, and which version it is."""

from importlib.metadata import version

import pytest

from tests.fakes import FakeReplica, encode, tiny_card

HI = [{"role": "user", "content": "hello there"}]


async def test_what_is_tokenized_is_what_a_generation_computes(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        for path, body in (("/v1/completions", {"prompt": "hello there"}), ("/v1/chat/completions", {"messages": HI})):
            answer = (await http.post("/tokenize", json=body | {"model": "tiny"})).json()
            await http.post(path, json=body)
            ids = fake.submissions[-1].prompt_ids
            assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 256}


async def test_what_is_rendered_is_the_text_and_the_ids_of_a_generation(router):
    unfinished = [*HI, {"role": "assistant", "content": "The <|im_end|>"}]
    bodies = [
        ("/v1/completions", {"prompt": "hello there", "temperature": 0}),
        ("/v1/completions", {"prompt": encode("hello there"), "truncate_prompt_tokens": 2}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": unfinished, "continue_final_message": True}),
    ]
    async with FakeReplica() as fake, router(fake.address) as http:
        for path, body in bodies:
            answer = (await http.post("/render", json=body)).json()
            await http.post(path, json=body)
            ids = fake.submissions[-1].prompt_ids
            whole = (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
            assert answer == {"prompt": whole, "tokens": ids, "count": len(ids), "max_model_len": 256}
        assert answer["prompt"].endswith("<|im_start|>assistant\nThe <|im_end|>")  # as it was, and no control token
        assert answer["tokens"][-1] != 2
        response = await http.post("/render", json={"prompt": "x", "foo": 1})
        assert response.headers["x-paceline-ignored-fields"] == "foo"


async def test_ids_become_the_text_that_they_came_from(router):
    async with FakeReplica() as fake, router(fake.address) as http:
        for text in ("hello there", "Äpfel 🍏 <|im_start|>", " two  spaces\n"):
            tokens = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_text_can_go_without_the_token_that_begins_texts(router):
    async with FakeReplica(card=tiny_card(add_bos=True)) as fake, router(fake.address) as http:
        for add, expected in ((None, [0, *encode("x")]), (True, [0, *encode("x")]), (False, encode("x"))):
            answer = await http.post("/tokenize", json={"prompt": "x", "add_special_tokens": add})
            assert answer.json()["tokens"] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/render", {"prompt": [[1], [2]]}, "prompt"),
        ("/render", {"prompt": "x", "temperature": 9}, "temperature"),
        ("/render", {"prompt": "x", "max_tokens": 256}, "max_tokens"),
        ("/render", {"prompt": "x " * 400}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(router, path, body, param):
    async with FakeReplica() as fake, router(fake.address) as http:
        response = await http.post(path, json=body)
        assert response.status_code == (404 if param == "model" else 400)
        assert response.json()["error"]["param"] == param


async def test_the_version_is_the_installed_one_even_without_a_replica(router):
    async with router(wait=False) as http:
        assert (await http.get("/version")).json() == {"version": version("paceline")}


async def test_token_ids_come_when_they_are_asked_for(router):
    async with FakeReplica(text="Ж!") as fake, router(fake.address) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "x", "return_token_ids": True})).json()
        assert answer["choices"][0]["token_ids"] == [*encode("Ж!"), 2]
        answer = (await http.post("/v1/completions", json={"prompt": "x"})).json()
        assert "token_ids" not in answer["choices"][0]
