"""Searches for edges, against plain loops that run the model once per edge."""

import itertools

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import next_token_loss
from mechicl.analysis.circuits import EMBEDDING, Edge, Node, find_circuit, score_edges
from mechicl.models.opening.edges import list_edges
from mechicl.tasks import LinearRegression
from tests.analysis.circuits.oracles import run_edges, write_all, zeros
from tests.analysis.interventions.oracles import model_of

MODEL = model_of("ids", n_layers=2)
IDS, OTHERS = (torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
LOSS = next_token_loss(OTHERS[:, 0])


def shifts_of(references):
    """Distance of the mean loss with some edges from the whole model's, on the scale of cutting all edges."""
    edges = list_edges(MODEL)

    @torch.no_grad()
    def mean_loss(kept):
        weights = {edge: float(edge in kept) for edge in edges}
        return LOSS(run_edges(MODEL, IDS, references, weights)[:, -1]).mean()

    whole, nothing = mean_loss(set(edges)), mean_loss(set())
    return lambda kept: ((mean_loss(kept) - whole).abs() / (nothing - whole).abs()).item()


@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_acdc_is_the_plain_greedy_loop(tolerance):
    shift = shifts_of(write_all(MODEL, OTHERS))
    kept, moved = set(list_edges(MODEL)), 0.0
    for receivers in reversed(stages()):
        for edge in reversed([edge for edge in list_edges(MODEL) if (edge.receiver, edge.by) in receivers]):
            now = shift(kept - {edge})
            if now - moved < tolerance:
                kept, moved = kept - {edge}, now
    circuit = find_circuit(
        MODEL, IDS, LOSS, search="acdc", method="resample", reference=OTHERS, tolerance=tolerance,
        effects=False, progress=False,
    )  # fmt: skip
    assert 0 < len(circuit.edges) < len(list_edges(MODEL))
    assert set(circuit.edges) == connected(kept)


def stages():
    """Receivers that read at the same time, in order of computation."""
    receivers = dict.fromkeys((edge.receiver, edge.by) for edge in list_edges(MODEL))
    by_stage = {}
    for receiver, by in receivers:
        key = (99, 0) if receiver is None else (receiver.layer, receiver.head is None)
        by_stage.setdefault(key, []).append((receiver, by))
    return [by_stage[key] for key in sorted(by_stage)]


def connected(edges):
    """The edges that lead to the output."""
    kept = set()
    while True:
        more = {e for e in edges - kept if e.receiver is None or e.receiver in {other.sender for other in kept}}
        if not more:
            return kept
        kept |= more


@pytest.mark.parametrize("search", ["exact", "eap-ig", "acdc"])
def test_circuits_are_within_the_tolerance(search):
    circuit = find_circuit(MODEL, IDS, LOSS, search=search, tolerance=0.3, effects=False, progress=False)
    shift = shifts_of(zeros(MODEL, IDS))(set(circuit.edges))
    # ACDC allows each edge as much
    assert shift <= 0.3 + 1e-9 or search == "acdc"
    moved = (circuit.edges_alone - circuit.full).mean().abs() / (circuit.ablated - circuit.full).mean().abs()
    assert moved.item() == pytest.approx(shift, abs=1e-9)


def test_tighter_tolerances_keep_more_edges():
    shift = shifts_of(zeros(MODEL, IDS))
    circuit = find_circuit(MODEL, IDS, LOSS, tolerance=0.05, effects=False, progress=False)
    kept = set(circuit.edges)
    assert kept == connected(kept)
    assert shift(kept) <= 0.05
    fewer = find_circuit(MODEL, IDS, LOSS, tolerance=0.4, effects=False, progress=False)
    assert len(fewer.edges) < len(kept) < len(list_edges(MODEL))


def test_one_of_two_redundant_heads_is_kept():
    """Two heads that write the same, of which the output takes the larger: cutting either changes nothing."""
    model = constructions.induction(d_vocab=6, n_ctx=12, n_heads=3, previous_token_head=0, induction_head=1, seed=0)
    twin = constructions.induction(d_vocab=6, n_ctx=12, n_heads=3, previous_token_head=2, induction_head=1, seed=0)
    with torch.no_grad():  # a second previous-token head next to the first, each sharp enough alone
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(model.blocks[0].attn, name)[2] = getattr(twin.blocks[0].attn, name)[2]
        model.blocks[1].attn.W_Q.mul_(20)
    ids = torch.randint(6, (16, 6), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    circuit = find_circuit(model, ids, next_token_loss(ids[:, 0]), tolerance=0.05, progress=False)
    previous = [head for head in circuit.heads if head[0] == 0]
    assert len(previous) == 1
    assert (1, 1) in circuit.heads


def test_circuits_of_the_outputs_have_the_edges_that_any_reference_shows():
    """A head whose query all prompts share is not missed, nor one that a zero would not disturb."""
    model = constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)
    ids = torch.randint(12, (8, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    circuit = find_circuit(model, ids, progress=False)
    assert (circuit.metric, circuit.method) == ("largest change of an output", "any")
    first, second = Node(0, 2), Node(1, 1)
    expected = {*(Edge(EMBEDDING, first, by) for by in "qkv"), Edge(first, second, "k"), Edge(second, None),
                Edge(EMBEDDING, second, "q"), Edge(EMBEDDING, second, "v")}  # fmt: skip
    assert set(circuit.edges) == expected
    assert circuit.faithfulness().mean == pytest.approx(1)
    # means over prompts hide what depends on positions alone
    mean = find_circuit(model, ids, method="mean", progress=False)
    assert set(mean.edges) == expected - {Edge(EMBEDDING, first, "q"), Edge(EMBEDDING, first, "k")}


def test_a_construction_on_points():
    model = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=2)
    prompts = LinearRegression(x_dim=3, n_context=6).sample(16, seed=0)
    circuit = find_circuit(model, prompts, progress=False)
    exact = find_circuit(model, prompts, "outputs", progress=False)
    assert (circuit.metric, exact.metric) == ("loss", "largest change of an output")
    assert exact.edges == constructions.weights_circuit(model).edges
    heads = (Node(0, 0), Node(1, 0))
    assert circuit.nodes == heads
    # queries and keys read inputs, which no layer writes: the second head reads the first by its value alone
    assert Edge(*heads, "v") in circuit.edges
    assert not {Edge(*heads, "q"), Edge(*heads, "k")} & set(circuit.edges)


def test_effects_are_those_of_one_run_per_edge():
    circuit = find_circuit(MODEL, IDS, LOSS, tolerance=0.2, progress=False)
    references = zeros(MODEL, IDS)
    edges = list_edges(MODEL)
    for edge, effect in itertools.islice(zip(circuit.edges, circuit.edge_effects, strict=True), 5):
        with torch.no_grad():
            weights = {e: float(e in set(circuit.edges) - {edge}) for e in edges}
            alone = LOSS(run_edges(MODEL, IDS, references, weights)[:, -1])
        torch.testing.assert_close(effect, alone - circuit.edges_alone)
    unmeasured = find_circuit(MODEL, IDS, LOSS, tolerance=0.2, effects=False, progress=False)
    assert unmeasured.edges == circuit.edges
    assert unmeasured.edge_effects.isnan().all()
    assert score_edges(MODEL, IDS, LOSS, progress=False).edges == tuple(edges)
