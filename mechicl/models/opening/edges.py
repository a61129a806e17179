"""Nodes and edges: parts of a model that read and write the residual stream, and what each reads of each."""

from dataclasses import dataclass
from typing import Any

from transformer_lens.utilities import get_act_name

from mechicl.models.opening.sites import hook_names
from mechicl.statistics import storable


@storable
@dataclass(frozen=True, order=True)
class Node:
    """A part of a model that reads the residual stream and writes to it.

    Attributes:
        layer: its layer; -1 for the embedding.
        head: which head; None for an MLP, or for the embedding.
    """

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        if self.layer < 0:
            return "embedding"
        return f"MLP {self.layer}" if self.head is None else f"head {self.layer}.{self.head}"


@storable
@dataclass(frozen=True)
class Edge:
    """What one node writes as another reads it.

    Attributes:
        sender: who writes.
        receiver: who reads; None for the read-out.
        by: "q", "k" or "v" of a head; "" otherwise.
    """

    sender: Node
    receiver: Node | None
    by: str = ""

    def __str__(self) -> str:
        to = "output" if self.receiver is None else str(self.receiver)
        return f"{self.sender} → {to}{f' ({self.by})' if self.by else ''}"


EMBEDDING = Node(-1)


def list_nodes(model: Any) -> list[Node]:
    """The embedding, and each layer's heads and MLP, in order of computation."""
    nodes, names = [EMBEDDING], set(hook_names(model))
    for layer in range(model.cfg.n_layers):
        nodes += [Node(layer, head) for head in range(model.cfg.n_heads)]
        nodes += [Node(layer)] if get_act_name("mlp_out", layer) in names else []
    return nodes


def list_edges(model: Any) -> list[Edge]:
    """All edges, by receiver in order of computation."""
    nodes, edges = list_nodes(model), []
    for receiver in nodes[1:]:
        senders = [node for node in nodes if node.layer < receiver.layer]
        if receiver.head is None:  # an MLP reads the heads of its own layer
            senders += [node for node in nodes if node.layer == receiver.layer and node.head is not None]
        ways = ("q", "k", "v") if receiver.head is not None else ("",)
        edges += [Edge(sender, receiver, by) for by in ways for sender in senders]
    return edges + [Edge(sender, None) for sender in nodes]
