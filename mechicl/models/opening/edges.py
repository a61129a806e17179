"""Nodes (parts of a model that read and write the residual stream) and edges between them."""

from dataclasses import dataclass
from typing import Any

from transformer_lens.utilities import get_act_name

from mechicl.base.arguments import check_fields
from mechicl.models.opening.sites import hook_names
from mechicl.statistics import storable


@storable
@dataclass(frozen=True, order=True)
class Node:
    """A part of a model that reads the residual stream and writes to it.

    Attributes:
        layer: its layer; -1 for the embedding.
        head: its number; None for an MLP, or for the embedding.
    """

    layer: int
    head: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        if self.layer < 0:
            return "embedding"
        return f"MLP {self.layer}" if self.head is None else f"head {self.layer}.{self.head}"


@storable
@dataclass(frozen=True)
class Edge:
    """The output of one node as an input of another.

    Heads that share keys and values have one edge by k or v, to the first of them, which affects all (`list_reached`).

    Attributes:
        sender: the node that writes.
        receiver: the node that reads; None for the read-out.
        by: "q", "k" or "v" of a head; "" otherwise.
    """

    sender: Node
    receiver: Node | None
    by: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        to = "output" if self.receiver is None else str(self.receiver)
        return f"{self.sender} → {to}{f' ({self.by})' if self.by else ''}"


EMBEDDING = Node(-1)
"""The first node: tokens and positions."""


def list_nodes(model: Any) -> list[Node]:
    """List the embedding, and each layer's heads and MLP, in order of computation."""
    nodes = [EMBEDDING]
    for layer in range(model.cfg.n_layers):
        nodes += [Node(layer, head) for head in range(model.cfg.n_heads)]
        nodes += [Node(layer)] if has_mlp(model, layer) else []
    return nodes


def has_mlp(model: Any, layer: int) -> bool:
    """True if a layer has an MLP; models with `attn_only` may have hooks for MLPs without neurons."""
    return not getattr(model.cfg, "attn_only", False) and get_act_name("mlp_out", layer) in hook_names(model)


def list_edges(model: Any) -> list[Edge]:
    """List all edges, by receiver in order of computation.

    There are none from a layer's heads to its MLP if both read the stream before the layer ("parallel", as in GPT-J)
    and, by k and v, only those to the first of heads that share keys and values.
    """
    nodes, edges, key_heads = list_nodes(model), [], list_key_heads(model)
    for receiver in nodes[1:]:
        senders = [node for node in nodes if node.layer < receiver.layer]
        if receiver.head is None and not is_parallel(model):
            senders += [node for node in nodes if node.layer == receiver.layer and node.head is not None]
        ways = [""] if receiver.head is None else ["q", "k", "v"] if receiver.head in key_heads else ["q"]
        edges += [Edge(sender, receiver, by) for by in ways for sender in senders]
    return edges + [Edge(sender, None) for sender in nodes]


def list_key_heads(model: Any) -> list[int]:
    """List the first head of each group that shares keys and values; without groups, every head."""
    n_heads = model.cfg.n_heads
    n_groups = getattr(model.cfg, "n_key_value_heads", None) or n_heads
    return list(range(0, n_heads, n_heads // n_groups))


def list_reached(model: Any, edge: Edge) -> list[Node]:
    """List the nodes that read an edge: its receiver, and by k and v all heads that share them."""
    receiver = edge.receiver
    if receiver is None:
        return []
    if receiver.head is None or edge.by == "q":
        return [receiver]
    size = model.cfg.n_heads // len(list_key_heads(model))
    first = receiver.head - receiver.head % size
    return [Node(receiver.layer, head) for head in range(first, first + size)]


def is_parallel(model: Any) -> bool:
    """True if the MLP of each layer reads the stream before the layer, as its attention does ("parallel")."""
    return bool(getattr(model.cfg, "parallel_attn_mlp", False))
