"""A process that compiles what clients send, so that it may take too long, take too much or crash: the kernel ends it.

It reads the vocabulary once and forks; the child compiles, and when it has come to grief the next one takes its place
in a millisecond. Standard input and output carry frames (`frame`, `read_frame`), one answer per question. The first
question is the model's card, each later one a kind and a source; an answer is whether it went well, and a text: the
grammar, or what is wrong, to be read after the name of the field. The other end is `structured.py`.
"""

import os
import re
import resource
import signal
import struct
import sys
from typing import IO

import llguidance
import msgspec

from paceline.proto.grammar import matcher_of, vocabulary_of
from paceline.proto.model import ModelCard
from paceline.router.grammars import grammar_of

# The rank compiles it once more, perhaps between two steps of everybody else; so a second of the processor is too much.
CPU_SECONDS = 0.5
WALL_SECONDS = 2.0
MEMORY_BYTES = 1024**3  # beside what the vocabulary takes
TOO_COMPLEX = "is too complex to be followed token by token"
_LENGTH = struct.Struct("!I")
_KEYWORD = re.compile(r'"(\$?[A-Za-z]{1,30})"')
# What llguidance says, and what we do. Its own words may quote the source.
_SENTENCES = (
    ("oneOf constraints", "has a oneOf whose branches may overlap; use anyOf"),
    ("Unsatisfiable", "can be met by no value"),
    ("Invalid type", "has a type that JSON schema does not have"),
    ("Unknown format", "has a format that is not supported"),
    ("does not exist", "has a $ref that leads nowhere"),
    ("not present in a registry", "has a $ref to another document, which is not fetched"),
    ("look-around", "has look-around, which is not supported"),
    ("backreferences", "has a backreference, which is not supported"),
    ("Failed to generate regex", "has a range of numbers that cannot be followed"),
    ("panic", TOO_COMPLEX),
    ("too ", TOO_COMPLEX),
    ("exhausted", TOO_COMPLEX),
    ("fuel", TOO_COMPLEX),
    ("recursion limit", TOO_COMPLEX),
    ("nested", TOO_COMPLEX),
    ("regex is empty", TOO_COMPLEX),
)


class Question(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    source: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    good: bool
    text: str


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None where the other end is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def answer(vocabulary: llguidance.LLTokenizer, question: Question) -> Answer:
    """A grammar that is good has been followed for one mask."""
    try:
        grammar = grammar_of(question.kind, question.source)
    except ValueError as error:
        return Answer(False, str(error))
    matcher = matcher_of(vocabulary, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return Answer(False, sentence(matcher.get_error()))
    return Answer(True, grammar)


def sentence(error: str) -> str:
    """Ours for one of llguidance's."""
    if "Unimplemented keys" in error:
        names = ", ".join(_KEYWORD.findall(error)[:10])
        return f"has keywords that are not supported: {names}"
    return next((words for part, words in _SENTENCES if part in error), "cannot be read")


def main() -> None:
    card = read_frame(sys.stdin.buffer)
    if card is None:
        return
    try:
        vocabulary = vocabulary_of(msgspec.msgpack.decode(card, type=ModelCard))
    except ValueError:
        _send(Answer(False, "cannot be asked of this model: its tokenizer does not allow it"))
        return
    _send(Answer(True, ""))
    while True:
        child = os.fork()
        if child == 0:
            _serve(vocabulary)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
        _send(Answer(False, TOO_COMPLEX))


def _serve(vocabulary: llguidance.LLTokenizer) -> None:
    """Until the other end is gone. Nobody handles the timers' signals: they end the process, in native code, too."""
    with open("/proc/self/statm") as pages:
        most = int(pages.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        question = msgspec.msgpack.decode(payload, type=Question)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        one = answer(vocabulary, question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(one)


def _send(one: Answer) -> None:
    sys.stdout.buffer.write(frame(msgspec.msgpack.encode(one)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
