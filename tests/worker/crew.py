"""Processes that play the ranks of a gang, without an engine: started once, then one gang after another.

Each runs functions that the test hands it, by name, with what earlier ones left in its `Member`.
"""

import multiprocessing
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.proto.codec import decode_plan, encode_step
from paceline.proto.load import RankMemory
from paceline.proto.step import StepPlan, StepResult
from paceline.worker.config import RankConfig
from paceline.worker.distributed import connect
from paceline.worker.parallel import Groups, Place
from paceline.worker.rank import Rank

TIMEOUT = 180.0  # seconds; only a hang takes so long
CPU = torch.device("cpu")


@dataclass
class Member:
    """One process. ``groups`` and ``rank`` are those of the gang it is in."""

    groups: Groups | None = None
    rank: Rank | None = None
    listener: socket.socket | None = None
    logits: list[torch.Tensor] = field(default_factory=list)


def _live(pipe) -> None:
    torch.set_num_threads(1)
    member = Member()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(member, *args)))
        except Exception as error:
            pipe.send((False, error))


class Crew:
    def __init__(self, size: int):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        self._gang: Gang | None = None
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable, args: list[tuple]) -> list[Any]:
        """``function(member, *args[i])`` in process i, all at once. Raises the first error."""
        self.tell(function, args)
        answers = [self.answer(i) for i in range(len(args))]
        for fine, answer in answers:
            if not fine:
                raise answer
        return [answer for _, answer in answers]

    def tell(self, function: Callable, args: list[tuple]) -> None:
        for pipe, own in zip(self.pipes, args, strict=False):
            pipe.send((function, own))

    def answer(self, i: int) -> tuple[bool, Any]:
        assert self.pipes[i].poll(TIMEOUT), f"process {i} does not answer"
        return self.pipes[i].recv()

    def meet(self, tp: int, pp: int = 1) -> list[str]:
        """Makes the first processes one gang, and ends the one before. Returns what carries each one's sums."""
        self._gang = None
        self.call(part, [()] * len(self.pipes))
        [port] = self.call(listen, [()])
        return self.call(meet, [(Place.of(i, tp, pp), port) for i in range(tp * pp)])

    def gang(self, config: RankConfig) -> "Gang":
        """A gang with its model, the one there is if it is that."""
        if self._gang is None or self._gang.config != config:
            self.meet(config.tensor_parallel_size, config.pipeline_parallel_size)
            self._gang = Gang(self, config)
        self._gang.rows.clear()
        return self._gang

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def listen(member: Member) -> int:
    """Kept open until ranks meet there: a port that was free a moment ago is soon somebody else's."""
    member.listener = socket.create_server(("127.0.0.1", 0))
    return member.listener.getsockname()[1]


def meet(member: Member, place: Place, port: int) -> str:
    listen_fd = member.listener.detach() if place.rank == 0 and member.listener else None
    member.groups = connect(place, "127.0.0.1", port, CPU, TIMEOUT, listen_fd=listen_fd)
    return type(member.groups).__name__


def part(member: Member) -> None:
    if member.groups is not None:
        member.groups.close()
    member.groups = member.rank = None


# -- a gang that a Driver drives ---------------------------------------------------------------------------------------


def load(member: Member, config: RankConfig) -> tuple[RankMemory, int, str, int]:
    """Returns what the rank holds, its blocks, its line, and the bytes of its layers' weights."""
    member.rank = rank = Rank(config, groups=member.groups)
    model = rank.runner.model
    if rank.groups.place.samples:
        compute = model.logits

        def logits(hidden):
            member.logits.append(compute(hidden))
            return member.logits[-1]

        model.logits = logits
    return rank.held, rank.num_kv_blocks, rank.describe(), weight_bytes(model.model.layers)


def weight_bytes(module: nn.Module) -> int:
    """Of all that was loaded into it: parameters, and weights that were packed away."""
    packed = [found for child in module.modules() if (found := getattr(child, "packed", None)) is not None]
    return sum(held.nbytes for held in (*module.parameters(), *packed))


def execute(member: Member, frame: bytes) -> tuple[StepResult, torch.Tensor | None]:
    assert member.rank is not None
    result = member.rank.execute(decode_plan(frame)).result()
    logits, member.logits = torch.cat(member.logits) if member.logits else None, []
    return result, logits


class Gang:
    """Stands in for a `Rank` before a `Driver`. ``rows`` are the logits of all steps collected so far."""

    def __init__(self, crew: Crew, config: RankConfig):
        self.crew, self.config = crew, config
        self.size = config.num_ranks
        told = crew.call(load, [(config,)] * self.size)
        self.held, blocks, self.lines, self.layer_bytes = zip(*told, strict=True)
        assert len(set(blocks)) == 1
        self.num_kv_blocks = blocks[0]
        self.sampling = (config.pipeline_parallel_size - 1) * config.tensor_parallel_size
        self.rows: list[torch.Tensor] = []

    def execute(self, plan: StepPlan) -> "Awaited":
        self.crew.tell(execute, [(encode_step(plan),)] * self.size)
        return Awaited(self)

    def take(self) -> torch.Tensor:
        rows, self.rows = torch.cat(self.rows), []
        return rows


class Awaited:
    """A step that all ranks were told. Results are taken in the order of the plans."""

    def __init__(self, gang: Gang):
        self.gang = gang

    def result(self) -> StepResult:
        answers = [self.gang.crew.answer(i) for i in range(self.gang.size)]
        for fine, answer in answers:
            if not fine:
                raise answer
        result, logits = answers[self.gang.sampling][1]
        if logits is not None:
            self.gang.rows.append(logits)
        return result


def gang_config(folder: Path, tp: int, pp: int, **fields) -> RankConfig:
    defaults = {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "num_kv_blocks": 128,
        "max_num_seqs": 16,
        "num_threads": 1,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
    }
    return RankConfig(**(defaults | fields))
