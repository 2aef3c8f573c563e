"""Ids to text, one choice at a time: whole characters only, stop strings over token borders. Pure; no I/O, no clock.

The bytes of ids are joined and decoded as UTF-8 as they come, so that the pieces put together equal a decode of the
whole: invalid bytes become U+FFFD, and a character that is still incomplete when the choice ends is dropped.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

import msgspec

from paceline.proto.request import TokenLogprobs


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice goes on from, for a client that asked to see it. ``logprobs``: of the ids from the second on."""

    ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice for a client. The last one of a choice carries ``finish_reason`` and may carry text, too.

    ``index`` is prompt * n + choice. ``ids`` and ``logprobs`` are those that arrived with it: text may lag behind.
    ``prompt`` is with the first one of each choice, if the call asks for anything of it.
    """

    index: int
    text: str
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    prompt: Prompt | None = None


class Detokenizer:
    """The text of one choice so far.

    Of several stop strings the one that is complete first counts; of those that end together, the longest. This
    depends on the text alone, not on how it was cut into tokens. Held back is only what may yet become a stop string.
    The text of the first ``num_free`` ids is shown at once and never looked at (a character counts where it is
    complete).
    """

    __slots__ = (
        "_bytes",
        "_first",
        "_held",
        "_include",
        "_longest",
        "_num_free",
        "_starting",
        "_stops",
        "_tail",
        "num_ids",
        "stopped",
    )

    def __init__(
        self,
        text_bytes: Sequence[bytes],
        stops: tuple[str, ...] = (),
        *,
        num_free: int = 0,
        include_stop: bool = False,
        strip_space: bool = False,
    ):
        """``text_bytes``: per id what it adds. ``include_stop``: the stop string stays in the text. ``strip_space``:
        drop a space that begins the whole text."""
        self._bytes = text_bytes
        self._stops = stops
        self._num_free = num_free
        self._include = include_stop
        self._longest = max(map(len, stops), default=0)
        self._first = frozenset(stop[0] for stop in stops)
        self._starting = strip_space
        self._tail = b""  # of a character that is not complete
        self._held = ""
        self.num_ids = 0  # taken so far: those up to the one that completed a stop string, once stopped
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now. After a stop string, nothing more is taken or given."""
        if self._stops:
            return self._push_with_stops(ids)
        self.num_ids += len(ids)
        table = self._bytes
        raw = table[ids[0]] if len(ids) == 1 else b"".join([table[id] for id in ids])
        return self._decode(raw)

    def skip(self) -> None:
        """One more id counts, and shows nothing."""
        if not self.stopped:
            self.num_ids += 1

    def flush(self) -> str:
        """The choice has ended by itself: what was held back for a stop string that did not come."""
        held, self._held, self._tail = self._held, "", b""
        return "" if self.stopped else held

    def _decode(self, raw: bytes) -> str:
        if self._tail:
            raw = self._tail + raw
        text, used = utf_8_decode(raw, "replace", False)
        self._tail = raw[used:]
        if self._starting and text:
            self._starting = False
            return text[1:] if text[0] == " " else text
        return text

    def _push_with_stops(self, ids: Sequence[int]) -> str:
        sure = []
        for id in ids:
            if self.stopped:
                break
            self.num_ids += 1
            text = self._decode(self._bytes[id])
            if not text:
                continue
            if self.num_ids <= self._num_free:
                sure.append(text)
                continue
            text = self._held + text
            match = self._match(text)
            if match is not None:
                self.stopped, self._held = True, ""
                sure.append(text[: match[1] if self._include else match[0]])
                break
            keep = self._hold_from(text)
            self._held = text[keep:]
            sure.append(text[:keep])
        return "".join(sure)

    def _match(self, text: str) -> tuple[int, int] | None:
        """Where the stop string begins and ends that is complete first."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, begin = min(found)
        return begin, end

    def _hold_from(self, text: str) -> int:
        """Where the longest end of ``text`` begins that a stop string begins with."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first:
                end = text[at:]
                if any(stop.startswith(end) for stop in self._stops):
                    return at
        return len(text)
