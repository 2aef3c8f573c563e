"""What waits for a router: in which order it goes out, how it merges, and what happens when nobody takes it."""

import asyncio

import pytest

from paceline.cluster import outbox as outbox_module
from paceline.cluster.outbox import Outbox
from paceline.proto.load import ReplicaLoad
from paceline.proto.replica_pb2 import Accepted, AttachResponse
from paceline.proto.request import TokenDelta, TokenLogprobs


def row(handle: int, offset: int, *ids: int, **more) -> tuple[int, TokenDelta]:
    return handle, TokenDelta(request_id=f"r{handle}", choice=0, offset=offset, ids=list(ids), **more)


def accepted(handle: int) -> AttachResponse:
    return AttachResponse(accepted=Accepted(handle=handle))


async def take(outbox: Outbox) -> AttachResponse | None:
    return await asyncio.wait_for(outbox.take(), 2)


async def test_deltas_of_several_steps_leave_as_one_frame_in_their_order():
    outbox = Outbox()
    outbox.deltas([row(1, 0, 10, 11), row(2, 0, 20)])
    outbox.deltas([row(1, 2, 12)])
    frame = (await take(outbox)).deltas
    assert list(frame.handles) == [1, 2, 1]
    assert list(frame.offsets) == [0, 0, 2]
    assert list(frame.num_ids) == [2, 1, 1]
    assert list(frame.ids) == [10, 11, 20, 12]
    outbox.deltas([row(2, 1, 21)])
    assert list((await take(outbox)).deltas.ids) == [21]


async def test_accepted_leaves_before_deltas_that_were_already_waiting():
    outbox = Outbox()
    outbox.deltas([row(1, 0, 10)])
    outbox.control(accepted(1))
    outbox.control(accepted(2))
    assert [(await take(outbox)).WhichOneof("frame") for _ in range(3)] == ["accepted", "accepted", "deltas"]


async def test_only_the_newest_load_is_sent_and_a_backlog_does_not_hide_it():
    outbox = Outbox()
    outbox.deltas([row(1, 0, 10)])
    for step in (1, 2, 3):
        outbox.heartbeat(ReplicaLoad(step_id=step))
    first, second = await take(outbox), await take(outbox)
    assert first.heartbeat.load.step_id == 3
    assert second.WhichOneof("frame") == "deltas"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.take(), 0.02)


@pytest.mark.parametrize(
    "put",
    [
        lambda outbox: outbox.control(accepted(1)),
        lambda outbox: outbox.deltas([row(1, 0, 10)]),
        lambda outbox: outbox.heartbeat(ReplicaLoad()),
    ],
)
async def test_a_writer_that_waits_wakes_up_for_anything(put):
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    put(outbox)
    assert await asyncio.wait_for(taking, 2) is not None


async def test_an_ended_outbox_gives_what_waits_and_then_nothing():
    outbox = Outbox()
    outbox.deltas([row(1, 0, 10)])
    outbox.end()
    assert (await take(outbox)).WhichOneof("frame") == "deltas"
    assert await take(outbox) is None


async def test_a_writer_that_waits_is_told_of_the_end_and_of_an_overflow(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 1000)
    for act in (Outbox.end, lambda outbox: outbox.deltas([row(1, 0, *range(200))])):
        outbox = Outbox()
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        act(outbox)
        assert await asyncio.wait_for(taking, 2) is None


async def test_past_the_limit_nothing_is_kept_and_nothing_more_is_taken_in(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 10_000)
    outbox = Outbox()
    outbox.control(accepted(1))
    for step in range(1000):
        outbox.deltas([row(1, step, step)])
    assert outbox.overflowed.is_set()
    assert outbox._deltas == []
    assert await take(outbox) is None


async def test_what_was_taken_no_longer_counts_towards_the_limit(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 10_000)
    outbox = Outbox()
    for step in range(1000):
        outbox.deltas([row(1, step, step)])
        if step % 10 == 0:
            await take(outbox)
    assert not outbox.overflowed.is_set()


async def test_logprobs_and_rows_without_ids_count_towards_the_limit(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 100_000)
    tops = [TokenLogprobs(-1.0, list(range(20)), [-1.0] * 20)]
    for waiting in (
        row(1, 0, 7, logprobs=tops),
        row(1, 0, prompt_logprobs=tops),
        row(1, 0, finish_reason="stop"),
    ):
        outbox = Outbox()
        for _ in range(1000):
            outbox.deltas([waiting])
        assert outbox.overflowed.is_set()
