"""`paceline bench`: what it asks, what it makes of answers, and how it searches; against fakes and a tiny engine."""

import asyncio
import io
import json
import random
from contextlib import asynccontextmanager
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.proto.errors import StartupError
from paceline.router.bench.config import BenchConfig
from paceline.router.bench.drive import closed_loop, open_loop
from paceline.router.bench.figures import Record, figures_of
from paceline.router.bench.goodput import highest_rate, most_streams, parse_slo
from paceline.router.bench.server import ServerTarget
from paceline.router.bench.workloads import WORKLOADS, Job, draw
from paceline.router.bench_cli import Bench, check
from tests.fakes import FakeReplica
from tests.models import tiny_llama_folder
from tests.router.conftest import running_router
from tests.router.test_cli import run

# -- what is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_decides_a_workload_and_no_two_share_a_prompt(workload):
    jobs = draw(workload, 30, 1, 49152)
    assert jobs == draw(workload, 30, 1, 49152)
    assert all(min(job.prompt_ids) >= 1000 and max(job.prompt_ids) < 49152 for job in jobs)
    others = [job for other in WORKLOADS for job in draw(other, 30, 2 if other == workload else 1, 49152)]
    assert not {tuple(job.prompt_ids) for job in jobs} & {tuple(job.prompt_ids) for job in others}


def test_workloads_have_the_lengths_that_their_names_promise():
    def shapes(workload, count=400):
        return [(len(ids), wanted) for ids, wanted in draw(workload, count, 1, 49152)]

    prompts, answers = zip(*shapes("steady"), strict=True)
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (64, 192, 32, 128)
    assert set(shapes("decode")) == {(16, 256)}
    assert set(shapes("prefill", 10)) == {(1024, 4)}
    assert [shape for shape in shapes("mixed", 20) if shape[0] > 192] == [(2048, 32)] * 2
    assert sorted(shapes("skewed", 20)) == [(32, 8)] * 18 + [(32, 384)] * 2
    shared = [job.prompt_ids for job in draw("shared", 3, 1, 49152)]
    assert shared[0][:1024] == shared[1][:1024] == shared[2][:1024]
    assert len({tuple(ids) for ids in shared}) == 3


class FakeTarget:
    """Answers after a while of its own; remembers how many were open, and when each came."""

    def __init__(self, seconds: float = 0.001, num_ids: int | None = None, error: str | None = None):
        self.open = self.most_open = 0
        self.came: list[float] = []
        self._seconds, self._num_ids, self._error = seconds, num_ids, error

    async def ask(self, job: Job) -> Record:
        clock = asyncio.get_running_loop().time
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.came.append(clock())
        record = Record(len(job.prompt_ids), job.num_wanted, clock(), error=self._error)
        await asyncio.sleep(self._seconds)
        self.open -= 1
        record.arrivals, record.ended = [clock()], clock()
        record.num_ids = job.num_wanted if self._num_ids is None else self._num_ids
        return record

    async def close(self) -> None:
        pass


async def test_a_closed_loop_keeps_so_many_open_and_asks_each_job_once():
    target = FakeTarget()
    records, seconds = await closed_loop(target, [Job([1], 1)] * 30, 4)
    assert (len(records), target.most_open, target.open) == (30, 4, 0)
    assert seconds > 0


async def test_an_open_loop_sends_on_whatever_the_target_does():
    target = FakeTarget(seconds=0.05)
    records, _ = await open_loop(target, [Job([1], 1)] * 40, 10_000, 1)
    assert (len(records), target.most_open) == (40, 40)


async def test_a_run_that_is_decided_sends_no_more():
    def after_three():
        ended = []
        return lambda record: ended.append(record) or len(ended) >= 3

    records, _ = await closed_loop(FakeTarget(), [Job([1], 1)] * 40, 1, after_three())
    assert len(records) == 3
    records, _ = await open_loop(FakeTarget(seconds=0), [Job([1], 1)] * 40, 100, 1, after_three())
    assert 3 <= len(records) < 40


