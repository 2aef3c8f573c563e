"""How much room a replica needs, and what to say where there is none. Pure numbers: knows no Ray.

A bundle is what one node must have free at once. There is one for each stage, so that the tensor ranks of a stage,
which speak to each other several times a layer, never stand on two nodes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.worker.config import RankConfig

MOST_NODES_TOLD = 6


class Node(NamedTuple):
    """``free`` and ``total`` are amounts by resource, as Ray counts them."""

    name: str
    free: Mapping[str, float]
    total: Mapping[str, float]


def bundles(rank: RankConfig, num_cpus_per_rank: int, with_gpus: bool) -> list[dict[str, float]]:
    """One for each stage of one replica; a rank takes one GPU."""
    size = rank.tensor_parallel_size
    bundle = {"CPU": float(size * num_cpus_per_rank)} | ({"GPU": float(size)} if with_gpus else {})
    return [dict(bundle) for _ in range(rank.pipeline_parallel_size)]


def shortage(wanted: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> str:
    """What lacks, in one sentence: for this moment, or for as long as the nodes are these."""
    bundle, count = wanted[0], len(wanted)
    ever = sum(_fits(bundle, node.total) for node in nodes)
    now = sum(_fits(bundle, node.free) for node in nodes)
    if not ever:
        verdict = "no node is so large"
    elif ever < count:
        verdict = f"even empty the nodes hold {ever} of them"
    elif now < count:
        verdict = f"there is room for {now} of them now" if now else "none has so much free now"
    else:
        verdict = "there is room, which Ray has not given yet"
    need = " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    need = f"{count} stages, each of {need} on one node" if count > 1 else f"{need} on one node"
    return f"needs {need}; {verdict} (free: {_told(nodes, list(bundle))})"


def _fits(bundle: Mapping[str, float], have: Mapping[str, float]) -> int:
    """How many such bundles."""
    return min(int(have.get(resource, 0) // amount) for resource, amount in bundle.items())


def _told(nodes: Sequence[Node], resources: list[str]) -> str:
    """The roomiest first."""
    roomiest = sorted(nodes, key=lambda node: [-node.free.get(resource, 0) for resource in reversed(resources)])
    told = [
        f"{node.name} "
        + " and ".join(f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}" for name in resources)
        for node in roomiest[:MOST_NODES_TOLD]
    ]
    if len(nodes) > len(told):
        told.append(f"{len(nodes) - len(told)} more")
    return ", ".join(told) or "no node"
