"""Places in a model: `Site`, part of an activation; `Node` and `Edge`, parts that read and write the stream."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformer_lens.utilities import get_act_name

from mechicl.base.arguments import check_fields
from mechicl.statistics import storable

BY_POS = ("pos",)
BY_HEAD = ("pos", "head")
BY_STATE = ("head", "pos")
BY_KEY = ("head", "query", "key")
BY_NEURON = ("pos", "neuron")
BY_CELL = ("pos", "column")
OF_TABLES = ("q", "k", "v", "z", "attn_scores", "pattern")
"""Components of each of the two attentions of a model of tables, with "col_" or "row_" before them."""
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_in"), BY_POS),
    **dict.fromkeys(("q", "k", "v", "z", "result", "attn_in", "q_input", "k_input", "v_input"), BY_HEAD),
    **dict.fromkeys(("gate", "step"), BY_HEAD),
    "state": BY_STATE,
    **dict.fromkeys(("attn_scores", "pattern"), BY_KEY),
    **dict.fromkeys(("pre", "post"), BY_NEURON),
    **dict.fromkeys(("cell_pre", "cell_mid", "cell_post", "col_attn_out", "row_attn_out", "cell_mlp_out"), BY_CELL),
    **{f"{over}_{name}": (*BY_CELL, "head") for over in ("col", "row") for name in OF_TABLES[:4]},
    **{f"col_{name}": ("pos", *BY_KEY) for name in OF_TABLES[4:]},
    **{f"row_{name}": ("column", *BY_KEY) for name in OF_TABLES[4:]},
}
"""The axes of each component's activation between `prompt` and its features: `pos`, `head`, of a pattern the `query`
and `key` positions, and of an MLP's hidden layer the `neuron`. In models of tables `pos` is the row, `cell_...` is the
stream (or the MLP's output) with an axis for its `column`, and the query and key are columns or rows."""

ON_REQUEST = {
    "hook_result": "set_use_attn_result",
    "hook_state": "set_use_attn_state",
    "hook_attn_in": "set_use_attn_in",
    "hook_mlp_in": "set_use_hook_mlp_in",
    **dict.fromkeys(("hook_q_input", "hook_k_input", "hook_v_input"), "set_use_split_qkv_input"),
}
"""Hooks that a model has only after a method was called with True."""


@storable
@dataclass(frozen=True)
class Site:
    """Part of an activation: a component of a layer, at one position, head, query, key or neuron, or at all (None).

    Attributes:
        component: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z" (a head's output),
            "attn_scores", "pattern", "pre" or "post" (an MLP's hidden layer before and after its activation function);
            in recurrent layers "gate" and "step"; if the model computes them, "state" (of a recurrent layer's head),
            "result", and the inputs from the stream "attn_in", "q_input", "k_input", "v_input" (of each head),
            "mlp_in". In models of tables "cell_pre", "cell_mid", "cell_post", "cell_mlp_out", and for the attention
            between columns "col_attn_out", "col_z", "col_pattern", ..., between rows "row_attn_out", "row_z", ...
        layer: number of the layer.
        pos: position, in models of tables the row; not for scores and patterns.
        head: head, for parts of the attention.
        query: query position, for scores and patterns.
        key: key position, for scores and patterns.
        neuron: neuron, for "pre" and "post".
        column: column of a table, the label's last.

    Example:
        >>> Site("z", layer=3, pos=40, head=1).hook_name
        'blocks.3.attn.hook_z'
    """

    component: str
    layer: int
    pos: int | None = None
    head: int | None = None
    query: int | None = None
    key: int | None = None
    neuron: int | None = None
    column: int | None = None

    def __post_init__(self):
        check_fields(self)
        axes = axes_of(self.component)
        named = [
            axis for axis in ("pos", "column", "head", "query", "key", "neuron") if getattr(self, axis) is not None
        ]
        extra = [axis for axis in named if axis not in axes]
        if extra:
            raise ValueError(f"{self.component!r} has the axes {axes}, not {extra}")

    def __str__(self) -> str:
        parts = [f"{axis} {getattr(self, axis)}" for axis in axes_of(self.component) if getattr(self, axis) is not None]
        return ", ".join([f"{self.component} of layer {self.layer}", *parts])

    @property
    def hook_name(self) -> str:
        """The name of its hook."""
        return hook_name(self.component, self.layer)

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Its index in the activation of one prompt: `activation[prompt][index]`."""
        parts = (getattr(self, axis) for axis in axes_of(self.component))
        return tuple(slice(None) if part is None else part for part in parts)


def hook_name(component: str, layer: int) -> str:
    """Return the name of a component's hook in a layer."""
    over, _, part = component.partition("_")
    if over in ("col", "row") and part in OF_TABLES:
        return f"blocks.{layer}.{over}_attn.hook_{part}"
    if over == "cell":
        return get_act_name("mlp_out" if part == "mlp_out" else f"resid_{part}", layer)
    # those of recurrent layers are not TransformerLens'
    return get_act_name(component, layer, "attn" if component in ("gate", "step", "state") else None)


def axes_of(component: str) -> tuple[str, ...]:
    """Return the axes of a component's activation."""
    if component not in AXES:
        raise ValueError(f"component {component!r} is not one of {tuple(AXES)}{nearest_name(component, AXES)}")
    return AXES[component]


def has_axes_of(component: str, shape: Sequence[int]) -> bool:
    """False for a component of tables if the activation `[prompt ...]` of its hook has no axis for columns."""
    axes = axes_of(component)
    return "column" not in axes or len(shape) > len(axes) + (not component.endswith(("scores", "pattern")))


def check_hook(model: Any, name: str) -> None:
    """Refuse (ValueError) a hook that the model does not have; the message names the nearest that it has."""
    names = hook_names(model)
    if name not in names:
        hint = nearest_name(name, names)
        if hasattr(model, ON_REQUEST.get(name.rsplit(".", 1)[-1], "")):
            hint = how_to_request(name)
        if name.endswith("attn.hook_state") and hasattr(model, "original_model"):
            hint = ": call mechicl.interop.open_states(model) first, if its layers keep states"
        if hasattr(model, "how_to_declare"):
            hint = model.how_to_declare(name)
        raise ValueError(f"the model has no hook {name!r}{hint}")


def silent_hook(name: str) -> ValueError:
    """Make the error for a hook of the model that a run never reaches."""
    return ValueError(f"the hook {name!r} does not fire in this model{how_to_request(name) or instead_of(name)}")


def instead_of(name: str) -> str:
    """For messages: the alternative to patterns or scores that a model does not use; "" for other hooks."""
    for ending, what in (("hook_pattern", "patterns"), ("hook_attn_scores", "scores")):
        if name.endswith(ending):
            return f": its {what} are computed elsewhere; take 'z', the heads' outputs"
    return ""


def how_to_request(name: str) -> str:
    """For messages: ": call ... first" for a hook that a model has only on request; "" for others."""
    method = ON_REQUEST.get(name.rsplit(".", 1)[-1])
    return f": call model.{method}(True) first" if method else ""


def hook_names(model: Any) -> list[str]:
    """Return the names of all hooks of a model, and their aliases."""
    if not isinstance(getattr(model, "hook_dict", None), dict):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must have hooks, as those of this package and of TransformerLens, got {kind}")
    aliases = getattr(model, "hook_aliases", None)
    return [*model.hook_dict, *(aliases if isinstance(aliases, dict) else ())]


def nearest_name(name: str, known: Iterable[str]) -> str:
    """For messages: "; did you mean ...?", or "" if no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---- nodes (parts of a model that read and write the residual stream) and edges between them ----


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


def sole_reader(model: Any, edge: Edge) -> list[Node]:
    """The node that reads an edge; none where heads share it, as their edges by q tell which of them belong to it."""
    reached = list_reached(model, edge)
    return reached if len(reached) == 1 else []


def is_parallel(model: Any) -> bool:
    """True if the MLP of each layer reads the stream before the layer, as its attention does ("parallel")."""
    return bool(getattr(model.cfg, "parallel_attn_mlp", False))