# -- what is made of it ------------------------------------------------------------------------------------------------


def test_figures_are_percentiles_over_requests_that_did_not_fail():
    records = [Record(10, 2, 0.0, [0.1 + i / 1000, 0.2 + i / 1000], 0.3, 2) for i in range(100)]
    records += [
        Record(10, 2, 0.0, [0.1], 0.3, 1),
        Record(10, 2, 0.0, [], 0.1),
        Record(10, 2, 0.0, [0.1], 9.0, 1, "500"),
    ]
    figures = figures_of(records, 2.0)
    assert (figures.requests, figures.failed, figures.short) == (103, 2, 1)
    assert figures.output_tokens_per_s == 201 / 2
    assert figures.total_tokens_per_s == (201 + 101 * 10) / 2
    assert figures.ttft_ms.p50 == pytest.approx(149)
    assert figures.ttft_ms.max == pytest.approx(199)
    assert figures.itl_ms.p99 == pytest.approx(100)
    assert figures.e2e_ms.max == pytest.approx(300)


def test_a_run_in_which_nothing_came_has_no_percentiles():
    figures = figures_of([Record(1, 1, 0.0, error="refused")], 1.0)
    assert figures.ttft_ms is figures.itl_ms is figures.e2e_ms is None
    assert figures.output_tokens_per_s == 0


# -- goodput -----------------------------------------------------------------------------------------------------------


def test_limits_are_written_with_units_and_are_milliseconds_without():
    assert parse_slo("ttft=1s, itl=100").limits == {"ttft": 1000, "itl": 100}
    for text in ("", "ttft", "ttft=1h", "first=1s", "ttft=1s,ttft=2s", "itl=-1"):
        with pytest.raises(StartupError, match="--slo"):
            parse_slo(text)


def test_limits_are_broken_by_the_slowest_hundredth_and_by_any_failure():
    def figures(slow: int, **changes):
        records = [Record(1, 1, 0.0, [2.0 if i < slow else 0.1], 2.0, 1) for i in range(200)]
        return msgspec.structs.replace(figures_of(records, 1.0), **changes)

    slo = parse_slo("ttft=1s")
    assert slo.is_met(figures(slow=1))
    assert not slo.is_met(figures(slow=3))
    assert not slo.is_met(figures(slow=0, failed=1))
    assert not slo.is_met(figures(slow=0, short=1))


times = st.lists(st.sampled_from([0.05, 0.15]), min_size=2, max_size=8)


@given(
    st.lists(times, min_size=1, max_size=150), st.sampled_from(["ttft=100", "itl=100", "e2e=300", "ttft=1s,itl=100"])
)
def test_a_run_is_lost_as_soon_as_its_limits_cannot_be_met_and_not_before(runs, limits):
    """Whoever has not ended may be as fast as can be, or not: the last one decides."""
    jobs = [Job([1], len(gaps)) for gaps in runs]
    records = [Record(1, len(gaps), 0.0, list(accumulate(gaps)), sum(gaps), len(gaps)) for gaps in runs]
    fast = [Record(1, len(gaps), 0.0, [0.0] * len(gaps), 0.0, len(gaps)) for gaps in runs]
    slo = parse_slo(limits)
    is_lost = slo.watch(jobs)
    for count, record in enumerate(records, 1):
        best = figures_of([*records[:count], *fast[count:]], 1.0)
        assert is_lost(record) == (not slo.is_met(best))


def test_a_run_with_a_failure_or_a_short_answer_is_lost():
    slo, jobs = parse_slo("ttft=1s"), [Job([1], 2)] * 9
    assert slo.watch(jobs)(Record(1, 2, 0.0, error="500"))
    assert slo.watch(jobs)(Record(1, 2, 0.0, [0.1], 0.1, 1))
    assert not slo.watch(jobs)(Record(1, 2, 0.0, [0.1, 0.2], 0.2, 2))


