"""How the byte-level BPE kinds of GGUF cut a text before merging: facts about public tokenizers, by their GGUF name.

``tokenizer.ggml.pre`` only names a pre-tokenizer; readers must know it. Each entry follows the tokenizer.json of the
model that the name comes from; which names are alike, skip merges or add BOS unasked follows llama.cpp's
src/llama-vocab.cpp.
"""

from typing import Any

import msgspec

Json = dict[str, Any]


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """``steps`` come before the byte mapping. ``ignore_merges``: a piece that is a token stays whole."""

    steps: list[Json] = []
    gpt2_regex: bool = False  # the byte mapping also cuts by GPT-2's regex
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


def split(regex: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def digits(individual: bool) -> Json:
    return {"type": "Digits", "individual_digits": individual}


GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def words(digits: str = "", marks: str = "") -> str:
    """Contractions, a word with at most one leading sign, numbers, signs, line ends, spaces. ``marks``: what belongs to
    a word beside letters."""
    letter = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    return (
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|\p{{N}}{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def cased(digits: str = "", end: str = "") -> str:
    """The same, where a word also ends before a capital, and has its contraction at its ``end``, if anywhere."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{end}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

GPT2 = PreTokenizer(gpt2_regex=True)
NEOX = PreTokenizer(gpt2_regex=True, nfc=True)
SINGLE_DIGITS = PreTokenizer(steps=[digits(True)], gpt2_regex=True)
LLAMA3 = PreTokenizer(steps=[split(words("{1,3}"))], ignore_merges=True, add_bos=True)
GPT4 = PreTokenizer(steps=LLAMA3.steps)
GPT4O = PreTokenizer(steps=[split(cased("{1,3}", f"{CONTRACTION}?"))])
QWEN2 = PreTokenizer(steps=[split(words())], nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What llama.cpp does with files older than the key.
    "default": PreTokenizer(
        steps=[split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2_REGEX), split(r"\p{N}+"), split(r"[0-9][0-9][0-9]")]
    ),
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "trillion": GPT2,
    "exaone4": GPT2,
    "jais": GPT2,
    "mpt": NEOX,
    "olmo": NEOX,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "codeshell": SINGLE_DIGITS,
    "minerva-7b": SINGLE_DIGITS,
    "exaone": SINGLE_DIGITS,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "smaug-bpe": msgspec.structs.replace(LLAMA3, add_bos=False),
    "dbrx": GPT4,
    "glm4": GPT4,
    "chatglm-bpe": GPT4,
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "megrez": QWEN2,
    "stablelm2": QWEN2,
    "qwen35": PreTokenizer(steps=[split(words(marks=r"\p{M}"))], nfc=True),
    "tekken": PreTokenizer(steps=[split(cased())], ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer(
        steps=[
            split(r"[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[一-龥ࠀ-一가-퟿]+"),
            digits(True),
        ]
    ),
    "deepseek-v3": PreTokenizer(steps=[split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3)]),
    "falcon": PreTokenizer(
        steps=[{"type": "Punctuation", "behavior": "Contiguous"}, split(GPT2_REGEX), split(r"[0-9][0-9][0-9]")]
    ),
    "poro-chat": PreTokenizer(steps=[split(r" ?[^(\s|[.,!?…。，、।۔،])]+")]),
}
