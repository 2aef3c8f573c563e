import asyncio

import grpc.aio
import pytest

from paceline.proto import cluster_pb2, cluster_pb2_grpc
from paceline.proto.errors import KVPoolExceeded, NoReplica, ReplicaLost
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import Request, SamplingParams
from paceline.router import link, pool
from paceline.router.link import Mailbox
from paceline.router.policies import least_loaded
from paceline.router.pool import Pool
from tests.fakes import FakeReplica, encode, tiny_card
from tests.router.conftest import until


def request(request_id="r", n=1, **params) -> Request:
    return Request(request_id=request_id, prompt_ids=[5, 6], params=SamplingParams(seed=1, n=n, **params))


async def ready_pool(*fakes, **settings) -> Pool:
    made = Pool(replicas=tuple(fake.address for fake in fakes), **settings)
    await made.start()
    await until(lambda: len(made.links) == len(fakes))
    return made


async def drain(mailbox, num_choices=1):
    """News until every choice has ended, or an error came."""
    news = []
    while sum(getattr(n, "finish_reason", "error") is not None for _, n in news) < num_choices:
        news += await asyncio.wait_for(mailbox.take(), 5)
    return [item for _, item in news]


async def test_a_request_is_accepted_and_its_ids_arrive_in_order():
    async with FakeReplica(text="Hello world.") as fake:
        made = await ready_pool(fake)
        mailbox = Mailbox()
        ticket = made.submit(request(), mailbox)
        await ticket.accepted
        news = await drain(mailbox)
        assert [id for delta in news for id in delta.ids] == [*encode("Hello world."), 2]
        assert [delta.finish_reason for delta in news][-1] == "stop"
        assert fake.submissions == [request()]
        assert (fake.hellos[0].protocol, fake.hellos[0].fingerprint) == (1, "tiny-1")
        assert made.links[0].in_flight == 0
        await made.close()


async def test_deltas_of_many_requests_reach_each_its_own_mailbox():
    async with FakeReplica(script=lambda r, choice: [r.prompt_ids[0] + choice] * 5 + [2]) as fake:
        made = await ready_pool(fake)
        boxes = [Mailbox() for _ in range(10)]
        for at, box in enumerate(boxes):
            made.submit(Request(request_id=str(at), prompt_ids=[10 + at], params=SamplingParams(seed=1, n=2)), box)
        assert made.links[0].in_flight == 20
        for at, box in enumerate(boxes):
            news = await drain(box, 2)
            assert {(d.choice, id) for d in news for id in d.ids} == {(0, 10 + at), (1, 11 + at), (0, 2), (1, 2)}
        await made.close()


async def test_a_rejection_raises_the_replicas_own_error():
    async with FakeReplica(reject=KVPoolExceeded("needs 63 blocks, the pool has 49", "prompt")) as fake:
        made = await ready_pool(fake)
        with pytest.raises(KVPoolExceeded, match="63") as caught:
            await made.submit(request(), Mailbox()).accepted
        assert caught.value.param == "prompt"
        assert made.links[0].in_flight == 0
        await made.close()


async def test_abort_tells_the_replica_once_and_nothing_more_arrives():
    async with FakeReplica(delay=0.005) as fake:
        made = await ready_pool(fake)
        mailbox = Mailbox()
        ticket = made.submit(request(ignore_eos=True, n=3), mailbox)
        await mailbox.take()
        made.abort(ticket)
        made.abort(ticket)
        await until(lambda: fake.cancels)
        assert (fake.cancels, fake.running, made.links[0].in_flight) == ([ticket.handle], {}, 0)
        await mailbox.take() if mailbox._news else None
        await asyncio.sleep(0.05)
        assert not mailbox._news
        await made.close()


async def test_finish_ends_one_choice_as_a_success():
    async with FakeReplica(delay=0.005, num_cached=16) as fake:
        made = await ready_pool(fake)
        mailbox = Mailbox()
        ticket = made.submit(request(ignore_eos=True, n=2), mailbox)
        await mailbox.take()
        made.finish(ticket, 1, 1)
        ending = (await drain(mailbox, 1))[-1]
        assert (ending.choice, ending.finish_reason, ending.usage.num_cached) == (1, "stop", 16)
        assert fake.finishes == [(ticket.handle, 1, 1)]
        assert made.links[0].in_flight == 1
        await made.close()


async def test_a_replica_that_dies_fails_its_requests_and_is_attached_again_when_it_returns():
    fake = FakeReplica(die_at=2)
    await fake.start()
    made = await ready_pool(fake)
    mailbox = Mailbox()
    made.submit(request(), mailbox)
    assert isinstance((await drain(mailbox))[-1], ReplicaLost)
    await until(lambda: not made.ready())
    with pytest.raises(NoReplica):
        made.submit(request(), mailbox)
    fake.die_at = None
    await fake.start(int(fake.address.split(":")[1]))
    await until(made.ready)
    made.submit(request(), mailbox)
    assert (await drain(mailbox))[-1].finish_reason == "stop"
    await made.close()
    await fake.stop()


