"""What room a replica asks for, and what is said where there is none."""

import pytest

from paceline.cluster.room import Node, bundles, shortage
from paceline.worker.config import RankConfig


def rank(tp: int = 1, pp: int = 1) -> RankConfig:
    return RankConfig(model="m", served_model_name="m", tensor_parallel_size=tp, pipeline_parallel_size=pp)


def node(name: str, cpus: tuple[float, float], gpus: tuple[float, float] = (0, 0)) -> Node:
    """Amounts are (free, total)."""
    return Node(name, {"CPU": cpus[0], "GPU": gpus[0]}, {"CPU": cpus[1], "GPU": gpus[1]})


def test_a_stage_is_one_bundle_with_a_cpu_share_and_a_gpu_for_each_of_its_ranks():
    assert bundles(rank(), 1, with_gpus=False) == [{"CPU": 1}]
    assert bundles(rank(), 1, with_gpus=True) == [{"CPU": 1, "GPU": 1}]
    assert bundles(rank(tp=2, pp=3), 4, with_gpus=True) == [{"CPU": 8, "GPU": 2}] * 3


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (
            [{"CPU": 8.0}],
            [node("a", (1, 1))],
            "needs 8 CPU on one node; no node is so large (free: a 1 of 1 CPU)",
        ),
        (
            [{"CPU": 1.0}],
            [node("a", (0, 4)), node("b", (0.5, 2))],
            "needs 1 CPU on one node; none has so much free now (free: b 0.5 of 2 CPU, a 0 of 4 CPU)",
        ),
        (
            [{"CPU": 2.0, "GPU": 2.0}] * 2,
            [node("a", (8, 8), (3, 3)), node("b", (8, 8), (1, 1))],
            "needs 2 stages, each of 2 CPU and 2 GPU on one node; even empty the nodes hold 1 of them "
            "(free: a 8 of 8 CPU and 3 of 3 GPU, b 8 of 8 CPU and 1 of 1 GPU)",
        ),
        (
            [{"CPU": 1.0}] * 3,
            [node("a", (2, 2)), node("b", (0, 2))],
            "needs 3 stages, each of 1 CPU on one node; there is room for 2 of them now "
            "(free: a 2 of 2 CPU, b 0 of 2 CPU)",
        ),
        ([{"CPU": 1.0}], [], "needs 1 CPU on one node; no node is so large (free: no node)"),
    ],
)
def test_a_shortage_says_what_is_needed_what_is_there_and_whether_waiting_can_help(wanted, nodes, said):
    assert shortage(wanted, nodes) == said


def test_of_many_nodes_the_roomiest_are_told():
    nodes = [node(f"n{i}", (i, 100), (0, 1)) for i in range(20)]
    said = shortage([{"CPU": 50.0, "GPU": 2.0}], nodes)
    assert "n19 19 of 100 CPU and 0 of 1 GPU, n18" in said
    assert said.endswith(", 14 more)")
