import math

from paceline.proto.errors import Overloaded
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.request import Usage
from paceline.router.metrics import Metrics
from tests.fakes import FakeReplica, tiny_card
from tests.router.conftest import until

NAMES = {
    "paceline_engine_requests_running", "paceline_engine_requests_waiting", "paceline_engine_queued_tokens",
    "paceline_engine_kv_blocks_used",
    "paceline_engine_kv_blocks_total", "paceline_engine_cached_prompt_tokens_total",
    "paceline_engine_prompt_tokens_total", "paceline_engine_generation_tokens_total",
    "paceline_engine_computed_tokens_total", "paceline_engine_recomputed_tokens_total",
    "paceline_engine_preemptions_total", "paceline_engine_block_copies_total",
}  # fmt: skip
ROUTER_NAMES = {
    "paceline_router_requests_total", "paceline_router_in_flight", "paceline_router_ttft_seconds_count",
    "paceline_router_itl_seconds_count", "paceline_router_e2e_seconds_count", "paceline_router_tokens_total",
    "paceline_router_replicas_ready", "paceline_router_open_choices", "paceline_router_shed_total",
    "paceline_router_moved_total", "paceline_router_broken_streams_total",
    "paceline_router_replica_ready", "paceline_start_seconds",
}  # fmt: skip


class Link:
    def __init__(self, replica_id, load, usable=True, ranks=(), start_seconds=None):
        self.replica_id, self.load, self.usable, self.card = replica_id, load, usable, tiny_card()
        self.ranks, self.start_seconds = ranks, start_seconds or {}


def values(raw: bytes) -> dict[str, float]:
    lines = [line for line in raw.decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_engine_metrics_carry_the_agreed_names_and_the_replicas_values():
    load = ReplicaLoad(
        running=1, waiting=2, queued_tokens=12, blocks_used=3, blocks_total=4, prompt_tokens_total=5,
        cached_prompt_tokens_total=6,
        generation_tokens_total=7, computed_tokens_total=8, recomputed_tokens_total=9, preemptions_total=10,
        block_copies_total=11,
    )  # fmt: skip
    got = values(Metrics(lambda: [Link("a", load), Link("b", ReplicaLoad(), usable=False)]).render())
    mine = {name.split("{")[0]: value for name, value in got.items() if 'replica_id="a"' in name}
    assert mine.pop("paceline_router_replica_ready") == 1
    assert set(mine) == NAMES
    assert mine["paceline_engine_cached_prompt_tokens_total"] == 6
    assert sorted(mine.values()) == list(map(float, range(1, 13)))
    assert 'paceline_engine_requests_running{model_name="tiny",replica_id="b"}' in got
    assert got["paceline_router_replicas_ready"] == 1
    assert got['paceline_router_replica_ready{model_name="tiny",replica_id="b"}'] == 0


def test_what_each_rank_holds_is_told_by_replica_and_rank():
    ranks = [RankMemory(rank=i, weight_bytes=100 + i, kv_bytes=20 + i, kv_bytes_per_token=3 + i) for i in (0, 1)]
    links = [Link("a", ReplicaLoad(), ranks=ranks), Link("b", ReplicaLoad(), ranks=ranks[:1])]
    got = values(Metrics(lambda: links).render())
    found = {name.removeprefix("paceline_engine_"): value for name, value in got.items() if "engine_rank" in name}
    assert found == {
        f'{name}{{model_name="tiny",rank="{rank}",replica_id="{replica}"}}': value + rank
        for replica, rank in (("a", 0), ("a", 1), ("b", 0))
        for name, value in (("rank_weight_bytes", 100), ("rank_kv_bytes", 20), ("rank_kv_bytes_per_token", 3))
    }


def test_the_phases_of_a_start_are_told_for_this_process_and_for_each_replica():
    metrics = Metrics(lambda: [Link("a", ReplicaLoad(), start_seconds={"imports": 1.5, "weights": 0.25})])
    metrics.started("ray", 2.0)
    got = values(metrics.render())
    assert {name: value for name, value in got.items() if "start" in name} == {
        'paceline_start_seconds{phase="ray",replica_id=""}': 2.0,
        'paceline_start_seconds{phase="imports",replica_id="a"}': 1.5,
        'paceline_start_seconds{phase="weights",replica_id="a"}': 0.25,
    }


async def test_what_a_request_did_is_counted(router):
    load = ReplicaLoad(blocks_total=77)
    async with FakeReplica(num_cached=16, delay=0.002, load=load) as fake, router(fake.address) as http:
        for stream in (True, False):
            body = {"prompt": [5, 6], "n": 4, "max_tokens": 8, "ignore_eos": True, "stream": stream}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": 5})).status_code == 400
        fake.fail_at = 1
        broken = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        fake.fail_at, fake.reject = None, Overloaded("full")
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        assert "error" in broken.text

        async def told():
            return 'replica_id="fake-0"} 77.0' in (await http.get("/metrics")).text

        await until(told)
        got = values((await http.get("/metrics")).content)
    suffixes = ("_bucket", "_sum", "_created")
    assert {name.split("{")[0] for name in got if not name.split("{")[0].endswith(suffixes)} == NAMES | ROUTER_NAMES
    assert got['paceline_router_requests_total{code="200",route="completions"}'] == 3
    assert got['paceline_router_requests_total{code="400",route="completions"}'] == 1
    assert got['paceline_router_tokens_total{kind="prompt"}'] == 4
    assert got['paceline_router_tokens_total{kind="cached"}'] == 32
    assert got['paceline_router_tokens_total{kind="generated"}'] == 64
    assert got['paceline_router_ttft_seconds_count{route="completions"}'] == 3
    assert got['paceline_router_itl_seconds_count{route="completions"}'] > 0


def test_a_metric_that_fails_touches_nobody(caplog):
    metrics = Metrics(list)
    metrics.finished(Usage(1, -1, 1))
    metrics.first_text("completions", math.nan)
    assert "a metric could not be recorded" in caplog.text


def test_two_routers_in_one_process_do_not_share_counts():
    one, two = Metrics(list), Metrics(list)
    one.began()
    assert values(one.render())["paceline_router_in_flight"] == 1
    assert values(two.render())["paceline_router_in_flight"] == 0
