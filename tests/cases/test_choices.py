"""Several choices and several prompts: cases 8 and 9."""

from concurrent.futures import ThreadPoolExecutor

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_8_each_choice_of_a_stream_begins_and_ends_once(tiny, path, n):
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hello"}
    stream = tiny.stream(path, **prompt, n=n, max_tokens=8, temperature=1, seed=1)
    assert stream.done
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
    ended: set[int] = set()
    roles: list[int] = []
    for chunk in stream.chunks:
        assert len(chunk["choices"]) == 1
        choice = chunk["choices"][0]
        assert choice["index"] not in ended
        if path == CHAT and choice["delta"].get("role"):
            assert choice["delta"]["role"] == "assistant"
            roles.append(choice["index"])
        if choice["finish_reason"]:
            ended.add(choice["index"])
            assert not (choice["delta"].get("content") if path == CHAT else choice["text"])
    assert ended == set(range(n))
    assert sorted(roles) == (list(range(n)) if path == CHAT else [])
    whole = tiny.good(path, **prompt, n=n, max_tokens=8, temperature=1, seed=1)
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert stream.text(choice["index"]) == text


def test_case_9_eight_choices_are_eight_in_order_however_many_ask(tiny):
    def ask(seed: int) -> dict:
        return tiny.complete("hello there", n=8, max_tokens=6, temperature=1, seed=seed)

    with ThreadPoolExecutor(8) as many:
        for done in many.map(ask, range(50)):
            assert [choice["index"] for choice in done["choices"]] == list(range(8))
            assert all(choice["finish_reason"] for choice in done["choices"])
            assert done["usage"]["prompt_tokens"] == len(tiny.good("/tokenize", prompt="hello there")["tokens"])


def test_case_9_lists_of_prompts_keep_their_order(tiny):
    lone = [tiny.complete(prompt, max_tokens=6)["choices"][0]["text"] for prompt in "ABC"]
    done = tiny.complete(["A", "B", "C"], n=2, max_tokens=6)
    assert [choice["index"] for choice in done["choices"]] == list(range(6))
    assert [choice["text"] for choice in done["choices"]] == [text for text in lone for _ in range(2)]
    stream = tiny.stream(COMPLETIONS, prompt=["A", "B", "C"], n=2, max_tokens=6)
    assert [stream.text(index) for index in range(6)] == [choice["text"] for choice in done["choices"]]
