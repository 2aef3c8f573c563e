"""Ranks in real processes sum, gather, share, send and wait: over memory that they share, and over gloo."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch

from paceline.proto.errors import StartupError
from paceline.worker import shared_memory
from paceline.worker.distributed import TorchGroups, connect
from paceline.worker.parallel import Groups, Place
from paceline.worker.shared_memory import BUFFER, SharedMemory
from tests.worker.crew import CPU, Crew, Member

NUM = BUFFER // 4  # fp32 values that one piece holds
SHAPES = [(1, 1), (3, 5), (64, 576), (1, NUM), (1, NUM + 1), (5, NUM // 2 + 3)]
CARRIERS = ("memory", "gloo")


@pytest.fixture(params=[2, 3])
def size(request, crew) -> int:
    crew.meet(request.param)
    return request.param


def part_of(rank: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def groups_of(member: Member, carrier: str) -> Groups:
    """What the member's groups do over memory, or what they would do without it."""
    groups = member.groups
    assert groups is not None
    if carrier == "memory":
        return groups
    assert isinstance(groups, TorchGroups)
    return TorchGroups(groups.place, 1, CPU, groups._store, groups._stage)


def sums(member: Member, carrier: str, shapes, dtype: torch.dtype) -> list[torch.Tensor]:
    groups = groups_of(member, carrier)
    parts = [part_of(groups.place.tp_rank, shape).to(dtype) for shape in shapes]
    return [groups.sum(part.t() if part.shape[0] == 3 else part) for part in parts]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_bits_of_the_sum(crew: Crew, size, carrier, dtype):
    told = crew.call(sums, [(carrier, SHAPES, dtype)] * size)
    for i, shape in enumerate(SHAPES):
        parts = [part_of(rank, shape).to(dtype) for rank in range(size)]
        expected = torch.stack(parts).double().sum(0)
        found = told[0][i].t() if shape[0] == 3 else told[0][i]
        rounding = 0.05 if dtype == torch.bfloat16 else 1e-5  # gloo rounds to bf16 after each addition
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=rounding)
        assert all(torch.equal(ranks[i], told[0][i]) for ranks in told)