async def test_a_silent_replica_counts_as_lost(monkeypatch):
    monkeypatch.setattr(link, "SILENCE", 0.3)
    async with FakeReplica(silent=True, stall_at=1) as fake, FakeReplica(stall_at=1) as beating:
        made, other = await ready_pool(fake), await ready_pool(beating)
        lost, kept = Mailbox(), Mailbox()
        made.submit(request(), lost)
        other.submit(request(), kept)
        assert isinstance((await drain(lost))[-1], ReplicaLost)
        assert [type(news) for _, news in await kept.take()] != [ReplicaLost]
        assert other.links[0].in_flight == 1
        await made.close()
        await other.close()


async def test_a_replica_of_another_model_is_refused(caplog):
    async with FakeReplica() as first, FakeReplica(card=tiny_card(fingerprint="other")) as second:
        made = await ready_pool(first)
        made._apply(dict.fromkeys((first.address, second.address), cluster_pb2.REPLICA_STATE_READY))
        await until(lambda: "refused" in caplog.text)
        assert [link.address for link in made.links] == [first.address]
        assert made.card.fingerprint == "tiny-1"
        await made.close()


async def test_nothing_is_ready_before_the_card_was_taken_in():
    taken = asyncio.Event()

    async def on_card(card):
        await taken.wait()

    async with FakeReplica() as fake:
        made = Pool(replicas=(fake.address,), on_card=on_card)
        await made.start()
        await asyncio.sleep(0.2)
        assert not made.ready()
        taken.set()
        await asyncio.wait_for(made.wait_ready(), 5)
        await made.close()


async def test_heartbeats_bring_the_load():
    async with FakeReplica(load=ReplicaLoad(running=3, blocks_total=50, finished_total={"stop": 2})) as fake:
        made = await ready_pool(fake)
        await until(lambda: made.links[0].load.running == 3)
        assert made.links[0].load == fake.load
        await made.close()


class Controller(cluster_pb2_grpc.ClusterServiceServicer):
    """Streams whatever set it is given."""

    def __init__(self):
        self.sets = asyncio.Queue()
        self.server = None

    async def WatchReplicas(self, request, context):
        while True:
            replicas = [cluster_pb2.Replica(address=address, state=state) for address, state in await self.sets.get()]
            yield cluster_pb2.WatchReplicasResponse(replicas=replicas)

    async def start(self, port=0):
        self.server = grpc.aio.server()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        return port


READY, DRAINING, LOADING = (
    cluster_pb2.REPLICA_STATE_READY,
    cluster_pb2.REPLICA_STATE_DRAINING,
    cluster_pb2.REPLICA_STATE_LOADING,
)


async def test_the_controllers_set_is_followed_and_kept_when_it_dies():
    controller = Controller()
    port = await controller.start()
    async with FakeReplica(replica_id="a", stall_at=1) as a, FakeReplica(replica_id="b") as b:
        made = Pool(controller=f"127.0.0.1:{port}")
        await made.start()
        controller.sets.put_nowait([(a.address, READY), (b.address, LOADING)])
        await until(lambda: [link.replica_id for link in made.links] == ["a"])
        mailbox = Mailbox()
        made.submit(request(), mailbox)
        controller.sets.put_nowait([(a.address, DRAINING), (b.address, READY)])
        await until(lambda: {link.replica_id for link in made.links if link.usable} == {"b"})
        assert {link.replica_id: link.in_flight for link in made.links} == {"a": 1, "b": 0}
        await controller.server.stop(None)
        await asyncio.sleep(0.3)
        assert made.ready()
        await controller.start(port)
        controller.sets.put_nowait([(b.address, READY)])
        await until(lambda: [link.replica_id for link in made.links] == ["b"])
        assert isinstance((await drain(mailbox))[-1], ReplicaLost)
        await made.close()
        await controller.server.stop(None)


class Replica:
    def __init__(self, replica_id, in_flight=0, **load):
        self.replica_id, self.in_flight, self.load = replica_id, in_flight, ReplicaLoad(**load)


def test_least_loaded_goes_by_choices_ahead_then_tokens_then_id():
    def pick(*replicas):
        both = {least_loaded(list(order), request()).replica_id for order in (replicas, replicas[::-1])}
        assert len(both) == 1, "the order of the list must not matter"
        return both.pop()

    assert pick(Replica("a", 2), Replica("b", 1)) == "b"
    assert pick(Replica("a", 0, running=4, waiting=1), Replica("b", 3)) == "b"
    assert pick(Replica("a", 1, queued_tokens=900), Replica("b", 1, queued_tokens=10)) == "b"
    assert pick(Replica("b"), Replica("a")) == "a"


async def test_load_spreads_over_replicas():
    async with FakeReplica(replica_id="a", stall_at=0) as a, FakeReplica(replica_id="b", stall_at=0) as b:
        made = await ready_pool(a, b)
        for at in range(10):
            await made.submit(request(str(at)), Mailbox()).accepted
        assert (len(a.submissions), len(b.submissions)) == (5, 5)
        await made.close()


def test_pauses_between_attempts_are_bounded():
    assert pool.FIRST_PAUSE < pool.LONGEST_PAUSE <= 5