@pytest.mark.parametrize("capacity", [0.8, 1.0, 3.1, 5.7, 63.0, 500.0])
async def test_the_highest_rate_is_found_to_a_tenth_with_few_runs(capacity):
    tried = []

    async def meets(rate):
        tried.append(rate)
        return rate <= capacity

    found = await highest_rate(meets, start=3.0, limit=128)
    assert min(capacity, 128) / 1.1 <= found <= capacity
    assert len(tried) < 14
    assert len(tried) == len(set(tried))


async def test_no_rate_is_found_where_a_quarter_of_the_first_is_too_much():
    tried = []

    async def meets(rate):
        tried.append(rate)
        return False

    assert await highest_rate(meets, start=8.0, limit=128) == 0
    assert tried == [8, 4, 2]


@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 64, 100])
async def test_the_most_streams_are_found_exactly(capacity):
    async def meets(count):
        return count <= capacity

    assert await most_streams(meets, limit=64) == min(capacity, 64)


async def test_a_search_tells_each_probe_and_status_1_where_nothing_meets(tmp_path):
    path = tmp_path / "found.json"
    config = BenchConfig(num_requests=4, workload="skewed", slo="ttft=10s", json=str(path))
    assert await Bench(config, Console(quiet=True), FakeTarget(), "m").run() == 0
    goodput = json.loads(path.read_text())["goodput"]
    assert (goodput["requests_per_s"], goodput["streams"]) == (4, 4)
    assert [probe["amount"] for probe in goodput["probes"] if probe["load"] == "streams"] == [1, 2, 4]
    assert all(probe["meets"] and probe["figures"]["requests"] == 4 for probe in goodput["probes"])
    assert await Bench(config, Console(quiet=True), FakeTarget(error="503"), "m").run() == 1


# -- targets -----------------------------------------------------------------------------------------------------------


async def test_a_server_is_asked_over_connections_that_are_used_again(tmp_path):
    path = tmp_path / "found.json"
    config = BenchConfig(
        workload="skewed", num_requests=9, concurrency=3, vocab_size=300, json=str(path), price_per_hour=3.6
    )
    async with (
        FakeReplica(text="one two three four five six " * 20) as replica,
        running_router(replica.address) as client,
    ):
        assert await Bench(config, Console(quiet=True), ServerTarget(str(client.base_url), "tiny"), "tiny").run() == 0
    found = json.loads(path.read_text())
    figures = found["figures"]
    assert (figures["requests"], figures["failed"], figures["short"]) == (9, 0, 0)
    assert figures["output_tokens_per_s"] == pytest.approx(9 * 8 / figures["wall_s"])
    assert figures["cost_per_million_tokens"]["output"] == pytest.approx(1e3 / figures["output_tokens_per_s"])
    assert figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["max"]
    assert found["config"]["workload"] == "skewed"
    assert len(replica.submissions) == 9 + config.num_warmups
    assert all(request.params.ignore_eos and not request.params.temperature for request in replica.submissions)


