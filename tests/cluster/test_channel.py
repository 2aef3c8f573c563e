"""Who comes in, and that what is sent arrives whole and in order."""

import logging
import socket
import threading
import time
from multiprocessing.connection import Connection

import msgspec
import pytest

from paceline.cluster import channel
from paceline.cluster.channel import Door, Entrance, dial, local_address, set_timeouts, wait_for_hangup
from paceline.cluster.messages import Fault, Ping, decode, encode
from paceline.proto.errors import StartupError
from paceline.proto.step import StepPlan, StepResult, column
from tests.cluster.drive import TIMEOUT

HOST = "127.0.0.1"


@pytest.fixture(params=["from its host", "from another"])
def entrance(request):
    with Entrance(HOST) as entrance:
        assert entrance.door.local
        if request.param == "from another":
            entrance.door = entrance.door._replace(local="")
        yield entrance


def pair(entrance: Entrance) -> tuple[Connection, Connection]:
    """(the engine's end, the rank's end)"""
    rank = dial(entrance.door)
    engine = entrance.admitted(TIMEOUT)
    assert engine is not None
    return engine, rank


def test_frames_arrive_whole_and_in_order_both_ways_whatever_their_size(entrance):
    engine, rank = pair(entrance)
    frames = [b"a", bytes(1 << 20), b"c" * 20_000]
    for source, target in ((engine, rank), (rank, engine)):
        sender = threading.Thread(target=lambda source=source: [source.send_bytes(frame) for frame in frames])
        sender.start()
        assert [target.recv_bytes() for _ in frames] == frames
        sender.join(TIMEOUT)


def test_plans_results_and_controls_share_one_format():
    plan = StepPlan(step_id=7, chunk_slots=column([1, 2]), chunk_lens=column([3, 4]))
    result = StepResult(step_id=7, epochs=column([0, 0]), num_ids=column([1, 0]), ids=column([9]), faults={1: "nan"})
    messages = [plan, result, Ping(), Fault(message="the device is gone")]
    assert [decode(encode(message)) for message in messages] == messages
    with pytest.raises(msgspec.DecodeError):
        decode(b"?")


def test_who_has_another_key_is_turned_away_and_the_next_one_comes_in(entrance, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(StartupError, match=f"{HOST}:{entrance.door.port}"):
        dial(entrance.door._replace(key=b"another"))
    engine, rank = pair(entrance)
    rank.send_bytes(b"hello")
    assert engine.recv_bytes() == b"hello"
    assert "did not show this gang's key" in caplog.text


def test_who_says_nothing_at_the_door_holds_up_nobody(entrance):
    with socket.create_connection((HOST, entrance.door.port)):
        pair(entrance)


def test_who_says_nothing_for_too_long_is_turned_away(monkeypatch, caplog):
    monkeypatch.setattr(channel, "AUTH_TIMEOUT", 0.05)
    with Entrance(HOST) as entrance, socket.create_connection((HOST, entrance.door.port)) as stranger:
        stranger.settimeout(TIMEOUT)
        while stranger.recv(1024):  # the challenge, then the end
            pass
    assert "did not show this gang's key" in caplog.text


def test_after_the_start_nobody_comes_in():
    with Entrance(HOST) as entrance:
        engine, rank = pair(entrance)
    with pytest.raises(StartupError, match="cannot reach the engine"):
        dial(entrance.door)
    rank.send_bytes(b"still here")
    assert engine.recv_bytes() == b"still here"


def test_a_host_that_is_not_ours_is_a_startup_error():
    with pytest.raises(StartupError, match=r"cannot listen for its ranks on 192\.0\.2\.1"):
        Entrance("192.0.2.1")


def test_a_door_where_nobody_listens_is_a_startup_error():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StartupError, match="cannot reach the engine"):
        dial(Door(HOST, port, b"key"))


def test_a_hangup_is_noticed_though_there_is_something_to_read(entrance):
    engine, rank = pair(entrance)
    noticed = threading.Event()

    def watch() -> None:
        wait_for_hangup(rank)
        noticed.set()

    threading.Thread(target=watch, daemon=True).start()
    engine.send_bytes(b"a plan")
    assert not noticed.wait(0.1)
    engine.close()
    assert noticed.wait(TIMEOUT)
    assert rank.recv_bytes() == b"a plan"


def test_one_that_takes_nothing_is_waited_for_only_so_long(entrance):
    engine, _rank = pair(entrance)
    set_timeouts(engine, 0.05)

    def fill() -> None:
        while True:
            engine.send_bytes(bytes(1 << 20))

    with pytest.raises(BlockingIOError):
        fill()


def test_an_end_knows_its_address_and_interface(entrance):
    _, rank = pair(entrance)
    assert local_address(rank, entrance.door) == (HOST, "lo")


def test_where_the_name_leads_nowhere_a_rank_comes_in_by_tcp(entrance):
    rank = dial(entrance.door._replace(local="paceline-of-another-host"))
    assert entrance.admitted(TIMEOUT) is not None
    assert local_address(rank, entrance.door) == (HOST, "lo")


def test_the_entrance_leaves_no_thread_and_no_socket_behind():
    before = set(threading.enumerate())
    with Entrance(HOST) as entrance:
        pair(entrance)
    deadline = time.monotonic() + TIMEOUT
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
