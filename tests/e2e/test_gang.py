"""One replica over two Ray nodes of this machine, a stage on each, as `paceline serve` runs it."""

import os
import signal
import time

import httpx
import pytest

from tests.e2e.engine import Bench
from tests.e2e.gangs import PATIENCE, PROMPT, break_a_rank, ids_of
from tests.e2e.nodes import Nodes, node_of, nodes
from tests.e2e.server import Server
from tests.models import tiny_llama_folder

FLAGS = ("--num-threads", "1", "--dtype", "float32", "--num-kv-blocks", "512", "--max-num-seqs", "8")
PROMPTS = [PROMPT, list(range(20, 90)), [300, 200, 100]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def two_nodes():
    """One CPU each: two stages have room only apart."""
    with nodes([{"num_cpus": 1}, {"num_cpus": 1}]) as started:
        yield started


@pytest.fixture(scope="module")
def server(two_nodes, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with two_nodes.serving(log, "--model", str(model), "-pp", "2", "--step-timeout", "3", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def alone(model):
    """What one rank answers."""
    bench = Bench(model)
    names = [f"{i}" for i in range(len(PROMPTS))]
    answers = bench.run(*(bench.request(name, prompt, 24) for name, prompt in zip(names, PROMPTS, strict=True)))
    bench.close()
    return [answers[name, 0].ids for name in names]


def test_room_that_cannot_be_had_is_told_with_what_lacks(two_nodes: Nodes, model, tmp_path):
    log = tmp_path / "log"
    flags = ["--model", str(model), "-tp", "2", "-pp", "2", "--placement-timeout", "0.5"]
    said = "cannot place: needs 2 stages, each of 2 CPU on one node; no node is so large (free: "
    with two_nodes.trying(log, *flags) as process:
        until = time.monotonic() + PATIENCE
        while said not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        line = next(line for line in log.read_text().splitlines() if said in line)
        assert line.count("1 of 1 CPU") == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


async def test_stages_on_two_nodes_answer_as_one_rank_does(server: Server, two_nodes: Nodes, alone):
    ranks = two_nodes.ranks()
    assert len(ranks) == 2
    assert node_of(ranks[0]) != node_of(ranks[1])
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        assert [await ids_of(http, prompt, 24) for prompt in PROMPTS] == alone
        metrics = (await http.get("/metrics")).text
    held = [line for line in metrics.splitlines() if line.startswith("paceline_engine_rank_weight_bytes{")]
    assert len(held) == 2
    assert all(float(line.split()[-1]) > 0 for line in held)


@pytest.mark.parametrize(("harm", "stage"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
async def test_a_rank_that_is_lost_ends_every_stream_with_an_error_and_the_service_comes_back(
    server: Server, two_nodes: Nodes, alone, harm, stage
):
    """A stopped one is noticed because steps do not end; the other node's, because Ray has to end it."""
    before = two_nodes.ranks()
    broken = await break_a_rank(server.url, lambda: os.kill(before[stage].pid, harm))
    assert broken.num_errors == len(broken.endings) == 8, broken.endings
    assert broken.answer == alone[0][:8]
    after = two_nodes.ranks()
    assert len(after) == 2
    assert not {process.pid for process in before} & {process.pid for process in after}  # as a unit
