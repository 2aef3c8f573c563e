"""Logprobs of what was asked and of what was drawn: cases 16 and 18."""

import math

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hello"}]
PROMPTS = ["hello", "The quick brown fox jumps.", "서울 안녕", "a"]


@pytest.mark.parametrize("prompt", [*PROMPTS, [40, 41, 42], [1, 300, 7, 2, 9]], ids=repr)
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_case_16_an_echo_with_logprobs_has_an_entry_for_every_token(tiny, prompt, max_tokens):
    count = len(prompt) if isinstance(prompt, list) else len(tiny.good("/tokenize", prompt=prompt)["tokens"])
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "ignore_eos": True}
    done = tiny.good(COMPLETIONS, **body)
    choice = done["choices"][0]
    text = prompt if isinstance(prompt, str) else tiny.good("/detokenize", tokens=prompt)["prompt"]
    assert choice["text"].startswith(text)
    if not max_tokens:
        assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert "prompt_logprobs" not in choice  # which is another field's way to tell them
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {count + max_tokens}
    first, *rest = lists["token_logprobs"]
    assert first is None
    assert all(math.isfinite(value) and value <= 0 for value in rest)
    assert lists["text_offset"][0] == 0
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert done["usage"]["prompt_tokens"] == count
    assert done["usage"]["completion_tokens"] == max_tokens
    stream = tiny.stream(COMPLETIONS, **body)
    assert stream.text() == choice["text"]
    told = [c["choices"][0]["logprobs"] for c in stream.chunks if c["choices"] and c["choices"][0]["logprobs"]]
    assert [value for one in told for value in one["token_logprobs"]] == lists["token_logprobs"]
    assert [value for one in told for value in one["text_offset"]] == lists["text_offset"]


def test_case_16_a_warm_prefix_cache_changes_nothing(tiny):
    body = {"prompt": list(range(50, 100)), "echo": True, "logprobs": 2, "max_tokens": 2}
    first = tiny.good(COMPLETIONS, **body)
    tiny.complete(tuple(range(50, 100)), max_tokens=2)
    again = tiny.good(COMPLETIONS, **body)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("fields", [{"echo": False}, {}])
def test_case_16_no_tokens_and_nothing_to_tell_is_refused(tiny, fields):
    assert tiny.refused(COMPLETIONS, prompt="a", max_tokens=0, **fields)["param"] == "max_tokens"


@pytest.mark.parametrize("count", [0, 1, 5])
def test_case_16_prompt_logprobs_have_an_entry_for_every_prompt_token(tiny, count):
    prompt = list(range(60, 81))
    done = tiny.good(COMPLETIONS, prompt=prompt, prompt_logprobs=count, max_tokens=1, n=2)
    for choice in done["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(prompt) - 1
        for id, entry in zip(prompt[1:], rest, strict=True):
            assert str(id) in entry
            assert len(entry) in (max(count, 1), count + 1)
            assert all(math.isfinite(one["logprob"]) and one["logprob"] <= 0 for one in entry.values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "tops"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 3}, 3)])
def test_case_18_a_chat_has_an_entry_per_token_with_as_many_beside_it_as_were_asked(tiny, fields, tops, stream):
    body = {"messages": HI, "logprobs": True, "max_tokens": 6, "ignore_eos": True, **fields}
    if stream:
        told = tiny.stream(CHAT, **body)
        content = [
            entry
            for chunk in told.chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {}).get("content", ())
        ]
    else:
        done = tiny.good(CHAT, **body)
        content = done["choices"][0]["logprobs"]["content"]
        assert done["usage"]["completion_tokens"] == len(content)
    assert len(content) == 6
    for entry in content:
        assert len(entry["top_logprobs"]) == tops
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": -1}]
)
def test_case_18_limits_of_a_chats_logprobs(tiny, fields):
    assert tiny.refused(CHAT, messages=HI, **fields)["param"] == "top_logprobs"


def test_case_18_completions_count_logprobs(tiny):
    assert tiny.refused(COMPLETIONS, prompt="a", logprobs=True)["param"] == "logprobs"
    for count in (0, 2):
        done = tiny.complete("a", logprobs=count, max_tokens=5, ignore_eos=True)
        lists = done["choices"][0]["logprobs"]
        assert {len(values) for values in lists.values()} == {5}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_18_the_tokens_of_a_stop_are_in_the_list_streamed_and_whole(tiny, path):
    prompt = {"messages": HI, "logprobs": True} if path == CHAT else {"prompt": "hello", "logprobs": 0}
    body = prompt | {"max_tokens": 20, "ignore_eos": True}
    choice = tiny.good(path, **body)["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    stop = text[6:10]
    whole = tiny.good(path, **body, stop=stop)
    stream = tiny.stream(path, **body, stop=stop, stream_options={"include_usage": True})

    def tokens(logprobs: dict) -> list:
        return [entry["token"] for entry in logprobs["content"]] if path == CHAT else logprobs["tokens"]

    listed = tokens(whole["choices"][0]["logprobs"])
    told = [c["logprobs"] for chunk in stream.chunks for c in chunk["choices"] if c["logprobs"]]
    assert [token for one in told for token in tokens(one)] == listed
    assert len(listed) == whole["usage"]["completion_tokens"] == stream.usage["completion_tokens"]
    assert 2 <= len(listed) < 20