def gathers(member: Member, carrier: str, rows: int, sizes: tuple[int, ...]) -> torch.Tensor | None:
    groups = groups_of(member, carrier)
    rank = groups.place.tp_rank
    return groups.gather(part_of(rank, (rows, sizes[rank])), sizes)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("widths", [(3, 5, 4), (NUM // 3, NUM // 3 - 1, 7), (NUM + 10, 3, NUM - 1)])
@pytest.mark.parametrize("rows", [1, 7])
def test_column_shards_of_any_width_come_together_on_the_first_rank(crew: Crew, size, carrier, widths, rows):
    widths = widths[:size]
    first, *others = crew.call(gathers, [(carrier, rows, widths)] * size)
    assert torch.equal(first, torch.cat([part_of(rank, (rows, width)) for rank, width in enumerate(widths)], 1))
    assert others == [None] * (size - 1)


def shares(member: Member, carrier: str, num: int) -> torch.Tensor:
    groups = groups_of(member, carrier)
    return groups.share(torch.arange(num) * 3 if groups.place.tp_rank == 0 else None, num)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("num", [1, 64, BUFFER // 8 + 5])
def test_ids_of_the_first_rank_are_shared(crew: Crew, size, carrier, num):
    assert all(torch.equal(ids, torch.arange(num) * 3) for ids in crew.call(shares, [(carrier, num)] * size))


def many_rounds(member: Member, rounds: int, nap: float) -> list[float]:
    """Sums, gathers and shares in turn. A rank that naps now and then makes the others wait in every way there is."""
    groups = member.groups
    assert groups is not None
    rank, tp = groups.place.tp_rank, groups.place.tp
    found = []
    for i in range(rounds):
        if i % (7 + rank) == 0:
            time.sleep(nap)
        found.append(groups.sum(torch.full((4,), float(i * (rank + 1))))[3].item())
        gathered = groups.gather(torch.full((2, 3), float(i + rank)), (3,) * tp)
        found.append(-1.0 if gathered is None else gathered.sum().item())
        found.append(groups.share(torch.tensor([i]) if rank == 0 else None, 1).item())
    return found


@pytest.mark.parametrize("nap", [0.0, 0.002])
def test_no_operation_reads_what_another_wrote(crew: Crew, size, nap):
    rounds = 300 if nap else 1000
    told = crew.call(many_rounds, [(rounds, nap)] * size)
    for rank, found in enumerate(told):
        for i in range(rounds):
            gathered = sum(6 * (i + other) for other in range(size)) if rank == 0 else -1
            assert found[3 * i : 3 * i + 3] == [i * size * (size + 1) / 2, gathered, i]


def stream(member: Member, num: int) -> list[float]:
    """Stages pass tensors on, each a little more than it was."""
    groups = member.groups
    assert groups is not None
    place, found = groups.place, []
    for i in range(num):
        shape = (1 + i % 3, 4)
        x = torch.full(shape, float(i)) if place.is_first_stage else groups.receive(shape, torch.float32, CPU)
        x = x + 0.25
        if place.is_last_stage:
            found.append(x[0, 0].item())
        else:
            groups.send(x)
    return found


def test_stages_send_ahead_and_receive_in_order(crew: Crew):
    crew.meet(1, 3)
    *others, last = crew.call(stream, [(50,)] * 3)
    assert others == [[], []]
    assert last == [i + 0.75 for i in range(50)]


def smallest(member: Member, value: int) -> tuple[int, int]:
    assert member.groups is not None
    return member.groups.smallest(value), member.groups.num_on_host


def test_the_smallest_is_of_all_ranks_and_hosts_are_counted(crew: Crew):
    crew.meet(2, 2)
    assert crew.call(smallest, [(i,) for i in (7, 9, 3, 5)]) == [(3, 4)] * 4


def maps_memory(member: Member) -> bool:
    return "memfd:paceline-ranks" in Path("/proc/self/maps").read_text()


def test_ranks_of_one_stage_and_host_map_memory_until_they_part(crew: Crew):
    assert crew.meet(2, 2) == ["HostGroups"] * 4
    assert crew.call(maps_memory, [()] * 4) == [True] * 4
    assert crew.meet(1, 2) == ["TorchGroups"] * 2
    assert crew.call(maps_memory, [()] * 4) == [False] * 4


def test_memory_of_another_process_is_not_taken_for_the_gangs():
    fd = shared_memory.make(2, b"a" * 16)
    try:
        os.close(shared_memory.open_of(os.getpid(), fd, b"a" * 16))
        with pytest.raises(OSError, match="another"):
            shared_memory.open_of(os.getpid(), fd, b"b" * 16)
    finally:
        os.close(fd)


def test_a_wait_ends_when_nobody_wants_its_result():
    class Unwanted(Exception):
        pass

    def still_wanted():
        raise Unwanted

    fd = shared_memory.make(2, b"")
    memory = SharedMemory(fd, 0, 2, still_wanted)
    os.close(fd)
    with pytest.raises(Unwanted):
        memory.sum(torch.ones(3))  # the other rank never comes


def test_one_rank_needs_nobody():
    groups = connect(Place(), "nowhere.invalid", 1, CPU, 1.0)
    x = torch.ones(2)
    assert groups.sum(x) is x
    assert groups.gather(x, (2,)) is x
    assert groups.smallest(5) == 5


def test_a_rank_that_meets_nobody_says_where_and_how_long_it_waited():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        port = held.getsockname()[1]
        with pytest.raises(StartupError, match=rf"Rank 1 could not meet .* 127\.0\.0\.1:{port} within 1 s"):
            connect(Place.of(1, 2, 1), "127.0.0.1", port, CPU, 1.0)
