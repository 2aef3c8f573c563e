"""The tokenizer inside a GGUF file's metadata, written out as the JSON of the ``tokenizers`` library.

Two kinds are known, byte-level BPE (``tokenizer.ggml.model`` = gpt2) and SentencePiece BPE (= llama). Pre-tokenizers
of the first are in gguf_pretokenizers.py. Nothing is tokenized here.
"""

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Vocabulary, bos_processor
from paceline.worker.gguf_pretokenizers import PRE_TOKENIZERS

Json = dict[str, Any]
PREFIX = "tokenizer.ggml."
SPACE = "▁"
# Tokens that end a turn although no metadata key may say so: counted as ends where the file marks them as control
# tokens and its chat template writes them. eos alone is often the end of a document, which chat models do not emit.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
)
# Phi-3's markers take the white space behind them along; no metadata key says so. All but these:
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_vocabulary(meta: Json, path: Path) -> Vocabulary:
    """``meta`` is the file's metadata. Raises ``StartupError`` for a tokenizer of unknown kind or a missing part."""
    kind = _need(meta, "model", path)
    if kind not in ("gpt2", "llama"):
        raise StartupError(
            f"{path} has a tokenizer of kind '{kind}' (tokenizer.ggml.model), which is not supported; "
            "supported: gpt2 (byte-level BPE) and llama (SentencePiece)."
        )
    tokens: list[str] = _need(meta, "tokens", path)
    types: list[int] = meta.get(PREFIX + "token_type", [TokenType.NORMAL] * len(tokens))
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    tokenizer, add_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(meta, path, tokens, types, ids)
    # Files of the SentencePiece kind may leave these out; the values are LLaMA's.
    bos_id = _token_id(meta, "bos_token_id", tokens, path, 1 if kind == "llama" else None)
    eos_id = _token_id(meta, "eos_token_id", tokens, path, 2 if kind == "llama" else None)
    add_bos = bool(meta.get(PREFIX + "add_bos_token", add_bos)) and bos_id is not None
    if add_bos and bos_id is not None:
        tokenizer["post_processor"] = bos_processor(tokens[bos_id], bos_id)
    template = meta.get("tokenizer.chat_template")
    ends = [eos_id, *(_token_id(meta, key, tokens, path) for key in ("eot_token_id", "eom_token_id"))]
    for token in TURN_ENDS:
        if token in (template or "") and token in ids and types[ids[token]] == TokenType.CONTROL:
            ends.append(ids[token])
    named = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": _token_id(meta, "unknown_token_id", tokens, path),
        "pad_token": _token_id(meta, "padding_token_id", tokens, path),
    }
    return Vocabulary(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        chat_template=template,
        template_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        bos_id=bos_id,
        add_bos=add_bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _byte_level(meta: Json, path: Path, tokens: list[str], types: list[int], ids: dict[str, int]) -> tuple[Json, bool]:
    """The tokenizer and whether it adds BOS where the file does not say."""
    pre = meta.get(PREFIX + "pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise StartupError(
            f"{path} cuts text by '{pre}' (tokenizer.ggml.pre), which is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}."
        )
    known = PRE_TOKENIZERS[pre]
    byte_map = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": known.gpt2_regex}
    # A space inside a token is written as another sign, so the first space after a token's first sign divides the pair.
    merges = [(merge[: merge.find(" ", 1)], merge[merge.find(" ", 1) + 1 :]) for merge in _need(meta, "merges", path)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if known.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*known.steps, byte_map]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=known.ignore_merges),
    }
    return tokenizer, known.add_bos


def _sentencepiece(
    meta: Json, path: Path, tokens: list[str], types: list[int], ids: dict[str, int]
) -> tuple[Json, bool]:
    """Spaces are ``▁``; a space is put before the text and after each special token, as LLaMA's tokenizer does."""
    scores: list[float] = _need(meta, "scores", path)
    add_space = bool(meta.get(PREFIX + "add_space_prefix", True))
    to_sign: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if add_space else []
    to_sign.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    to_text: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_space:
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _token_id(meta, "unknown_token_id", tokens, path, 0)
    added = _added_tokens(tokens, types)
    if meta.get("general.architecture") == "phi3":
        added = [token | {"rstrip": token["content"] not in PHI3_PLAIN} for token in added]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": to_sign},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": to_text},
        "model": _bpe(
            ids,
            merges_of(tokens, types, scores),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
    return tokenizer, True


def merges_of(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for, best first.

    SentencePiece joins, again and again, the neighbours whose union is the token with the best score (Kudo and
    Richardson, 2018); every way to cut a token into two tokens is therefore a merge of that token's rank. Equal scores
    go by id, the order in which the trainer found them.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (TokenType.NORMAL, TokenType.BYTE)}
    normal = [i for i in ids.values() if types[i] == TokenType.NORMAL and len(tokens[i]) > 1]
    merges = []
    for i in sorted(normal, key=lambda i: (-scores[i], i)):
        cuts = [(tokens[i][:at], tokens[i][at:]) for at in range(len(tokens[i]) - 1, 0, -1)]
        merges += [(left, right) for left, right in cuts if left in ids and right in ids]
    return merges


def _added_tokens(tokens: list[str], types: list[int]) -> list[Json]:
    """Tokens that are found in a text before all else. Control tokens are special: left out when ids become text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    return [
        {"id": i, "content": token, **flags, "special": kind in special}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (*special, TokenType.USER_DEFINED) and token
    ]


def _bpe(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _need(meta: Json, key: str, path: Path) -> Any:
    if PREFIX + key not in meta:
        raise StartupError(
            f"{path} lacks the metadata key {PREFIX}{key}, so it has no whole tokenizer; convert the model again with "
            "a current llama.cpp."
        )
    return meta[PREFIX + key]


def _token_id(meta: Json, key: str, tokens: list[str], path: Path, default: int | None = None) -> int | None:
    value = meta.get(PREFIX + key, default)
    if value is not None and not 0 <= value < len(tokens):
        if value in (0xFFFFFFFF, -1):  # ggml's way to say none
            return None
        raise StartupError(f"{path} has {PREFIX}{key} {value}, but only {len(tokens)} tokens; download the file again.")
    return value
