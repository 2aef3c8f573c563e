"""Which layers share a block table, and where a layer's keys and values lie. Numbers only; holds no tensors.

Layers that look back equally far need the same blocks, so they share a table. A block is a piece of memory that any
group may use (one pool serves all), so groups have about equally many layers: the cache holds ``size`` pairs of keys
and values, and the i-th layer of each group uses the i-th pair.

    12 layers, every sixth sees all             group     0     1     2     3     4     5
    L L L L L G L L L L L G                     pair 0    5     0     1     2     3     4
                                                pair 1   11     6     7     8     9    10

The layers of one window are dealt out to its groups in turn, so that a pipeline stage, which holds a run of layers, has
about as many of each group and wastes no pairs either.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.worker.models.spec import ModelSpec

MOST_TABLES = 16  # each is filled and read by its own few calls in every step
PADDING = 0.2  # of the layers of a window that a size may add,
PADDING_OF_LONGEST = 0.05  # and of those that look back furthest: there every token pays for it, elsewhere a window


class LayerGroup(NamedTuple):
    """``window``: tokens that a query sees, itself included; 0: all. ``layers``: by their numbers in the model."""

    window: int
    layers: tuple[int, ...]


class Location(NamedTuple):
    """Of one layer: the group whose table it reads, and the pair of cache tensors that it has there."""

    group: int
    pair: int


def kv_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """The groups, those that look back furthest first."""
    by_window: dict[int, list[int]] = {}
    for layer in range(spec.num_layers):
        by_window.setdefault(spec.window_of(layer), []).append(layer)
    windows = sorted(by_window, key=lambda window: (window != 0, -window))
    size = _size([len(by_window[window]) for window in windows])
    groups = []
    for window in windows:
        layers = by_window[window]
        num = -(-len(layers) // size)
        groups += [LayerGroup(window, tuple(layers[first::num])) for first in range(num)]
    return tuple(groups)


def locate(groups: Sequence[LayerGroup], start: int, stop: int) -> tuple[Location, ...]:
    """Of layers [start, stop), in their order: those of a pipeline stage have pairs of their own, from 0 on."""
    places: dict[int, Location] = {}
    for index, group in enumerate(groups):
        here = [layer for layer in group.layers if start <= layer < stop]
        places |= {layer: Location(index, pair) for pair, layer in enumerate(here)}
    return tuple(places[layer] for layer in range(start, stop))


def num_pairs(locations: Sequence[Location]) -> int:
    """Pairs of cache tensors that these layers need."""
    return 1 + max(location.pair for location in locations)


def _size(counts: list[int]) -> int:
    """The largest size that pads little; if that makes too many tables, the smallest that makes few enough.

    ``counts``: layers of each window, the furthest-looking first. 4 that see all and 22 that do not: groups of 4.
    """
    limits = [PADDING_OF_LONGEST, *[PADDING] * (len(counts) - 1)]
    few, little = [], []
    for size in range(1, max(counts) + 1):
        groups = [-(-count // size) for count in counts]
        if sum(groups) <= MOST_TABLES:
            few.append(size)
        padded = [num * size / count - 1 for num, count in zip(groups, counts, strict=True)]
        if all(extra <= limit for extra, limit in zip(padded, limits, strict=True)):
            little.append(size)
    few = few or [max(counts)]
    return max(max(little), few[0])
