"""The tokenizer in a GGUF file gives the ids that the model was trained with: byte-level BPE and SentencePiece."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.proto.errors import StartupError
from paceline.worker.gguf_file import GGUFFile
from paceline.worker.gguf_pretokenizers import PRE_TOKENIZERS
from paceline.worker.gguf_tokenizer import read_vocabulary
from paceline.worker.sources import resolve
from tests.models import bpe_metadata, tiny_llama_folder

PATH = Path("model.gguf")
TEXTS = [
    "Hello world, it's 12345 and 1.5e10! They'll DON'T",
    "안녕하세요, 세계! 서울은 2024년에도 대한민국의 수도이다.",
    "🙂👩‍👩‍👧 flags 🇰🇷, ẞ, é, \u0301, \u200b",
    "def f(x):\n    return x ** 2  # ok\n\n\n\tif x != 1:\r\n\t\tpass\n",
    "   runs   of    spaces   \n \n  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "中文字符 日本語テキスト العربية हिन्दी",
    "",
    " ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("tiny") / "llama")


def bpe(folder: Path, **changes) -> dict:
    """Metadata with changed keys, given without their prefix; None leaves one out."""
    changed = {"tokenizer.ggml." + key: value for key, value in changes.items()}
    return {key: value for key, value in (bpe_metadata(folder) | changed).items() if value is not None}


def pieces(pre: str, text: str, folder: Path) -> list[str]:
    tokenizer = Tokenizer.from_str(read_vocabulary(bpe(folder, pre=pre), PATH).tokenizer_json)
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


# Byte-level BPE


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_those_of_the_tokenizer_it_was_made_of(folder, text):
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rebuilt = Tokenizer.from_str(read_vocabulary(bpe(folder), PATH).tokenizer_json)
    assert rebuilt.encode(text).ids == original.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text
    assert rebuilt.decode(rebuilt.encode(text).ids) == original.decode(original.encode(text).ids)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", [text for text in TEXTS if "\u0301" not in text])
def test_every_known_pre_tokenizer_keeps_every_text(folder, pre, text):
    tokenizer = Tokenizer.from_str(read_vocabulary(bpe(folder, pre=pre), PATH).tokenizer_json)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 12345  go", ["it", "'s", " 12345", " ", " go"]),
        ("smollm", "it's 123  go", ["it", "'s", " ", "1", "2", "3", " ", " go"]),
        ("llama-bpe", "IT'S 12345\n\n go", ["IT", "'S", " ", "123", "45", "\n\n", " go"]),
        ("qwen2", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("dbrx", "IT'S 12345\n\n go", ["IT", "'S", " ", "123", "45", "\n\n", " go"]),
        ("gpt-4o", "HelloWorld IT'S 12345", ["Hello", "World", " IT'S", " ", "123", "45"]),
        ("qwen35", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("exaone", "it's 12  go", ["it", "'s", " ", "1", "2", " ", " go"]),
        ("exaone4", "it's 12  go", ["it", "'s", " 12", " ", " go"]),
        ("deepseek-v3", "a 12345 b", ["a", " ", "123", "45", " b"]),
        ("deepseek-coder", "a, 12\n", ["a", ",", " ", "1", "2", "\n"]),
        ("falcon", "a, 12345", ["a", ",", " ", "123", "45"]),
        ("default", "a, 12345", ["a", ",", " ", "123", "45"]),
        ("poro-chat", "one two, 3", ["one", " two", ",", " 3"]),
    ],
)
def test_text_is_cut_as_each_kind_cuts_it(folder, pre, text, expected):
    assert pieces(pre, text, folder) == expected


def test_an_unknown_pre_tokenizer_is_refused_by_its_name(folder):
    with pytest.raises(StartupError, match=r"'martian' \(tokenizer\.ggml\.pre\), which is not supported; supported: "):
        read_vocabulary(bpe(folder, pre="martian"), PATH)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_is_added_as_the_file_says_or_else_as_its_kind_does(folder, changes, expected):
    vocabulary = read_vocabulary(bpe(folder, **changes), PATH)
    assert vocabulary.add_bos == expected
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == ([1] if expected else []) + plain


def test_ends_are_eos_eot_eom_and_turn_ends_that_the_template_writes(folder):
    assert read_vocabulary(bpe(folder), PATH).eos_ids == (2,)
    ends = read_vocabulary(bpe(folder, eos_token_id=0, eot_token_id=5, eom_token_id=6), PATH).eos_ids
    assert ends == (0, 5, 6, 2)  # 2 is <|im_end|>: a control token, and the template writes it
    meta = bpe(folder, eos_token_id=0)
    meta["tokenizer.chat_template"] = "{{ messages }}"
    assert read_vocabulary(meta, PATH).eos_ids == (0,)


def test_added_tokens_are_found_whole_and_only_control_tokens_vanish_in_text(folder):
    meta = bpe(folder)
    tokens = meta["tokenizer.ggml.tokens"]
    tokens[-1] = "<tool call>"
    meta["tokenizer.ggml.merges"] = [m for m in meta["tokenizer.ggml.merges"] if "".join(m.split(" ")) in set(tokens)]
    meta["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer.from_str(read_vocabulary(meta, PATH).tokenizer_json)
    ids = tokenizer.encode("a<tool call><|im_end|>b").ids
    assert len(tokens) - 1 in ids
    assert 2 in ids
    assert tokenizer.decode(ids) == "a<tool call>b"


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_a_missing_part_is_named(folder, key):
    with pytest.raises(StartupError, match=f"lacks the metadata key tokenizer.ggml.{key}"):
        read_vocabulary(bpe(folder, **{key: None}), PATH)


def test_other_kinds_and_ids_out_of_range_are_refused(folder):
    with pytest.raises(StartupError, match="kind 'bert'"):
        read_vocabulary(bpe(folder, model="bert"), PATH)
    with pytest.raises(StartupError, match="bos_token_id 384, but only 384 tokens"):
        read_vocabulary(bpe(folder, bos_token_id=384), PATH)


# SentencePiece

WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "▁he", "llo", "▁hello", "lo", "or", "▁w", "ld", "▁wor",
         "▁▁", "▁▁▁▁"]  # fmt: skip


def spm(**changes) -> dict:
    """<unk>, <s>, </s>, 256 bytes, then WORDS: of those, earlier ones have better scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(WORDS))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.chat_template": None,
    }
    changed = {"tokenizer.ggml." + key: value for key, value in changes.items()}
    return {key: value for key, value in (meta | changed).items() if value is not None}


