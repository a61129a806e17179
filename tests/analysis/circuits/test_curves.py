"""Faithfulness against size: against a plain loop, closed forms, and a planted circuit whose areas are known."""

import pytest
import torch
from torch.testing import assert_close

from mechicl import constructions
from mechicl.analysis.circuits import Ranked, circuit_curve, find_circuit
from mechicl.analysis.circuits.curves import FRACTIONS, CircuitCurve
from mechicl.analysis.interventions import Replacement, next_token_loss, squared_error
from mechicl.models.opening.sites import EMBEDDING, Edge, list_edges
from mechicl.statistics import ratio_interval
from mechicl.tasks import RepeatedTokens
from tests.analysis.circuits.oracles import run_edges, write_all
from tests.analysis.interventions.oracles import EXACT, inputs, model_of

PLANTED = constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)
SEQUENCES = RepeatedTokens(d_vocab=12, n_ctx=24, min_period=5, max_period=11).sample(8, seed=0)


def plain_area(xs: list[float], ys: list[float]) -> float:
    return sum((b - a) * (u + w) / 2 for a, b, u, w in zip(xs, xs[1:], ys, ys[1:], strict=False))


@pytest.mark.parametrize("only_paths", [True, False])
def test_a_curve_is_that_of_a_plain_loop(only_paths):
    model = model_of("gpt")
    prompts, others = inputs(model, 0, 5), inputs(model, 1, 5)
    edges, metric = list_edges(model), squared_error(prompts)
    scores = torch.randn(len(edges), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fractions = (0.02, 0.1, 0.3, 0.6, 0.9, 1.0)
    by_edge = dict(zip(edges, scores.tolist(), strict=True))
    curve = circuit_curve(model, by_edge, prompts, method=Replacement("resample", others),
                          ranked=Ranked(fractions, 0, only_paths=only_paths), progress=False)  # fmt: skip
    tokens, references = model.encode(prompts), write_all(model, model.encode(others))

    @torch.no_grad()
    def loss(kept: set[Edge]) -> torch.Tensor:
        weights = {edge: float(edge in kept) for edge in edges}
        return metric(model.decode(run_edges(model, tokens, references, weights))[:, -1])

    order = sorted(range(len(edges)), key=lambda i: -abs(float(scores[i])))
    assert curve.counts == tuple(int(part * len(edges)) for part in fractions)
    values = []
    for i, count in enumerate(curve.counts):
        kept = {edges[number] for number in order[:count]}
        if only_paths:
            kept = on_path(kept)
        assert curve.n_kept["scores"][i] == len(kept)
        values.append(loss(kept))
        assert_close(curve.alone["scores"][i], values[-1], **EXACT)
    full, ablated = loss(set(edges)), loss(set())
    assert_close(curve.full, full, **EXACT)
    assert_close(curve.ablated, ablated, **EXACT)
    shares = [float((value - ablated).mean() / (full - ablated).mean()) for value in values]
    assert [each.mean for each in curve.faithfulness()] == pytest.approx(shares)
    assert curve.faithfulness()[1] == ratio_interval(
        curve.alone["scores"][1] - curve.ablated, curve.full - curve.ablated
    )
    assert curve.cpr().mean == pytest.approx(plain_area([*fractions], shares))
    assert curve.cmd().mean == pytest.approx(plain_area([*fractions], [abs(1 - share) for share in shares]))
    assert curve.cpr().low <= curve.cpr().mean <= curve.cpr().high
    assert curve.cmd().low < curve.cmd().high


def on_path(kept: set[Edge]) -> set[Edge]:
    """The edges on a path from embedding to output: others are removed until none is left."""
    while True:
        senders, receivers = {edge.sender for edge in kept}, {edge.receiver for edge in kept}
        fewer = {edge for edge in kept if (edge.sender == EMBEDDING or edge.sender in receivers)
                 and (edge.receiver is None or edge.receiver in senders)}  # fmt: skip
        if fewer == kept:
            return kept
        kept = fewer


def test_a_planted_circuit_has_the_area_of_its_size():
    model, metric = PLANTED, next_token_loss(SEQUENCES.targets())
    circuit = find_circuit(model, SEQUENCES, method="zero", progress=False)
    scores = {edge: float(edge in circuit.edges) for edge in list_edges(model)}
    worst = {edge: -score for edge, score in scores.items()}
    both, ranked = {"true": scores, "worst": worst}, Ranked(absolute=False)
    curve = circuit_curve(model, both, SEQUENCES, method="zero", ranked=ranked, progress=False)
    # all 7 of 81 edges are needed: nothing is kept before 0.1 of them, and all from there on
    expected = (0.1 - 0.05) / 2 + (1 - 0.1)
    assert curve.cpr("true").mean == pytest.approx(expected, abs=1e-6)
    assert curve.cmd("true").mean == pytest.approx(0.999 - expected, abs=1e-6)
    assert curve.n_kept["true"][FRACTIONS.index(0.2)] >= 7
    assert curve.cpr("worst").mean == pytest.approx(0.25, abs=1e-6)  # nothing up to one half
    assert curve.cpr("random").mean < 0.5
    same = circuit_curve(
        model, scores, SEQUENCES.read, metric, at="positions", method="zero", ranked=Ranked(n_random=0), progress=False
    )
    assert_close(same.alone["scores"], curve.alone["true"])


def made(n_prompts: int = 4) -> CircuitCurve:
    full = torch.zeros(n_prompts, dtype=torch.float64)
    alone = torch.tensor([1.0, 0.5, -0.25, 0.0], dtype=torch.float64)[:, None].repeat(1, n_prompts)
    return CircuitCurve((0.1, 0.2, 0.5, 1.0), (1, 2, 5, 10), {"scores": (0, 2, 5, 10)}, "loss", "zero", full, full + 1,
                        {"scores": alone})  # fmt: skip
