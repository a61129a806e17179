"""The circuit given by a model's weights: parts that write what later parts read, up to the output."""

from dataclasses import dataclass
from typing import Annotated, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.base.arguments import checked, strictly_between
from mechicl.constructions.hiding import check_basis_free
from mechicl.models import HookedTransformer
from mechicl.models.opening.sites import EMBEDDING, Edge, Node, list_edges, list_nodes
from mechicl.models.transformer.attention import Attention, elementwise_attention
from mechicl.models.transformer.config_rules import check_attends
from mechicl.models.transformer.layers import MLP


@dataclass(frozen=True)
class WeightsCircuit:
    """The nodes and edges of a model that can matter according to its weights; printed as text.

    Attributes:
        nodes: heads and MLPs, as `Node(layer, head)` (head None for an MLP), in order of computation.
        edges: `Edge(sender, receiver, by)`, by receiver in order of computation. The embedding is the sender with layer
            -1, the output the receiver None, and `by` is "q", "k" or "v" of a head.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def __str__(self) -> str:
        return "\n".join([", ".join(map(str, self.nodes)) or "no node", *map(str, self.edges)])


@checked
@torch.no_grad()
def weights_circuit(
    model: HookedTransformer, *, tolerance: Annotated[float, strictly_between(0, 1)] = 1e-6
) -> WeightsCircuit:
    """Find the circuit of a hand-built model from its weights: which parts write subspaces that later parts read.

    There is an edge if the subspace that the sender can write overlaps with the one that the receiver reads. That is
    independent of the basis, so a model obfuscated by `hide` has the circuit of the original.

    - A head can write the image under `W_V W_O` of the stream before it; an MLP can write the rows of `W_out` of the
      hidden units that can be nonzero. Biases count, except attention's output bias.
    - A head's query reads the directions that `W_Q W_Kᵀ` maps to keys that can occur. Its key reads the directions that
      `W_K W_Qᵀ` maps to queries that can occur. Its value reads the directions that `W_V W_O` maps to directions that
      are read later. An MLP reads through hidden units whose rows of `W_out` are read later, the output through `W_U`.
    - Nodes and edges on no path from the embedding to the output are left out.

    In trained models nearly all subspaces overlap, so use it for constructed or compiled models. An edge does not prove
    an effect: a part may be saturated, or write at positions that nothing attends to.

    Args:
        model: a mechicl model of token ids or points, without norms, clipping, gates and rotary positions.
        tolerance: subspaces whose cosine is at most this do not overlap, and directions at most this size, relative to
            the largest, are ignored; use 1e-3 for a model that was rotated in float32.

    Returns:
        `WeightsCircuit`: `nodes` (heads and MLPs) and `edges` (sender, receiver and the head's "q", "k" or "v").

    Example:
        >>> circuit = weights_circuit(constructions.induction(d_vocab=5, n_ctx=6))
        >>> print(circuit.nodes[0], "|", circuit.edges[-1])
        head 0.0 | head 1.0 → output
    """
    check_basis_free(model.cfg, biases=True)
    check_attends(model.cfg)
    supports = _Supports(model, tolerance)
    edges = _on_paths([edge for edge in list_edges(model) if supports.meet(edge)])
    linked = {edge.sender for edge in edges}
    return WeightsCircuit(tuple(n for n in list_nodes(model) if n in linked - {EMBEDDING}), tuple(edges))


class _Supports:
    """The subspaces that each part can write (by node) and reads, as orthonormal rows `[dim d_model]`.

    `reads` is by node and "q", "k", "v" or "", the output under None; it is empty where it can change no output.
    """

    def __init__(self, model: HookedTransformer, tolerance: float):
        self.model, self.tolerance = model, tolerance
        self.writes: dict[Node, Tensor] = {EMBEDDING: self._span(_embedded(model))}
        self.reads: dict[tuple[Node | None, str], Tensor] = {}
        if model.cfg.mlp_location == "input" and model.cfg.d_mlp is not None:
            mlp = cast(MLP, model.input_mlp)
            self._add_mlp(EMBEDDING, mlp, self._working_units(mlp))
        working: list[Bool[Tensor, "unit"]] = []
        for layer, block in enumerate(model.blocks):
            attn, stream = cast(Attention, block.attn), self._written()
            for head in range(attn.cfg.n_heads):
                self.writes[Node(layer, head)] = self._head_writes(attn, head, stream)
            if model.cfg.block_mlp:
                working.append(self._working_units(block.mlp))
                self.writes[Node(layer)] = stream[:0]
                self._add_mlp(Node(layer), block.mlp, working[-1])
        # backwards: a part's input matters only if its output is read later
        self.reads[None, ""] = self._span(model.W_U.double().mT)
        for layer, block in reversed(list(enumerate(model.blocks))):
            if model.cfg.block_mlp:
                self._read_by_mlp(Node(layer), block.mlp, working[layer])
            read = self._read()
            for head in range(block.cfg.n_heads):
                self._read_by_head(Node(layer, head), cast(Attention, block.attn), read)

    def meet(self, edge: Edge) -> bool:
        cosines = self.writes[edge.sender] @ self.reads[edge.receiver, edge.by].mT
        return bool(cosines.norm() > self.tolerance)

    # ---- forwards: subspaces that can be written ----

    def _head_writes(self, attn: Attention, head: int, stream: Tensor) -> Tensor:
        if not self._attends(attn, head, stream):
            return stream[:0]
        value, output, bias = attn.W_V[head].double(), attn.W_O[head].double(), _bias(attn, "V", head)
        moved = torch.cat([stream @ value, bias])
        return self._span(moved @ output, scale=(value.norm() + bias.norm()) * output.norm())

    def _attends(self, attn: Attention, head: int, stream: Tensor) -> bool:
        """True if the head can attend anywhere: always with softmax, otherwise if scores can differ from zero."""
        zero = torch.zeros(1, 1, dtype=torch.float64)
        if attn.cfg.attention == "softmax" or bool(elementwise_attention(attn.cfg, zero) != 0):
            return True
        keys, queries, scale = self._scored(attn, head, stream)
        return bool((keys @ queries.mT).norm() > self.tolerance * scale)

    def _scored(self, attn: Attention, head: int, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key = attn.W_Q[head].double(), attn.W_K[head].double()
        query_bias, key_bias = _bias(attn, "Q", head), _bias(attn, "K", head)
        scale = (query.norm() + query_bias.norm()) * (key.norm() + key_bias.norm())
        if attn.cfg.attention == "softmax" and attn.cfg.sink == "none":
            key_bias = key_bias[:0]  # the same for all keys, which softmax ignores
        return torch.cat([stream @ key, key_bias]), torch.cat([stream @ query, query_bias]), scale

    def _working_units(self, mlp: MLP) -> Bool[Tensor, "unit"]:
        return self._hits(self._written() @ _unit(_inputs(mlp)).mT) | (mlp.act_fn(mlp.b_in) != 0)

    def _add_mlp(self, node: Node, mlp: MLP, working: Tensor) -> None:
        rows = [_unit(mlp.W_out[working].double()), _unit(mlp.b_out[None].double())]
        self.writes[node] = self._span(torch.cat([self.writes[node], *rows]))

    # ---- backwards: subspaces that are read ----

    def _read_by_mlp(self, node: Node, mlp: MLP, working: Tensor) -> None:
        needed = working & self._hits(self._read() @ _unit(mlp.W_out.double()).mT)
        self.reads[node, ""] = self._span(_unit(_inputs(mlp)[needed]))

    def _read_by_head(self, node: Node, attn: Attention, read: Tensor) -> None:
        head, stream = cast(int, node.head), self._written(before=node.layer)
        query, key, value, output = (getattr(attn, f"W_{letter}")[head].double() for letter in "QKVO")
        self.reads |= {(node, by): stream[:0] for by in "qkv"}
        written_and_read = self._span(read @ (value @ output).mT, scale=value.norm() * output.norm())
        if not len(written_and_read) or not self._attends(attn, head, stream):
            return  # the pattern has no effect on anything that is read
        keys, queries, scale = self._scored(attn, head, stream)
        self.reads[node, "v"] = written_and_read
        self.reads[node, "q"] = self._span(keys @ query.mT, scale=scale)
        self.reads[node, "k"] = self._span(queries @ key.mT, scale=scale)

    # ---- subspaces ----

    def _written(self, before: int | None = None) -> Float[Tensor, "dim d_model"]:
        return torch.cat([rows for node, rows in self.writes.items() if before is None or node.layer < before])

    def _read(self) -> Float[Tensor, "dim d_model"]:
        return torch.cat(list(self.reads.values()))

    def _span(self, rows: Tensor, scale: Tensor | float | None = None) -> Float[Tensor, "dim d_model"]:
        """Return an orthonormal basis of the rows' span, without directions that are small relative to the scale."""
        if not rows.numel():
            return rows[:0]
        sizes, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
        return directions[sizes > self.tolerance * (sizes[0] if scale is None else scale)]

    def _hits(self, cosines: Float[Tensor, "dim row"]) -> Bool[Tensor, "row"]:
        return cosines.norm(dim=0) > self.tolerance


def _embedded(model: HookedTransformer) -> Float[Tensor, "row d_model"]:
    rows = [model.W_E.double()]
    if hasattr(model, "pos_embed"):
        rows.append(model.pos_embed.rows(range(model.cfg.n_ctx)).double())
    if "b_E" in model.embed._parameters:
        rows.append(model.embed.b_E[None].double())
    return _unit(torch.cat(rows))


def _inputs(mlp: MLP) -> Float[Tensor, "unit d_model"]:
    return mlp.W_in.double().mT


def _bias(attn: Attention, letter: str, head: int) -> Float[Tensor, "1 d_head"]:
    if attn.cfg.attn_bias:
        return getattr(attn, f"b_{letter}")[head, None].double()
    return torch.zeros(1, getattr(attn, f"W_{letter}").shape[2], dtype=torch.float64)


def _unit(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
    sizes = rows.norm(dim=-1, keepdim=True)
    return rows / sizes.masked_fill(sizes == 0, 1)


def _on_paths(edges: list[Edge]) -> list[Edge]:
    reached, needed = {EMBEDDING}, {None}
    for edge in edges:  # by receiver in order of computation, so that all into a node come before those out of it
        reached |= {edge.receiver} if edge.sender in reached else set()
    for edge in reversed(edges):
        needed |= {edge.sender} if edge.receiver in needed else set()
    return [edge for edge in edges if edge.sender in reached and edge.receiver in needed]
