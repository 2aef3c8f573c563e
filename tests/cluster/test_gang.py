"""A replica of several ranks, as real processes that compute nothing: what they are given, and how they end."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace

import grpc.aio
import msgspec
import psutil
import pytest

from paceline.cluster import gang as gang_module
from paceline.cluster.channel import Door, dial
from paceline.cluster.engine import engine as engine_module
from paceline.cluster.gang import PHASES, load_gang, numbered
from paceline.cluster.host import EngineHost
from paceline.cluster.lines import Lines
from paceline.cluster.spawn import ChildLauncher
from paceline.proto.errors import ReplicaLost, StartupError
from paceline.proto.replica_pb2_grpc import ReplicaServiceStub
from paceline.proto.step import StepPlan, StepResult
from tests.cluster.drive import TIMEOUT, GatedExecutor, RawRouter, attached, hello, running_replica, until
from tests.cluster.engine.fakes import Drive, FakeExecutor, expected_ids, make_request, make_scheduler
from tests.cluster.fake_rank import NUM_BLOCKS, WORK, gang_config, launcher_of
from tests.cluster.test_preflight import HELLO

HOST = "127.0.0.1"


class Gang:
    """A gang that is being started, or runs."""

    def __init__(self, launcher: ChildLauncher, config):
        self.launcher = launcher
        self.phases: list[tuple[str, float]] = []
        self.loaded = load_gang(config, launcher, lambda *phase: self.phases.append(phase), host=HOST)

    @property
    def executor(self):
        return self.loaded.executor

    def pid(self, rank: int) -> int:
        return self.launcher.children[rank].pid  # on one host, ranks are numbered as they were launched


@contextmanager
def running_gang(*shape: int, **settings):
    config = gang_config(*shape, **settings)
    launcher = launcher_of(config)
    try:
        yield Gang(launcher, config)
    finally:
        launcher.kill()


def start_error(*shape: int, launcher_type=None, **settings) -> str:
    """Why it does not start; nothing of it is left."""
    config = gang_config(*shape, **settings)
    launcher = launcher_type(config.rank.num_ranks, WORK) if launcher_type else launcher_of(config)
    with pytest.raises(StartupError) as raised:
        load_gang(config, launcher, lambda phase, seconds: None, host=HOST)
    assert None not in [child.returncode for child in launcher.children]
    return str(raised.value)


@pytest.fixture
def time_is_up_when(monkeypatch):
    """Stops the clock of a start until a condition over the lines holds: from then on it runs far too fast."""

    def when(condition) -> None:
        made: list[Lines] = []
        hours = itertools.count(1)

        def make(*arguments):
            made.append(Lines(*arguments))
            return made[0]

        def monotonic() -> float:
            return 3600.0 * next(hours) if made and condition(list(made[0])) else 0.0

        monkeypatch.setattr(gang_module, "Lines", make)
        monkeypatch.setattr(gang_module, "time", SimpleNamespace(monotonic=monotonic))

    return when


def num_done(line) -> int:
    """Phases of a start that a rank is through with."""
    return (line.hello is not None) + (line.facts is not None) + len(line.phases)


def run(gang, plans) -> None:
    for plan in plans:
        gang.executor.submit(plan)
        gang.executor.collect()


def empty_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id)


def plans_of(*requests) -> list[StepPlan]:
    drive = Drive(make_scheduler(), FakeExecutor())
    drive.add(*requests)
    return drive.run().executor.plans


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)])
def test_every_rank_gets_every_plan_in_order_and_one_answers(shape, tmp_path):
    requests = [make_request(f"r{i}", prompt=10 + 7 * i, max_tokens=12) for i in range(5)]
    with running_gang(*shape, dump_dir=tmp_path) as gang:
        drive = Drive(make_scheduler(depth=2), gang.executor)
        drive.add(*requests)
        drive.run()
        gang.executor.close()
    assert [drive.emitted[r.request_id, 0] for r in requests] == [expected_ids(r) for r in requests]
    digests = [(tmp_path / f"plans-{rank}").read_text() for rank in range(shape[0] * shape[1])]
    assert len(set(digests)) == 1
    assert drive.steps >= 12


def test_a_rank_that_is_slow_does_not_change_what_comes_out(tmp_path):
    request = make_request(max_tokens=20)
    slow = "\n".join(f"1,slow,step,{step}" for step in range(0, 20, 3))
    with running_gang(2, dump_dir=tmp_path, misbehaviour=slow) as gang:
        drive = Drive(make_scheduler(depth=2), gang.executor)
        drive.add(request)
        drive.run()
        gang.executor.close()
    assert drive.emitted["r", 0] == expected_ids(request)
    assert (tmp_path / "plans-0").read_text() == (tmp_path / "plans-1").read_text()


def test_what_is_loaded_tells_of_all_ranks():
    with running_gang(2, 2) as gang:
        loaded = gang.loaded
        assert loaded.num_blocks == NUM_BLOCKS - 3  # the smallest
        assert [(each.rank, each.weight_bytes) for each in loaded.ranks] == [(r, 10 + r) for r in range(4)]
        assert loaded.card.fingerprint == "fake-1"
        assert loaded.depth == 2
        assert loaded.description.splitlines() == ["a fake of 1 threads"] * 4
        gang.executor.close()
    with running_gang(1, 3) as gang:
        assert gang.loaded.depth == 3
        gang.executor.close()


def test_phases_are_told_in_order_with_the_slowest_ranks_seconds():
    with running_gang(3) as gang:
        assert tuple(name for name, _ in gang.phases) == PHASES
        assert dict(gang.phases)["weights"] == 2.0  # a fake says its rank


def test_close_ends_ranks_in_peace_and_may_be_called_again():
    with running_gang(2) as gang:
        gang.executor.close()
        assert [child.returncode for child in gang.launcher.children] == [0, 0]
        gang.executor.close()


def test_the_key_is_in_no_childs_arguments_or_environment():
    class Watched(ChildLauncher):
        def start(self, door: Door) -> None:
            self.key = door.key.hex()
            super().start(door)

    config = gang_config(2)
    launcher = Watched(2, WORK)
    try:
        executor = load_gang(config, launcher, lambda phase, seconds: None, host=HOST).executor
        for child in launcher.children:
            process = psutil.Process(child.pid)
            assert launcher.key not in str(process.cmdline()) + str(process.environ())
        executor.close()
    finally:
        launcher.kill()


# -- the end of a rank -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_its_result_is_due_is_named(rank):
    hang = f"{rank},hang,step,3\n{1 - rank},hang,step,3"
    with running_gang(2, misbehaviour=hang) as gang:
        plans = plans_of(make_request())
        run(gang, plans[:3])
        gang.executor.submit(plans[3])
        killer = threading.Timer(0.1, os.kill, (gang.pid(rank), signal.SIGKILL))
        killer.start()
        with pytest.raises(ReplicaLost, match=rf"rank {rank} \(.*pid {gang.pid(rank)}\) ended .*SIGKILL"):
            gang.executor.collect()
        gang.executor.close()
        assert None not in [child.returncode for child in gang.launcher.children]


def test_a_fault_of_a_step_is_told_in_its_words_also_by_a_rank_that_does_not_answer():
    with running_gang(2, misbehaviour="1,break,step,2") as gang:
        plans = plans_of(make_request())[:3]
        with pytest.raises(ReplicaLost, match=r"rank 1 \(.*RuntimeError: the device is gone"):
            run(gang, [*plans, *map(empty_plan, range(3, 1000))])


def test_a_rank_torn_along_by_a_dead_one_does_not_take_the_blame():
    with running_gang(3, misbehaviour="1,die,step,2\n2,break,step,2\n0,hang,step,2") as gang:
        with pytest.raises(ReplicaLost) as lost:
            run(gang, plans_of(make_request()))
        assert str(lost.value).startswith("rank 1 ")
        assert "rank 2 " in str(lost.value)


def test_a_result_of_another_step_than_the_one_due_is_an_error():
    with running_gang(2) as gang:
        gang.executor.submit(plans_of(make_request())[0])
        gang.executor._expected[0] = 9
        with pytest.raises(AssertionError, match="step 0 came where 9 was due"):
            gang.executor.collect()


@asynccontextmanager
async def gang_host(config):
    launcher = launcher_of(config)
    host = EngineHost(config, lambda config, on_phase: load_gang(config, launcher, on_phase, host=HOST), "host-t")
    host.start()
    try:
        await asyncio.wait_for(host.ready(), TIMEOUT)
        yield host, launcher
    finally:
        await asyncio.wait_for(host.stop(), TIMEOUT)
        launcher.kill()


def kill(child, number: int = signal.SIGKILL) -> None:
    child.send_signal(number)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_every_open_request_and_every_other_process(rank):
    async with gang_host(gang_config(2)) as (host, launcher):
        caller, answers = host.open("router"), []
        rows = []
        caller.outbox.deltas = rows.extend
        for handle in range(4):
            request = make_request(f"r{handle}", max_tokens=1900)
            host.submit(caller, handle, request, answers.append)
        await until(lambda: len(answers) == 4 and host.load.generation_tokens_total > 20)
        kill(launcher.children[rank])
        await until(lambda: host.failed.is_set())
        assert answers == [None] * 4
        ended = [handle for handle, delta in rows if delta.finish_reason == "error"]
        assert sorted(ended) == [0, 1, 2, 3]
        await until(lambda: all(child.poll() is not None for child in launcher.children))


@pytest.mark.parametrize(("number", "told"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "did nothing for")])
async def test_a_rank_that_is_lost_while_there_is_nothing_to_do_is_noticed(number, told, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "IDLE_CHECK", 0.02)
    async with gang_host(gang_config(2, step_timeout=100.0)) as (host, launcher):
        await asyncio.sleep(0.2)
        assert not host.failed.is_set()
        kill(launcher.children[1], number)
        await until(lambda: host.failed.is_set())
        assert host.state == "dead"
        assert f"rank 1 ({socket.gethostname()}" in caplog.text
        assert told in caplog.text
        await until(lambda: all(child.poll() is not None for child in launcher.children))


def test_ranks_end_when_their_engine_is_gone_even_in_the_middle_of_a_step():
    with running_gang(2, misbehaviour="0,hang,step,0") as gang:
        gang.executor.submit(plans_of(make_request())[0])
        gang.executor._lines.close()  # what the system does for an engine that was killed
        assert [child.wait(TIMEOUT) for child in gang.launcher.children] == [1, 1]


# -- whole replicas ----------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from paceline.cluster.gang import load_gang
from paceline.cluster.run import run_replica
from tests.cluster.fake_rank import launcher_of, gang_config

config = gang_config(2, step_timeout=1.0)
launcher = launcher_of(config)

def load(config, on_phase):
    return load_gang(config, launcher, on_phase, host="127.0.0.1")

def ready(address):
    print(address, *(child.pid for child in launcher.children), flush=True)

sys.exit(asyncio.run(run_replica(config, load=load, ready=ready)))
"""


