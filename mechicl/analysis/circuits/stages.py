"""In which order a model's nodes read, and by which edges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.models.opening.edges import Edge, Node


@dataclass(frozen=True)
class Stage:
    """Receivers that read at the same time: the heads of a layer, its MLP, or the output.

    Attributes:
        layer: their layer; the number of layers for the output.
        kind: "heads", "mlp" or "output".
        n_senders: how many nodes they read: the first ones.
        place: number of the first of its nodes.
        edges: by "q", "k", "v" or "": numbers of the edges, a row for each receiver.
    """

    layer: int
    kind: str
    n_senders: int
    place: int
    edges: Mapping[str, Int[Tensor, "receiver sender"]]

    def numbers(self) -> list[int]:
        """Numbers of all edges into it."""
        return [int(number) for by in self.edges.values() for number in by.flatten()]


def list_stages(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[Stage]:
    """The stages of a model in order of computation, the output last."""
    numbers = {edge: number for number, edge in enumerate(edges)}
    place = {node: i for i, node in enumerate(nodes)}
    by_stage: dict[tuple[int, int], dict[str, dict[Node | None, list[int]]]] = {}
    n_layers = 1 + max(node.layer for node in nodes)
    for edge in edges:
        receiver = edge.receiver
        key = (n_layers, 0) if receiver is None else (receiver.layer, int(receiver.head is None))
        by_stage.setdefault(key, {}).setdefault(edge.by, {}).setdefault(receiver, []).append(numbers[edge])
    stages = []
    for (layer, mlp), ways in sorted(by_stage.items()):
        rows = {by: torch.tensor(list(receivers.values())) for by, receivers in ways.items()}
        kind = "output" if layer == n_layers else ("mlp" if mlp else "heads")
        senders = [place[edges[int(number)].sender] for number in next(iter(rows.values()))[0]]
        assert senders == list(range(len(senders)))  # what a receiver reads is all that was written before
        first = edges[int(next(iter(rows.values()))[0][0])].receiver
        stages.append(Stage(layer, kind, len(senders), len(nodes) if first is None else place[first], rows))
    return stages
