"""Structures that clients ask for become grammars that a rank can follow, or a refusal. Off the event loop.

The work is done by processes of their own (`grammar_process.py`), since a text of a few hundred bytes can keep a
compiler for minutes, or end it. How a structure becomes a grammar is `grammars.py`.
"""

import asyncio
import queue
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from paceline.proto.errors import InvalidRequest
from paceline.proto.model import ModelCard
from paceline.router.formats import Structure
from paceline.router.grammar_process import TOO_COMPLEX, Answer, Question, frame, read_frame

NUM_PROCESSES = 2
MAX_KEPT_BYTES = 16 * 1024 * 1024


class Structures:
    """Of one model. The first structure starts a process, a second one at the same time another; both stay, and end
    with this object or with the router."""

    def __init__(self, card: ModelCard):
        self._card = msgspec.msgpack.encode(card)
        self._kept = _Kept(MAX_KEPT_BYTES)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "structures")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    async def compile(self, structure: Structure) -> str:
        """llguidance's text, for ``SamplingParams.grammar``. Raises InvalidRequest that names the structure's field."""
        question = Question(structure.kind, structure.source)
        answer = self._kept.get(question)
        if answer is None:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, question)
        if not answer.good:
            raise InvalidRequest(f"{structure.param or structure.kind} {answer.text}", structure.param)
        return answer.text

    def _ask(self, question: Question) -> Answer:
        """In a thread: as many as there are processes."""
        if (known := self._kept.get(question)) is not None:  # somebody asked the same meanwhile
            return known
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process(self._card)
        answer = process.ask(question)
        if process.alive:
            self._idle.put(process)
            self._kept.put(question, answer)
        return answer


class _Process:
    """One compiler, while it lives."""

    def __init__(self, card: bytes):
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.router.grammar_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where native code says that it panics
            start_new_session=True,  # what a terminal sends is for the router
        )
        weakref.finalize(self, _end, self._child)
        self.alive = True
        self._ready = self._exchange(card)

    def ask(self, question: Question) -> Answer:
        return self._exchange(msgspec.msgpack.encode(question)) if self._ready.good else self._ready

    def _exchange(self, payload: bytes) -> Answer:
        questions, answers = self._child.stdin, self._child.stdout
        assert questions is not None
        assert answers is not None
        try:
            questions.write(frame(payload))
            questions.flush()
            reply = read_frame(answers)
        except BrokenPipeError:
            reply = None
        if reply is None:
            self.alive = False
            return Answer(False, TOO_COMPLEX)
        return msgspec.msgpack.decode(reply, type=Answer)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


class _Kept:
    """The last answers, good and bad, up to a number of bytes. For several threads."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[Question, Answer] = OrderedDict()
        self._num_bytes = 0

    def get(self, question: Question) -> Answer | None:
        with self._lock:
            if question in self._answers:
                self._answers.move_to_end(question)
            return self._answers.get(question)

    def put(self, question: Question, answer: Answer) -> None:
        with self._lock:
            if question in self._answers:
                return
            self._answers[question] = answer
            self._num_bytes += _size(question, answer)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._answers.popitem(last=False))


def _size(question: Question, answer: Answer) -> int:
    return len(question.source) + len(answer.text) + 100