def sentencepiece(text: str) -> list[str]:
    """The algorithm as published, one merge at a time: of all neighbours whose union is a token, the best, leftmost."""
    scores = {word: -float(i) for i, word in enumerate(WORDS)}
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [piece for part in parts for piece in ([part] if part in scores else byte_pieces(part))]


def byte_pieces(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["▁hello"]),
        ("hell", ["▁he", "ll"]),
        ("hello world", ["▁hello", "▁wor", "ld"]),
        ("h é", ["▁", "h", "▁", "<0xC3>", "<0xA9>"]),
        ("\n", ["▁", "<0x0A>"]),
    ],
)
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(text, expected):
    vocabulary = read_vocabulary(spm(), PATH)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    assert tokenizer.encode(text, add_special_tokens=False).tokens == expected
    assert tokenizer.encode(text).tokens == ["<s>", *expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (vocabulary.bos_id, vocabulary.add_bos, vocabulary.eos_ids) == (1, True, (2,))


def test_sentencepiece_agrees_with_the_published_algorithm_on_random_text():
    tokenizer = Tokenizer.from_str(read_vocabulary(spm(add_space_prefix=False), PATH).tokenizer_json)
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice(["h", "e", "l", "l", "o", "w", "r", "d", " ", "é", "한"]) for _ in range(12))
        assert tokenizer.encode(text, add_special_tokens=False).tokens == sentencepiece(text), text


def test_without_a_space_prefix_text_stays_as_it_is():
    tokenizer = Tokenizer.from_str(read_vocabulary(spm(add_space_prefix=False), PATH).tokenizer_json)
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["he", "llo"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_phi3s_markers_take_the_white_space_behind_them_along():
    meta = spm(add_space_prefix=False)
    for number, token in enumerate(("<|user|>", "<|endoftext|>")):
        meta["tokenizer.ggml.tokens"] = [*meta["tokenizer.ggml.tokens"], token]
        meta["tokenizer.ggml.scores"] = [*meta["tokenizer.ggml.scores"], -1000.0 - number]
        meta["tokenizer.ggml.token_type"] = [*meta["tokenizer.ggml.token_type"], 3]

    def tokens_of(meta: dict, text: str) -> list[str]:
        tokenizer = Tokenizer.from_str(read_vocabulary(meta, PATH).tokenizer_json)
        return [meta["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(text, add_special_tokens=False).ids]

    for text, expected in (("<|user|>\nhe", ["<|user|>", "he"]), ("<|endoftext|> he", ["<|endoftext|>", "▁he"])):
        assert tokens_of(meta | {"general.architecture": "phi3"}, text) == expected
    assert tokens_of(meta, "<|user|>\nhe") == ["<|user|>", "<0x0A>", "he"]


def test_sentencepiece_without_scores_is_refused():
    with pytest.raises(StartupError, match=r"lacks the metadata key tokenizer\.ggml\.scores"):
        read_vocabulary(spm(scores=None), PATH)


# The real one


def test_smollm2_ids_are_transformers_ids():
    from transformers import AutoTokenizer

    path = resolve("smollm2")
    vocabulary = read_vocabulary(GGUFFile(path).metadata, path)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == oracle(text).input_ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert vocabulary.eos_ids == (2,)
    assert vocabulary.template_tokens["eos_token"] == "<|im_end|>"
    assert vocabulary.chat_template == oracle.chat_template
    assert not vocabulary.add_bos
