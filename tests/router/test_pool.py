import asyncio

import grpc.aio
import pytest

from paceline.proto import cluster_pb2, cluster_pb2_grpc, replica_pb2_grpc
from paceline.proto.errors import KVPoolExceeded, NoReplica, ReplicaLost, StartupError
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import Request, SamplingParams
from paceline.router import link, sources
from paceline.router.mailbox import Mailbox
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
        made._apply("fixed", dict.fromkeys((first.address, second.address), cluster_pb2.REPLICA_STATE_READY))
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


async def test_load_spreads_over_replicas():
    async with FakeReplica(replica_id="a", stall_at=0) as a, FakeReplica(replica_id="b", stall_at=0) as b:
        made = await ready_pool(a, b)
        for at in range(10):
            await made.submit(request(str(at)), Mailbox()).accepted
        assert (len(a.submissions), len(b.submissions)) == (5, 5)
        await made.close()


def test_pauses_between_attempts_are_bounded():
    assert sources.FIRST_PAUSE < sources.LONGEST_PAUSE <= 5


async def test_sources_add_up_and_draining_wins():
    async with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        made = await ready_pool(a)
        made._apply("controller", {b.address: READY, a.address: LOADING})
        await until(lambda: {link.replica_id for link in made.usable} == {"a", "b"})
        made._apply("controller", {b.address: READY, a.address: DRAINING})
        assert [link.replica_id for link in made.usable] == ["b"]
        made._apply("controller", {})
        await until(lambda: [link.replica_id for link in made.usable] == ["a"])
        await made.close()


async def test_a_name_brings_all_its_addresses_and_is_looked_up_again(monkeypatch, caplog):
    monkeypatch.setattr(sources, "RESOLVE_EVERY", 0.05)
    async with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        port, other = (int(fake.address.split(":")[1]) for fake in (a, b))
        answers = {"hosts": ["127.0.0.1"]}

        async def getaddrinfo(host, port, **_):
            assert host == "replicas.test"
            if not answers["hosts"]:
                raise OSError("no such name")
            return [(2, 1, 6, "", (address, port)) for address in answers["hosts"]]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        made = Pool(name=f"replicas.test:{port}", replicas=(f"127.0.0.1:{other}",))
        await made.start()
        await until(lambda: {link.replica_id for link in made.usable} == {"a", "b"})
        answers["hosts"] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        await until(lambda: f"127.0.0.3:{port}" in made._keepers)
        answers["hosts"] = []
        await until(lambda: "cannot be resolved" in caplog.text)
        await asyncio.sleep(0.2)
        assert caplog.text.count("cannot be resolved") == 1
        assert f"127.0.0.3:{port}" in made._keepers
        answers["hosts"] = ["127.0.0.1"]
        await until(lambda: len(made._keepers) == 2)
        await made.close()


async def test_localhost_is_found_by_the_real_resolver():
    async with FakeReplica() as fake:
        made = Pool(name=f"localhost:{fake.address.split(':')[1]}")
        await made.start()
        await asyncio.wait_for(made.wait_ready(), 5)
        await made.close()


@pytest.mark.parametrize("name", ["replicas", "replicas:", ":8000", "replicas:0", "replicas:http"])
def test_a_name_without_a_port_is_refused(name):
    with pytest.raises(StartupError, match="NAME:PORT"):
        Pool(name=name)


async def test_a_replica_that_is_full_is_passed_over_while_another_has_room():
    limits = {"stall_at": 0, "max_num_seqs": 1, "max_waiting_requests": 1}
    async with FakeReplica(replica_id="a", **limits) as a, FakeReplica(replica_id="b", **limits) as b:
        made = await ready_pool(a, b, policy=lambda replicas, _: min(replicas, key=lambda r: r.replica_id))
        assert [link.capacity for link in made.links] == [2, 2]
        for at in range(5):
            await made.submit(request(str(at)), Mailbox()).accepted
        assert (len(a.submissions), len(b.submissions)) == (3, 2)
        await made.close()


async def test_the_token_is_shown_to_controller_and_replicas():
    seen = []

    class Guard(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            seen.append((details.method.rsplit("/", 1)[1], dict(details.invocation_metadata).get("authorization")))
            return await continuation(details)

    controller = Controller()
    controller.server = grpc.aio.server(interceptors=[Guard()])
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(controller, controller.server)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(fake := FakeReplica(), controller.server)
    address = f"127.0.0.1:{controller.server.add_insecure_port('127.0.0.1:0')}"
    await controller.server.start()
    controller.sets.put_nowait([(address, READY)])
    made = Pool(controller=address, token="secret")
    await made.start()
    await asyncio.wait_for(made.wait_ready(), 5)
    assert sorted(seen) == [(name, "Bearer secret") for name in ("Attach", "GetModel", "WatchReplicas")]
    await made.close()
    await controller.server.stop(None)
    assert fake.hellos
