"""Layout of a layered graph with few crossings, after Sugiyama et al. 1981.

An edge that passes rows gets a place in each of them. Places are ordered by the mean of their neighbours', row after
row, and then set as near to their neighbours as order and widths allow. All edges of one sender share a lane.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
import scipy

ROUNDS = 8  # over the rows, to order them and then to place them
NODE, LANE = 1.0, 0.3  # widths

Item = Hashable
Lane = tuple[Item, int]  # of a sender, in a row
Links = Mapping[Item, Sequence[Item]]


@dataclass(frozen=True)
class Layout:
    """The row of each node, from 0; the x of each node and lane; and the lanes that each edge passes."""

    row: Mapping[Item, int]
    x: Mapping[Item, float]
    lanes: Mapping[tuple[Item, Item], Sequence[Lane]]

    def way(self, edge: tuple[Item, Item]) -> list[tuple[float, float]]:
        """Return the places that an edge passes, its ends included."""
        sender, receiver = edge
        passed = [(self.x[lane], float(lane[1])) for lane in self.lanes[edge]]
        return [(self.x[sender], self.row[sender]), *passed, (self.x[receiver], self.row[receiver])]


def lay_out(rows: Sequence[Sequence[Item]], edges: Iterable[tuple[Item, Item]]) -> Layout:
    """Place nodes in rows, lowest first, with edges from senders to receivers in higher rows."""
    row = {node: number for number, nodes in enumerate(rows) for node in nodes}
    edges = sorted(set(edges), key=lambda edge: (row[edge[0]], row[edge[1]]))
    lanes = {edge: [(edge[0], r) for r in range(row[edge[0]] + 1, row[edge[1]])] for edge in edges}
    orders: list[list[Item]] = [list(nodes) for nodes in rows]
    links: set[tuple[Item, Item]] = set()
    for (sender, receiver), passed in lanes.items():
        for lane in passed:
            if lane not in orders[lane[1]]:
                orders[lane[1]].append(lane)
        links |= set(pairwise([sender, *passed, receiver]))
    below: dict[Item, list[Item]] = {item: [] for order in orders for item in order}
    above: dict[Item, list[Item]] = {item: [] for order in orders for item in order}
    for low, high in sorted(links, key=str):
        below[high].append(low)
        above[low].append(high)
    widths = {item: NODE if item in row else LANE for item in below}
    x = _place(_order(orders, below, above, widths), below, above, widths)
    return Layout(row, x, lanes)


def _order(orders: list[list[Item]], below: Links, above: Links, widths: Mapping[Item, float]) -> list[list[Item]]:
    """Find the order in each row with the fewest crossings, by sweeps up and down."""
    best, fewest = orders, _crossings(orders, above)
    for sweep in range(ROUNDS):
        orders = [list(order) for order in orders]
        x = {item: place for order in orders for item, place in _pack(order, widths).items()}
        upwards = sweep % 2 == 0
        neighbours = below if upwards else above
        for number in range(1, len(orders)) if upwards else range(len(orders) - 2, -1, -1):
            wanted = {item: fmean([x[n] for n in neighbours[item]] or [x[item]]) for item in orders[number]}
            orders[number].sort(key=wanted.__getitem__)
            x |= _pack(orders[number], widths)
        crossings = _crossings(orders, above)
        if crossings < fewest:
            best, fewest = orders, crossings
    return best


def _pack(order: Sequence[Item], widths: Mapping[Item, float]) -> dict[Item, float]:
    ends = np.cumsum([widths[item] for item in order])
    return {item: end - widths[item] / 2 - ends[-1] / 2 for item, end in zip(order, ends.tolist(), strict=True)}


def _crossings(orders: Sequence[Sequence[Item]], above: Links) -> int:
    crossings = 0
    for low, high in pairwise(orders):
        place = {item: i for i, item in enumerate(high)}
        ends: list[int] = []  # of the edges of items further left
        for item in low:
            mine = sorted(place[receiver] for receiver in above[item])
            crossings += sum(end > new for new in mine for end in ends)
            ends += mine
    return crossings


def _place(
    orders: Sequence[Sequence[Item]], below: Links, above: Links, widths: Mapping[Item, float]
) -> dict[Item, float]:
    """Place items as near to their neighbours as order and widths allow, by least squares row after row."""
    x = {item: place for order in orders for item, place in _pack(order, widths).items()}
    for sweep in range(ROUNDS):
        for order in orders if sweep % 2 == 0 else reversed(orders):
            if not order:
                continue
            wanted = [fmean([x[n] for n in (*below[item], *above[item])] or [x[item]]) for item in order]
            ends = np.cumsum([widths[item] for item in order])
            starts = ends - np.array([widths[item] for item in order]) / 2
            weights = np.array([1.0 if widths[item] == LANE else 2.0 for item in order])
            fitted = scipy.optimize.isotonic_regression(np.array(wanted) - starts, weights=weights).x + starts
            x |= dict(zip(order, fitted.tolist(), strict=True))
    middle = (max(x.values()) + min(x.values())) / 2
    return {item: place - middle for item, place in x.items()}