@asynccontextmanager
async def replica_process():
    """(the process, its ranks' ids, a router on it whose request has begun)"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE)
    pids: list[int] = []
    try:
        address, *told = (await asyncio.wait_for(child.stdout.readline(), TIMEOUT)).decode().split()
        pids += map(int, told)
        async with grpc.aio.insecure_channel(address) as channel:
            router = RawRouter(ReplicaServiceStub(channel).Attach())
            await router.send(hello=hello())
            await router.submit(1, make_request(max_tokens=1900))
            await router.read_until(lambda: bool(router.ids(1)))
            yield child, pids, router
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_rank_that_is_stopped_under_load_ends_the_replica_and_no_process_stays():
    async with replica_process() as (child, pids, router):
        os.kill(pids[0], signal.SIGSTOP)
        with suppress(grpc.aio.AioRpcError):  # the stream breaks, or ends with the request's error
            await router.read_to_end()
            assert router.endings(1) == [(0, "error")]
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 1
        await until(lambda: not any(map(is_alive, pids)))


async def test_ranks_end_with_a_replica_that_is_killed_even_one_that_is_stopped():
    async with replica_process() as (child, pids, _):
        os.kill(pids[1], signal.SIGSTOP)
        child.kill()
        await child.wait()
        await until(lambda: not any(map(is_alive, pids)))


class StuckExecutor(GatedExecutor):
    """Its step ends only when its ranks are killed."""

    def __init__(self):
        super().__init__()
        self.killed = threading.Event()

    def collect(self) -> StepResult:
        self.collecting.set()
        assert self.killed.wait(TIMEOUT)
        raise ReplicaLost("the ranks were killed")

    def kill(self) -> None:
        self.killed.set()


async def test_a_replica_that_is_given_up_kills_its_ranks_and_with_them_what_its_engine_waits_for():
    executor = StuckExecutor()
    async with running_replica(executor) as replica:
        router = await attached(replica)
        await router.submit(1, make_request())
        await until(executor.collecting.is_set)
        await asyncio.to_thread(replica.server.give_up, "the engine did not get on")
        assert executor.killed.is_set()
        await until(executor.closed.is_set)
        assert replica.server.state == "dead"


# -- starts that fail --------------------------------------------------------------------------------------------------


class OneShort(ChildLauncher):
    """Process 1 never comes."""

    def _start_one(self, door, index):
        return subprocess.Popen(["sleep", "1000"]) if index == 1 else super()._start_one(door, index)


class OneFails(ChildLauncher):
    """Process 1 ends before it says anything."""

    def _start_one(self, door, index):
        return subprocess.Popen(["false"]) if index == 1 else super()._start_one(door, index)


def test_a_process_that_does_not_connect_is_named_beside_those_that_did_and_what_may_be_in_the_way(time_is_up_when):
    time_is_up_when(lambda lines: sum(line.hello is not None for line in lines) == 2)
    told = start_error(3, launcher_type=OneShort)
    assert told.startswith(f"rank process 1 did not connect to {HOST}:")
    assert "within 600 s (--start-timeout; " in told
    assert "rank process 0 (" in told
    assert "rank process 2 (" in told
    assert "firewall" in told


def test_a_process_that_ends_before_it_connects_is_told_without_waiting():
    told = start_error(2, launcher_type=OneFails)
    assert told.startswith("rank process 1 did not come: it exited with 1")


@pytest.mark.parametrize("phase", ["pre-flight", "groups", "weights", "warm-up"])
def test_a_rank_that_hangs_in_a_phase_is_named_with_it(phase, time_is_up_when):
    before = PHASES.index(phase)  # phases that rank 1 gets through
    time_is_up_when(lambda lines: len(lines) == 2 and num_done(lines[1]) == before < num_done(lines[0]))
    told = start_error(2, misbehaviour=f"1,hang,{phase}")
    assert told.startswith("rank 1 (")
    assert f"did not get through '{phase}' within 600 s (--start-timeout); rank 0 (" in told


def test_a_phase_that_nobody_gets_through_is_named_too(time_is_up_when):
    time_is_up_when(lambda lines: len(lines) == 2 and all(line.facts for line in lines))
    told = start_error(2, misbehaviour="0,hang,groups\n1,hang,groups")
    assert "rank 0 (" in told
    assert "did not get through 'groups' within 600 s (--start-timeout); nobody did" in told


@pytest.mark.parametrize("phase", ["pre-flight", "groups", "weights", "warm-up"])
def test_a_rank_that_dies_in_a_phase_is_named_without_waiting(phase):
    told = start_error(2, misbehaviour=f"1,die,{phase}\n0,hang,{phase}")
    assert told.startswith("rank 1 (")
    assert "SIGKILL ended it" in told


@pytest.mark.parametrize(
    ("what", "words"), [("refuse", ": there is no such thing here"), ("break", ": RuntimeError: the device is gone")]
)
def test_why_a_rank_refuses_to_start_is_told_in_its_words(what, words):
    told = start_error(2, misbehaviour=f"1,{what},kv pool\n0,hang,kv pool")
    assert told.startswith("rank 1 (")
    assert told.endswith(words)


def test_ranks_that_disagree_are_refused_before_they_meet(tmp_path):
    told = start_error(2, misbehaviour="1,dtype=bfloat16,pre-flight", dump_dir=tmp_path)
    assert "the dtype differs: float32 on rank 0" in told
    assert not list(tmp_path.iterdir())


class WithStranger(ChildLauncher):
    """Somebody without the key knocks first."""

    def start(self, door: Door) -> None:
        with pytest.raises(StartupError):
            dial(door._replace(key=b"guess"))
        ChildLauncher.start(self, door)


class WithDouble(ChildLauncher):
    """Process 0 comes twice. That the double is turned away and ends is no trouble of the gang's."""

    def start(self, door: Door) -> None:
        ChildLauncher.start(self, door)
        self.double = ChildLauncher(1, self._work)
        self.double.start(door)

    def kill(self) -> None:
        ChildLauncher.kill(self)
        self.double.kill()


