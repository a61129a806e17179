"""A bridge taken apart: whole it is the model, cut everywhere the reference, and single edges are plain hooks."""

import warnings
from collections.abc import Collection, Iterator

import pytest
import torch
from torch import Tensor

from mechicl.analysis.circuits.search import on_paths
from mechicl.base.settings import settings
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.bridge_parts import BridgeParts, run_nodes
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import (
    EMBEDDING,
    Edge,
    Node,
    is_parallel,
    list_edges,
    list_key_heads,
    list_nodes,
    list_reached,
)
from tests.families import FAMILIES, open_family, putting, token_ids
from tests.pages import ROOT

WITHOUT_A_SUM = {"BERT", "GPT", "Mamba", "RecurrentGemma", "T5"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(
    bridge, tokens: Tensor, cut: Collection[Edge], references: dict[Node, Tensor]
) -> tuple[Tensor, dict[Node, Tensor]]:
    """A run with some edges cut, one receiver after the other, and what nodes write in it."""
    parts, edges = BridgeParts(ModelAdapter(bridge, "positions")), list_edges(bridge)
    writes, biases = {EMBEDDING: parts.embed(tokens)}, torch.tensor(0.0)

    def read(receiver: Node | None, by: str) -> Tensor:
        senders = [edge.sender for edge in edges if (edge.receiver, edge.by) == (receiver, by)]
        brought = (references if Edge(sender, receiver, by) in cut else writes for sender in senders)
        return sum((from_[sender] for from_, sender in zip(brought, senders, strict=True)), start=biases)

    for layer in range(bridge.cfg.n_layers):
        heads = [Node(layer, head) for head in range(bridge.cfg.n_heads)]
        shared = [heads[head] for head in list_key_heads(bridge)]
        mlp_reads = read(Node(layer), "") if is_parallel(bridge) else None
        reads = {by: torch.stack([read(node, by) for node in nodes]) for by, nodes in
                 (("q", heads), ("k", shared), ("v", shared))}  # fmt: skip
        writes |= dict(zip(heads, parts.attend(layer, **reads), strict=True))
        biases = biases + parts.attention_bias(layer)
        if Node(layer) in list_nodes(bridge):
            writes[Node(layer)] = parts.mlp(layer, read(Node(layer), "") if mlp_reads is None else mlp_reads)
    return parts.read_out(read(None, "")), writes


SUMS = [name for name in FAMILIES if name not in WITHOUT_A_SUM]
QUICK = ("GPT-2", "Gemma 2")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUMS]
)
def test_a_family_taken_apart(name):
    """Whole, cut everywhere, and differentiated."""
    bridge, _plain = open_family(name)
    tokens, others = token_ids(0, 3), token_ids(1, 3)
    with torch.no_grad():
        whole, writes = run(bridge, tokens, (), {})
        expected = bridge(tokens)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
        _, references = run(bridge, others, (), {})
        cut, _ = run(bridge, tokens, list_edges(bridge), references)
        torch.testing.assert_close(cut, bridge(others), rtol=0, atol=1e-5 * cut.abs().max().item())
    assert list(writes) == list_nodes(bridge)
    # over all edges together, the gradient is the model's own
    writes[EMBEDDING].requires_grad_(True)
    out, _ = run(bridge, tokens, [edge for edge in list_edges(bridge) if edge.sender == EMBEDDING], writes)
    (gradient,) = torch.autograd.grad(out.square().sum(), writes[EMBEDDING])
    probe = torch.zeros_like(gradient, requires_grad=True)
    out = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda stream, hook: stream + probe)])
    (expected,) = torch.autograd.grad(out.square().sum(), probe)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", sorted(WITHOUT_A_SUM))
def test_families_that_cannot_be_taken_apart(name):
    bridge, _ = open_family(name)
    with pytest.raises(
        ValueError,
        match=r"not the sum of its parts.*: layer 0|layer 0 of .* has no attention|single stack",
    ):
        BridgeParts(ModelAdapter(bridge)).embed(token_ids(0))


