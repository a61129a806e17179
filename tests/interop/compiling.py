"""tracr's compiler in stages, and the circuit of a program by the labels of the blocks that it is made of."""

import importlib
from functools import cache
from typing import Any
from unittest import mock

import haiku
import numpy as np
from tracr.compiler import (
    assemble,
    basis_inference,
    compiling,
    craft_graph_to_model,
    expr_to_craft_graph,
    nodes,
    rasp_to_graph,
)
from tracr.craft import bases, transformers

from mechicl.models.opening.sites import EMBEDDING, Edge, Node

rasp: Any = importlib.import_module("tracr.rasp.rasp")  # whose values may be anything, which annotations doubt
AB = ("a", "b", "c")


@cache
def programs() -> dict[str, tuple[Any, tuple[Any, ...], int, bool]]:
    """Programs with their words, largest length, and whether keys are causal."""
    tokens, indices = rasp.tokens, rasp.indices
    same = rasp.Select(tokens, tokens, rasp.Comparison.EQ)
    is_a = rasp.numerical(rasp.Map(lambda x: float(x == "a"), tokens))
    before = rasp.Select(indices, indices, rasp.Comparison.LEQ)
    share = rasp.numerical(rasp.Aggregate(before, is_a, default=0))
    length = rasp.SelectorWidth(rasp.Select(tokens, tokens, rasp.Comparison.TRUE))
    mirrored = rasp.Select(indices, rasp.SequenceMap(lambda n, i: n - 1 - i, length, indices), rasp.Comparison.EQ)
    previous = rasp.Select(indices, indices, lambda k, q: k == q - 1)
    two_back = rasp.Aggregate(previous, rasp.Aggregate(previous, tokens))
    rare = rasp.numerical(rasp.Map(lambda n: 0.25 * n, rasp.SelectorWidth(same)))
    return {
        "histogram": (rasp.SelectorWidth(same), AB, 5, False),
        "double": (rasp.Map(lambda x: 2 * x, tokens), AB, 4, False),
        "share of a": (share, AB, 5, False),
        "share of a, causal": (share, AB, 4, True),
        "reverse": (rasp.Aggregate(mirrored, tokens), AB, 5, False),
        "two back": (two_back, AB, 5, False),
        "two numbers": (rasp.numerical(rasp.LinearSequenceMap(share, rare, 1.0, -2.0)), AB, 4, False),
    }


def compile_program(name: str) -> assemble.AssembledTransformerModel:
    program, words, length, causal = programs()[name]
    # four fifths of the time go into random initial weights, which tracr then sets to zero
    with mock.patch.object(
        haiku.initializers.VarianceScaling, "__call__", lambda _, shape, dtype: np.zeros(shape, dtype)
    ):
        return compiling.compile_rasp_to_model(program, set(words), length, causal=causal)


def circuit_by_labels(program: Any, words: set[Any], length: int) -> tuple[set[Node], set[Edge]]:
    """Nodes and edges, by which labels of the residual basis each block reads and writes; no weights are assembled."""
    extracted = rasp_to_graph.extract_rasp_graph(program)
    graph = extracted.graph
    basis_inference.infer_bases(graph, extracted.sink, words, length)
    beginning = bases.BasisDirection(rasp.tokens.label, compiling.COMPILER_BOS)
    expr_to_craft_graph.add_craft_components_to_rasp_graph(graph, bos_dir=beginning)
    model = craft_graph_to_model.craft_graph_to_model(graph, extracted.sources)
    embedded = {f"tokens:{word}" for word in (*words, compiling.COMPILER_BOS)}
    writes = {EMBEDDING: embedded | {f"indices:{i}" for i in range(length)} | {"one"}}
    reads: dict[tuple[Node | None, str], set[str]] = {}
    order: list[Node | None] = []
    layer, half = 0, "attention"
    for block in model.blocks:
        kind = "mlp" if isinstance(block, transformers.MLP) else "attention"
        if half == "mlp" and kind == "attention":
            layer, half = layer + 1, "attention"
        if isinstance(block, transformers.MLP):
            node = Node(layer)
            needed = block.snd.matrix.any(1)
            reads[node, ""] = _labels(block.fst.input_space, block.fst.matrix[:, needed].any(1))
            writes[node] = _labels(block.snd.output_space, block.snd.matrix.any(0))
            order.append(node)
            layer, half = layer + 1, "attention"
        else:
            assert isinstance(block, transformers.MultiAttentionHead)
            for i, head in enumerate(block.heads()):
                node = Node(layer, i)
                reads[node, "q"] = _labels(head.w_qk.left_space, head.w_qk.matrix.any(1))
                reads[node, "k"] = _labels(head.w_qk.right_space, head.w_qk.matrix.any(0))
                reads[node, "v"] = _labels(head.w_ov.input_space, head.w_ov.matrix.any(1))
                writes[node] = _labels(head.w_ov.output_space, head.w_ov.matrix.any(0))
                order.append(node)
            half = "mlp"
    output = bases.VectorSpaceWithBasis(extracted.sink[nodes.OUTPUT_BASIS])
    reads[None, ""] = {str(direction) for direction in output.basis}
    edges = {
        Edge(sender, receiver, by)
        for (receiver, by), read in reads.items()
        for sender, written in writes.items()
        if written & read and (receiver is None or _before(sender, receiver))
    }
    return _on_paths(edges)


def _labels(space: bases.VectorSpaceWithBasis, used: Any) -> set[str]:
    return {str(direction) for direction, is_used in zip(space.basis, used, strict=True) if is_used}


def _before(sender: Node, receiver: Node) -> bool:
    in_layer = receiver.head is None and sender.head is not None and sender.layer == receiver.layer
    return sender.layer < receiver.layer or in_layer


def _on_paths(edges: set[Edge]) -> tuple[set[Node], set[Edge]]:
    while True:
        into, out = {edge.receiver for edge in edges} | {EMBEDDING}, {edge.sender for edge in edges} | {None}
        kept = {edge for edge in edges if edge.sender in into and edge.receiver in out}
        if kept == edges:
            return {node for node in into & out if node not in (EMBEDDING, None)}, edges  # type: ignore[misc]
        edges = kept