@pytest.mark.parametrize("launcher_type", [WithStranger, WithDouble])
def test_who_does_not_belong_to_the_gang_does_not_spoil_its_start(launcher_type):
    config = gang_config(2)
    launcher = launcher_type(2, WORK)
    try:
        loaded = load_gang(config, launcher, lambda phase, seconds: None, host=HOST)
        loaded.executor.submit(plans_of(make_request())[0])
        assert isinstance(loaded.executor.collect(), StepResult)
        loaded.executor.close()
    finally:
        launcher.kill()


# -- who is which rank -------------------------------------------------------------------------------------------------


def process(index: int, node: str, host: str = "", devices: str = ""):
    return msgspec.structs.replace(HELLO, index=index, node=node, host=host or node, devices=devices)


def test_ranks_are_numbered_node_by_node_from_the_engines_and_on_a_node_by_device(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    came = [process(3, "a"), process(1, "b", devices="2"), process(0, "a"), process(2, "b", devices="10")]
    came += [process(4, "b", devices="1")]
    assert [hello.index for hello in numbered(came)] == [4, 1, 2, 0, 3]


def test_two_nodes_on_one_host_stay_apart(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "h")
    came = [process(3, "n2", "h"), process(1, "n1", "h"), process(0, "n1", "h"), process(2, "n2", "h")]
    assert [hello.index for hello in numbered(came)] == [0, 1, 2, 3]