EDGES_OF_GPT2 = [Edge(sender, Node(2, 1), by) for sender in (EMBEDDING, Node(0, 1), Node(1)) for by in "qkv"]


@pytest.mark.parametrize("edge", [*EDGES_OF_GPT2, Edge(Node(1, 0), Node(2)), Edge(Node(1, 0), None)], ids=str)
def test_an_edge_is_a_plain_hook(edge):
    bridge, plain = open_family("GPT-2", dtype=torch.float64)
    tokens, last, columns = token_ids(0), plain.transformer.h[2], slice(None)
    with torch.no_grad():
        _, references = run(bridge, token_ids(1), (), {})
        cut, _ = run(bridge, tokens, [edge], references)
        change = references[edge.sender] - plain_writes(plain, tokens)[edge.sender]
        if edge.receiver is None:
            place = ("transformer.ln_f", "in")
            received = seen(plain, *place, tokens) + change
        elif edge.by:
            place, width = ("transformer.h.2.attn.c_attn", "out"), bridge.cfg.d_head
            received = last.attn.c_attn(last.ln_1(seen(plain, "transformer.h.2.ln_1", "in", tokens) + change))
            first = "qkv".index(edge.by) * bridge.cfg.d_model + edge.receiver.head * width
            columns = slice(first, first + width)
        else:
            place = ("transformer.h.2.mlp", "in")
            received = last.ln_2(seen(plain, "transformer.h.2.ln_2", "in", tokens) + change)

        def edit(activation: Tensor) -> None:
            activation[..., columns] = received[..., columns]

        with putting(plain, place, edit):
            expected = plain(tokens).logits
    torch.testing.assert_close(cut, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(cut, plain(tokens).logits, atol=1e-3)


POST_NORM = "post_feedforward_layernorm"
PLACES = {  # the stack of layers; where an MLP writes, a norm reads, and its reader gives out what it made of it
    ("Llama", "q"): ("model.layers", "mlp", "input_layernorm", "self_attn.q_proj", slice(4, 8)),
    ("Llama", "k"): ("model.layers", "mlp", "input_layernorm", "self_attn.k_proj", slice(0, 4)),
    ("Gemma 2", "q"): ("model.layers", POST_NORM, "input_layernorm", "self_attn.q_proj", slice(4, 8)),
    ("Gemma 2", "v"): ("model.layers", POST_NORM, "input_layernorm", "self_attn.v_proj", slice(0, 4)),
    ("Gemma 2", ""): ("model.layers", POST_NORM, "pre_feedforward_layernorm", "mlp", slice(None)),
    ("GPT-J", "v"): ("transformer.h", "mlp", "ln_1", "attn.v_proj", slice(4, 8)),
    ("GPT-J", ""): ("transformer.h", "mlp", "ln_1", "mlp", slice(None)),
    ("Mixtral", ""): ("model.layers", "mlp", "post_attention_layernorm", "mlp", slice(None)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "by"), PLACES)
def test_an_edge_from_an_mlp_is_a_plain_hook_in_other_families(name, by):
    """With rotary positions, shared keys, layers in parallel, norms after the attention, and experts."""
    bridge, plain = open_family(name)
    layers, writes, norm, reads, columns = PLACES[name, by]
    tokens, others = token_ids(0), token_ids(1)
    shared = by in ("k", "v") and len(list_key_heads(bridge)) == 1
    receiver = Node(2) if not by else Node(2, 0 if shared else 1)
    with torch.no_grad():
        _, references = run(bridge, others, (), {})
        cut, _ = run(bridge, tokens, [Edge(Node(0), receiver, by)], references)
        written, other = (seen(plain, f"{layers}.0.{writes}", "out", ids) for ids in (tokens, others))
        module, reader = (plain.get_submodule(f"{layers}.2.{part}") for part in (norm, reads))
        read = seen(plain, f"{layers}.2.{norm}", "in", tokens) + other - written
        made = reader(module(read))
        made = made[0] if isinstance(made, tuple) else made

        def edit(out: Tensor) -> None:
            out[..., columns] = made[..., columns]

        with putting(plain, (f"{layers}.2.{reads}", "out"), edit):
            expected = plain(tokens).logits
    torch.testing.assert_close(cut, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (cut - plain(tokens).logits).abs().max() > 1e-3 * expected.abs().max()


def seen(plain, name: str, side: str, tokens: Tensor) -> Tensor:
    """The input or output of a sub-module in a run."""
    kept: list[Tensor] = []
    with putting(plain, (name, side), lambda activation: kept.append(activation.clone())):
        plain(tokens)
    return kept[0]


def test_heads_that_share_keys_and_values():
    bridge, _ = open_family("Llama")
    edges = list_edges(bridge)
    assert {edge.receiver for edge in edges if edge.by in ("k", "v")} == {Node(layer, 0) for layer in range(3)}
    assert list_reached(bridge, Edge(EMBEDDING, Node(1, 0), "k")) == [Node(1, 0), Node(1, 1)]
    assert list_reached(bridge, Edge(EMBEDDING, Node(1, 0), "q")) == [Node(1, 0)]
    assert list_reached(bridge, Edge(EMBEDDING, Node(1))) == [Node(1)]
    assert list_reached(bridge, Edge(EMBEDDING, None)) == []
    parallel = list_edges(open_family("GPT-J")[0])
    assert Edge(Node(0, 0), Node(1)) in parallel
    assert Edge(Node(1, 0), Node(1)) not in parallel


@pytest.mark.parametrize(("name", "on_path"), [("Llama", {"k", "v"}), ("Gemma 2", {"q", "k", "v"}), ("GPT-2", set())])
def test_an_edge_leads_to_all_that_it_can_change(name, on_path):
    """Head 1.1 writes to the output: what head 1.0 reads matters where the two share keys, or a norm of their sum."""
    bridge, _ = open_family(name)
    adapter, tokens = ModelAdapter(bridge, "positions"), token_ids(0)
    graph = EdgeGraph(adapter, tokens, record_writes(adapter, tokens))
    to_other = [Edge(EMBEDDING, Node(1, 0), by) for by in "qkv"]
    kept = graph.mask([Edge(Node(1, 1), None), *to_other])
    left = on_paths(graph, kept)
    assert {edge.by for edge in to_other if (left & graph.mask([edge])).any()} == on_path
    assert (left & graph.mask([Edge(Node(1, 1), None)])).any()


def test_prompts_of_another_length_or_number():
    bridge, _ = open_family("Gemma 2")
    parts = BridgeParts(ModelAdapter(bridge, "positions"))
    with torch.no_grad():
        for tokens in (token_ids(0, 2, 6), token_ids(0, 4, 7), token_ids(0, 1, 7)):
            stream = parts.embed(tokens)
            for layer in range(3):
                _, stream = run_nodes(parts, layer, stream)
            expected = bridge(tokens)
            torch.testing.assert_close(parts.read_out(stream), expected, rtol=0, atol=1e-5 * expected.abs().max())


def test_split_inputs_stay_on():
    bridge, _ = open_family("GPT-2")
    expected, _ = run(bridge, token_ids(0), (), {})
    bridge.set_use_split_qkv_input(True)
    split, _ = run(bridge, token_ids(0), (), {})
    torch.testing.assert_close(split, expected)
    assert bridge.cfg.use_split_qkv_input


def test_hooks_of_the_user_are_refused():
    bridge, _ = open_family("GPT-2")
    bridge.add_hook("blocks.0.hook_resid_pre", lambda stream, hook: 2 * stream)
    with pytest.raises(ValueError, match="reset_hooks"):
        BridgeParts(ModelAdapter(bridge)).embed(token_ids(0))


def plain_writes(plain, tokens: Tensor) -> dict[Node, Tensor]:
    """The output of each node of GPT-2, by plain torch hooks."""
    writes = {EMBEDDING: seen(plain, "transformer.h.0", "in", tokens)}
    for layer, block in enumerate(plain.transformer.h):
        z, weight = seen(plain, f"transformer.h.{layer}.attn.c_proj", "in", tokens), block.attn.c_proj.weight
        for head, rows in enumerate(torch.arange(len(weight)).chunk(2)):
            writes[Node(layer, head)] = z[..., rows] @ weight[rows]
        writes[Node(layer)] = seen(plain, f"transformer.h.{layer}.mlp", "out", tokens)
    return writes


@torch.no_grad()
def describe(name: str) -> tuple[str, str, str]:
    """Return what an MLP reads, keys of heads, and what makes heads interact; or why a family is refused."""
    bridge, _ = open_family(name)
    adapter = ModelAdapter(bridge, "positions")
    tokens, others = token_ids(0, 3), token_ids(1, 3)
    try:
        graph = EdgeGraph(adapter, tokens, record_writes(adapter, others))
    except ValueError as error:
        reasons = {
            "not the sum": "normalises its stream",
            "no attention": "layers without attention",
            "single stack": "two stacks",
        }
        (reason,) = (reason for words, reason in reasons.items() if words in str(error))
        return f"refused: {reason}", "", ""
    for kept, expected in ((True, bridge(tokens)), (False, bridge(others))):
        out = graph.run(torch.full((len(graph.edges),), kept))
        assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    meeting = "a norm over all heads" if graph.parts.heads_interact else "nothing"
    mlp = "the stream before its layer" if is_parallel(bridge) else "the stream after its layer's heads"
    return mlp, "shared" if len(list_key_heads(bridge)) < bridge.cfg.n_heads else "one per head", meeting


def test_the_table_of_families():
    """Each row of the page, by the first of its families."""
    page = (ROOT / "docs/how-to/families.md").read_text().partition("| family | an MLP reads")[2]
    lines = [line for line in page.splitlines() if line[:1] == "|"][1:]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines]
    assert sorted(name for names, *_ in rows for name in names.split(", ")) == sorted(FAMILIES)
    for names, *cells in rows:
        assert describe(names.split(", ")[0]) == tuple(cells)


# ---- as a graph ----
@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "Llama", "Gemma 2", "BLOOM", "Granite", "OPT"])
def test_cut_edges_are_walked_edge_by_edge(name):
    bridge, _ = open_family(name)
    tokens, others = token_ids(0, 3), token_ids(1, 3)
    adapter = ModelAdapter(bridge, "positions")
    references = record_writes(adapter, others)
    with settings(memory=2**18):
        graph = EdgeGraph(adapter, tokens, references)
    kept = torch.rand(4, len(graph.edges), generator=torch.Generator().manual_seed(0)) < 0.6
    by_node = dict(zip(graph.nodes, references, strict=True))
    with torch.no_grad():
        for row, predicted in zip(kept, graph.run_cuts(kept), strict=True):
            cut = [edge for edge, keep in zip(graph.edges, row, strict=True) if not keep]
            expected, _ = run(bridge, tokens, cut, by_node)
            torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "Llama", "Gemma 2"])
def test_gradients_of_all_edges(name):
    """At once, against the gradient to a mask and, in GPT-2, runs with a little more and a little less of an edge."""
    bridge, _ = open_family(name, dtype=torch.float64)
    tokens, others = token_ids(0), token_ids(1)
    adapter = ModelAdapter(bridge, "positions")
    graph = EdgeGraph(adapter, tokens, record_writes(adapter, others))
    kept = torch.full((len(graph.edges),), 0.5, dtype=torch.float64)

    def objective(predictions: Tensor, prompts: slice) -> Tensor:
        return predictions.square().sum((1, 2))

    def total(mask: Tensor) -> Tensor:
        return objective(graph._trace(mask[None], slice(0, 2), graph._all, None, None)[1][0], slice(0, 2)).sum()

    gradients = graph.gradients(kept, objective).sum(1)
    mask = kept.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(total(mask), mask)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    if name == "GPT-2":  # others compute some of it in float32
        for number in range(0, len(graph.edges), 7):
            nudge = torch.zeros_like(kept)
            nudge[number] = 1e-5
            slope = (total(kept + nudge) - total(kept - nudge)).item() / 2e-5
            assert gradients[number].item() == pytest.approx(slope, rel=1e-4, abs=1e-5 * gradients.abs().max().item())