async def test_the_command_measures_a_server_that_runs():
    async with FakeReplica(text="one two three four " * 20) as replica, running_router(replica.address) as client:
        flags = ["--workload", "skewed", "--num-requests", "9", "--concurrency", "3", "--vocab-size", "300"]
        done = await asyncio.to_thread(run, "bench", "--url", str(client.base_url), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 requests" in done.stdout
    assert "0 failed, 0 short" in done.stdout


async def test_refusals_and_short_answers_are_counted_told_and_make_the_status_1():
    config = BenchConfig(workload="skewed", num_requests=3, concurrency=3, vocab_size=300, num_warmups=0)
    console = Console(record=True, width=100, file=io.StringIO())
    async with FakeReplica() as replica, running_router(replica.address) as client:
        assert await Bench(config, console, ServerTarget(str(client.base_url), "another"), "another").run() == 1
    told = console.export_text()
    assert "3 failed, 0 short" in told
    assert "404" in told
    async with raw_server("length") as url:
        assert await Bench(config, console, ServerTarget(url, "m"), "m").run() == 1
    assert "0 failed, 3 short" in console.export_text()


async def test_a_stream_that_breaks_is_a_failure_and_the_run_goes_on():
    async with FakeReplica(text="one two three four", die_at=3) as replica, running_router(replica.address) as client:
        target = ServerTarget(str(client.base_url), "tiny")
        records, _ = await closed_loop(target, [Job([5, 6, 7], 8)] * 2, 1)
        await target.close()
    assert all(record.failed and record.error for record in records)


@asynccontextmanager
async def raw_server(framing: str, closes_unsaid: bool = False):
    """Its URL. It answers with one chunk of text and a usage of two ids, in one of the ways in which HTTP ends a body,
    cut anywhere. ``closes_unsaid``: after its answer, but only once the next request is there."""
    events = ['{"choices": [{"text": "a"}]}', '{"choices": [], "usage": {"completion_tokens": 2}}', "[DONE]"]
    text = "".join(f"data: {event}\r\n\r\n" for event in events).encode()
    head, body = {
        "chunked": ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)),
        "length": (f"Content-Length: {len(text)}", text),
        "close": ("Connection: close", text),
    }[framing]
    rng = random.Random(1)

    async def answer(reader, writer):
        await reader.readuntil(b"}}")  # of stream_options, which stands last
        raw = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + body
        while raw:
            size = rng.randint(1, 20)
            writer.write(raw[:size])
            raw = raw[size:]
            await writer.drain()
            await asyncio.sleep(0)
        if closes_unsaid:
            await reader.readuntil(b"}}")
        if framing != "chunked":
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_answers_of_other_servers_are_read_in_any_framing_and_in_pieces(framing):
    async with raw_server(framing) as url:
        target = ServerTarget(url, "m")
        record = await target.ask(Job([1], 2))
        await target.close()
    assert record.error is None
    assert (len(record.arrivals), record.num_ids) == (1, 2)


async def test_an_idle_connection_that_the_server_closes_as_it_is_used_again_is_no_failure():
    async with raw_server("length", closes_unsaid=True) as url:
        target = ServerTarget(url, "m")
        records = [await target.ask(Job([1], 2)) for _ in range(3)]
        await target.close()
    assert [record.error for record in records] == [None] * 3


def test_a_server_that_is_not_there_is_one_sentence():
    done = run("bench", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no paceline answers at http://127.0.0.1:9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_engine_is_measured_in_process(tmp_path):
    model = tiny_llama_folder(tmp_path / "model", max_position_embeddings=512)
    flags = ["--workload", "skewed", "--num-requests", "10", "--num-threads", "1", "--num-kv-blocks", "256"]
    done = run("bench", "--engine", "-m", str(model), *flags, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "10 requests" in done.stdout
    assert "0 failed, 0 short" in done.stdout
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figures["output_tokens_per_s"] == pytest.approx((9 * 8 + 384) / figures["wall_s"])


# -- plots -------------------------------------------------------------------------------------------------------------


def test_a_plot_without_matplotlib_names_the_extra_before_anything_runs(monkeypatch):
    monkeypatch.setattr("paceline.router.bench.plot.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"paceline\[bench\]"):
        check(BenchConfig(plot="run.png"))


@pytest.mark.parametrize("slo", [None, "ttft=1s,itl=100ms"])
async def test_a_plot_is_a_png(tmp_path, slo):
    path = tmp_path / "run.png"
    config = BenchConfig(workload="skewed", num_requests=4, plot=str(path), slo=slo)
    await Bench(config, Console(quiet=True), FakeTarget(), "m").run()
    assert path.read_bytes().startswith(b"\x89PNG")
