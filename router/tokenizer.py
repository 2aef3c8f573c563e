"""Text to ids, and the bytes behind each id. Made from the card's `tokenizer.json` alone: no files, no Hub.

It knows byte-level BPE and SentencePiece vocabularies; chat templates are `chat.py`, text that comes out is
`detokenizer.py`.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import tokenizers

from paceline.proto.errors import StartupError
from paceline.proto.model import ModelCard

LARGE_TEXT = 16 * 1024  # characters; more is tokenized off the event loop

T = TypeVar("T")

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's vocabulary. Immutable after construction and safe to use from several threads.

    Attributes: ``vocab_size`` (ids that the model can emit), ``special_ids`` (never shown as text), ``special_strings``
    (how control tokens are written, longest first), ``text_bytes`` (per id what it adds to the text: nothing for
    special ids), ``written_bytes`` (the same, control tokens as they are written) and ``leading_space`` (SentencePiece:
    a text of its own loses the space before its first word).
    """

    def __init__(self, card: ModelCard):
        """Raises StartupError if the card holds no tokenizer or a broken one."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"the tokenizer of {card.name} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._json = card.tokenizer_json
        self._bos_id = card.bos_id
        self._add_bos = card.add_bos and card.bos_id is not None
        self.vocab_size = card.vocab_size

        added = self._tokenizer.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.special}
        controls = {*special, *card.eos_ids} | ({card.bos_id} if card.bos_id is not None else set())
        self.special_ids = frozenset(controls)
        self.special_strings = tuple(sorted({token.content for token in special.values()}, key=len, reverse=True))
        # A normalizer could turn user text into such a token, so plain detection by string is not enough.
        self.always_guard = self._tokenizer.normalizer is not None and any(t.normalized for t in special.values())

        kind = _decoder_kinds(json.loads(self._json).get("decoder"))
        self.leading_space = bool(kind & {"Metaspace", "Strip"})
        size = max(card.vocab_size, self._tokenizer.get_vocab_size(), max(added, default=0) + 1)
        to_bytes = _piece_reader(kind)
        self._bytes = [b""] * size
        for piece, id in self._tokenizer.get_vocab().items():
            if id in added:
                self._bytes[id] = added[id].content.encode()
            elif to_bytes:
                self._bytes[id] = to_bytes(piece)
            else:
                self._bytes[id] = self._tokenizer.decode([id], skip_special_tokens=False).encode()
        self.text_bytes = [b"" if id in controls else raw for id, raw in enumerate(self._bytes)]
        self.written_bytes: Sequence[bytes] = self._bytes

    def token_bytes(self, id: int) -> bytes:
        """What the id stands for, control tokens by their written form; a part of a character is possible."""
        return self._bytes[id] if 0 <= id < len(self._bytes) else b""

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """A plain prompt: the caller's own text, in which control tokens may be written out. At most one BOS leads."""
        ids = _ids(self._tokenizer, text)
        return self._with_bos(ids) if add_bos else ids

    def decode(self, ids: list[int]) -> str:
        """The text of whole ids, control tokens as they are written. What is no character becomes U+FFFD."""
        pieces = [self.token_bytes(id) for id in ids]
        first = next((at for at, id in enumerate(ids) if id not in self.special_ids), None)
        if self.leading_space and first is not None:
            pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def encode_template(self, text: str) -> list[int]:
        """Rendered chat text in which every control token was written by the template."""
        return self._with_bos(_ids(self._tokenizer, text))

    def encode_guarded(self, text: str, sentinel: str) -> list[int]:
        """Rendered chat text in which ``sentinel`` breaks what a user wrote like a control token.

        Intact control tokens count; the sentinel vanishes, and what it broke is plain text.
        """
        plain, alias = self._aliased
        text = self.special_pattern.sub(lambda match: alias[match[0]], text)
        return self._with_bos(_ids(plain, text.replace(sentinel, "")))

    def prepare_guard(self) -> None:
        """Makes now what the first guarded text needs: a good part of a second for a large vocabulary."""
        _ = self._aliased

    @staticmethod
    async def off_loop(size: int, work: Callable[[], T], large: int = LARGE_TEXT) -> T:
        """Runs ``work`` here unless ``size`` is over ``large``: then in a thread, while the loop goes on."""
        return work() if size <= large else await asyncio.to_thread(work)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._bos_id
        if bos is None:
            return ids
        num_leading = next((at for at, id in enumerate(ids) if id != bos), len(ids))
        if num_leading > 1:
            ids = ids[num_leading - 1 :]
        return [bos, *ids] if self._add_bos and num_leading == 0 else ids

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds control tokens as they are written, the longest first."""
        return re.compile("|".join(map(re.escape, self.special_strings)) or r"(?!)")

    @cached_property
    def _aliased(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The same vocabulary, its control tokens under names that nobody outside can know, and those names.

        One pass over one text keeps every rule of the normalizer (first word, whitespace) as it is; encoding the
        pieces between control tokens one by one would not.
        """
        spec = json.loads(self._json)
        nonce = secrets.token_hex(8)
        alias = {text: f"\ue000{nonce}x{at}\ue001" for at, text in enumerate(self.special_strings)}
        for token in spec["added_tokens"]:
            if token["special"]:
                token |= {"content": alias[token["content"]], "normalized": False}
        model = spec["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {alias.get(piece, piece): id for piece, id in vocab.items()}
        elif isinstance(vocab, list):
            model["vocab"] = [[alias.get(piece, piece), score] for piece, score in vocab]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        return tokenizers.Tokenizer.from_str(json.dumps(spec)), alias


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # A batch of one: only the batch calls let go of the GIL (`encode` was seen to hold it for seconds).
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _decoder_kinds(decoder: dict | None) -> set[str]:
    if not decoder:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*map(_decoder_kinds, decoder["decoders"]))
    return {decoder["type"]}


def _piece_reader(kinds: set[str]) -> Callable[[str], bytes] | None:
    """How a vocabulary piece spells its bytes; None if only the tokenizer's own decoder knows."""
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda piece: bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece_bytes
    return None


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones stand for themselves, the others
    follow from U+0100 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    for at, byte in enumerate(byte for byte in range(256) if byte not in printable):
        alphabet[chr(256 + at)] = byte
    return alphabet
