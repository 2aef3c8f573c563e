"""Where a choice's text ends, however its tokens are cut: cases 1, 2, 4, 5 and 6."""

import json

import pytest

from tests.cases.stack import saying, stack
from tests.models import edit_json

COMPLETIONS = "/v1/completions"


def ids_of(running, text: str) -> list[int]:
    return running.good("/tokenize", prompt=text, add_special_tokens=False)["tokens"]


def byte_ids(folder, raw: bytes) -> list[int]:
    """One token a byte."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [vocab[chr(byte) if byte in printable else chr(256 + others.index(byte))] for byte in raw]


@pytest.mark.parametrize("prompt", [5, 77, 130, 201, 333])
def test_case_1_a_stop_string_over_several_tokens_is_never_shown_and_holds_back_no_more_than_it_must(tiny, prompt):
    body = {"prompt": [prompt], "max_tokens": 24, "ignore_eos": True}
    text = tiny.good(COMPLETIONS, **body)["choices"][0]["text"]
    cut = next(at for at in range(3, 12) if text.find(text[at : at + 7]) == at)
    stop = text[cut : cut + 7]
    stream = tiny.stream(COMPLETIONS, **body, stop=stop)
    assert stream.text() == text[:cut]
    assert stream.reasons() == ["stop"]
    whole = tiny.good(COMPLETIONS, **body, stop=stop)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text[:cut], "stop")
    kept = tiny.good(COMPLETIONS, **body, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: cut + 7]


def test_case_1_what_may_yet_be_a_stop_string_is_all_that_is_held_back(folder):
    with stack(folder, script=saying(*byte_ids(folder, b"abcDEFGHIJK"), 2)) as running:
        seen = 0
        stop = "DEFGHIX"
        for at, piece in enumerate(running.stream(COMPLETIONS, prompt=[5], stop=stop).pieces()):
            seen += len(piece)
            assert seen >= at + 1 - (len(stop) - 1)
        assert running.stream(COMPLETIONS, prompt=[5], stop=stop).text() == "abcDEFGHIJK"
        running.at_rest()


@pytest.mark.parametrize("stop", [["\n\n"], "\n\n", ["zzz", "\n\n"]], ids=repr)
def test_case_2_a_stop_string_inside_one_token_ends_the_text_there(folder, tmp_path, stop):
    import shutil

    own = shutil.copytree(folder, tmp_path / "own")
    spec = json.loads((own / "tokenizer.json").read_text())
    merged = {"id": 383, "content": ".\n\n", "special": False, "single_word": False, "lstrip": False, "rstrip": False}
    piece = next(piece for piece, id in spec["model"]["vocab"].items() if id == 383)
    del spec["model"]["vocab"][piece]
    spec["model"]["merges"] = [merge for merge in spec["model"]["merges"] if "".join(merge) != piece]
    edit_json(
        own / "tokenizer.json",
        added_tokens=[*spec["added_tokens"], merged | {"normalized": False}],
        model=spec["model"],
    )
    script = saying(*byte_ids(own, b"end"), 383, *byte_ids(own, b"Next"), 2)
    with stack(own, script=script) as running:
        for choice in (
            running.complete(stop=stop)["choices"][0],
            {
                "text": (told := running.stream(COMPLETIONS, prompt=[5], stop=stop)).text(),
                "finish_reason": told.reasons()[0],
            },
        ):
            assert (choice["text"], choice["finish_reason"]) == ("end.", "stop")
        assert running.complete()["choices"][0]["text"] == "end.\n\nNext"
        running.at_rest()


def test_case_2_more_stops_than_are_documented_are_refused(tiny):
    assert tiny.refused(COMPLETIONS, prompt=[5], stop=[str(n) for n in range(17)])["param"] == "stop"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, {"a": 1}, [None], True], ids=repr)
def test_case_4_an_empty_stop_is_refused(tiny, stop):
    for path, more in (
        (COMPLETIONS, {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert tiny.refused(path, stop=stop, **more)["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None], ids=repr)
def test_case_4_no_stop_means_none(tiny, stop):
    assert tiny.complete(max_tokens=8, stop=stop, ignore_eos=True)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", [5, 77, 130])
def test_case_5_nothing_stops_before_min_tokens(tiny, prompt):
    body = {"prompt": [prompt], "ignore_eos": True, "max_tokens": 30}
    text = tiny.good(COMPLETIONS, **body)["choices"][0]["text"]
    for stop in (text[:4], text[0]):
        done = tiny.good(COMPLETIONS, **body, stop=stop, min_tokens=20, return_token_ids=True)
        assert done["usage"]["completion_tokens"] >= 20
        early = len(tiny.good("/detokenize", tokens=done["choices"][0]["token_ids"][:20])["prompt"])
        assert stop not in done["choices"][0]["text"][early:]
        assert tiny.stream(COMPLETIONS, **body, stop=stop, min_tokens=20).text() == done["choices"][0]["text"]


def test_case_5_end_tokens_and_stop_ids_do_not_come_before_min_tokens(folder):
    """The model would say the end token, and then a stop id, at once."""
    script = lambda position, id: {2: 9.0, 0: 8.0, 50: 7.0, 60: 1.0}  # noqa: E731
    with stack(folder, script=script) as running:
        for stop_ids, ends in ([], 2), ([50], 2):
            done = running.complete(min_tokens=5, max_tokens=9, stop_token_ids=stop_ids, return_token_ids=True)
            ids = done["choices"][0]["token_ids"]
            assert ids == [60 if stop_ids else 50] * 5 + [ends]
            assert done["choices"][0]["finish_reason"] == "stop"
        assert running.complete(min_tokens=3, max_tokens=3)["choices"][0]["finish_reason"] == "length"
        running.at_rest()


@pytest.mark.parametrize("value", [31, -1, "5", 1.5, True, 10**9], ids=repr)
def test_case_5_a_minimum_that_cannot_be_is_refused(tiny, value):
    assert tiny.refused(COMPLETIONS, prompt=[5], max_tokens=30, min_tokens=value)["param"] == "min_tokens"


def test_case_6_characters_that_tokens_cut_come_whole(folder):
    text = "ď🙂é"
    raw = text.encode()
    with stack(folder, script=saying(*byte_ids(folder, raw), 2)) as running:
        stream = running.stream(COMPLETIONS, prompt=[5])
        assert stream.text() == text
        assert not any("�" in piece for piece in stream.pieces())
        for limit in range(1, len(raw) + 1):
            whole = running.complete(max_tokens=limit)["choices"][0]["text"]
            assert whole == running.stream(COMPLETIONS, prompt=[5], max_tokens=limit).text()
            assert whole == raw[:limit].decode("utf-8", "ignore")  # what is not complete is dropped, as documented
        running.at_rest()
