import asyncio
import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from paceline.proto.errors import StartupError
from paceline.router.tokenizer import LARGE_TEXT, Tokenizer, byte_alphabet
from tests.fakes import tiny_card

TINY = Tokenizer(tiny_card())


def sentencepiece_json(prepend: str = "normalizer") -> str:
    """A Llama-2-like vocabulary: bytes, a few pieces with the visible space, three control tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁helowrdHInst<>/s[]_|", "▁h", "he", "ll", "▁w", "or", "▁▁"]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, *letters]))}
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer.to_str()


def llama_card(**changes):
    text = changes.pop("tokenizer_json", None) or sentencepiece_json()
    size = len(json.loads(text)["model"]["vocab"])
    return tiny_card(tokenizer_json=text, vocab_size=size, bos_id=1, eos_ids=(2,), **{"add_bos": True, **changes})


def test_the_byte_alphabet_names_every_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())


@given(st.text(max_size=60))
def test_bytes_of_ids_spell_the_text(text):
    assert b"".join(TINY.text_bytes[id] for id in TINY.encode(text)).decode() == text


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
@pytest.mark.parametrize("text", ["hello world", "한국 🙂 hello", "he  he", "<0x41>"])
def test_sentencepiece_bytes_spell_the_text_after_its_leading_space(prepend, text):
    tokenizer = Tokenizer(llama_card(tokenizer_json=sentencepiece_json(prepend)))
    raw = b"".join(tokenizer.text_bytes[id] for id in tokenizer.encode(text))
    assert raw.decode() == " " + text
    assert tokenizer.leading_space


def test_control_tokens_have_bytes_but_show_no_text():
    assert TINY.token_bytes(1) == b"<|im_start|>"
    assert TINY.text_bytes[1] == b""
    assert TINY.special_ids == {0, 1, 2}
    assert TINY.special_strings[0] == "<|endoftext|>" or len(TINY.special_strings[0]) >= len(TINY.special_strings[-1])


def test_an_id_that_no_piece_has_is_empty_not_an_error():
    wide = Tokenizer(tiny_card(vocab_size=1000))
    assert wide.text_bytes[999] == b""
    assert wide.token_bytes(5000) == b""
    assert wide.token_bytes(-1) == b""


@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s><s>hello", ""])
def test_exactly_one_bos_leads_a_plain_prompt(text):
    ids = Tokenizer(llama_card()).encode(text)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_no_bos_is_added_where_the_model_wants_none():
    assert 1 not in Tokenizer(llama_card(add_bos=False)).encode("hello")


def test_truncation_and_padding_kept_in_the_file_are_switched_off():
    broken = tokenizers.Tokenizer.from_str(tiny_card().tokenizer_json)
    broken.enable_truncation(4)
    broken.enable_padding(length=64)
    text = "hello world, hello there"
    assert Tokenizer(tiny_card(tokenizer_json=broken.to_str())).encode(text) == TINY.encode(text)


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_guarded_text_without_forgeries_gives_the_usual_ids(prepend):
    tokenizer = Tokenizer(llama_card(tokenizer_json=sentencepiece_json(prepend)))
    text = "<s>[INST] hello world [/INST]</s> he </s>"
    assert tokenizer.encode_guarded(text, "\ue100") == tokenizer.encode_template(text)


def test_guarded_text_keeps_what_the_sentinel_broke_as_plain_text():
    ids = TINY.encode_guarded("<|im_start|>user\n<\ue100|im_end|>", "\ue100")
    assert ids[0] == 1
    assert 2 not in ids
    assert b"".join(TINY.text_bytes[id] for id in ids) == b"user\n<|im_end|>"


def test_a_vocabulary_that_holds_a_control_token_as_a_piece_cannot_be_tricked():
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("a", -1.0), ("<", -2.0), ("s", -2.0), (">", -2.0)]
    unigram = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    unigram.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer = Tokenizer(tiny_card(tokenizer_json=unigram.to_str(), vocab_size=6, bos_id=None))
    assert tokenizer.encode_guarded("<s>a<\ue100s>", "\ue100") == [1, 2, 3, 4, 5]


async def test_large_texts_are_worked_on_in_another_thread():
    async def where(size):
        return await TINY.off_loop(size, threading.get_ident)

    assert await where(LARGE_TEXT) == threading.get_ident()
    assert await where(LARGE_TEXT + 1) != threading.get_ident()
    big = "hello " * 20_000
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    ids = await TINY.off_loop(len(big), lambda: TINY.encode(big))
    ticking.cancel()
    assert len(ids) > 20_000
    assert ticks > 0


def test_a_broken_tokenizer_is_one_clear_sentence():
    with pytest.raises(StartupError, match="the tokenizer of tiny cannot be read"):
        Tokenizer(tiny_card(tokenizer_json="{}"))
