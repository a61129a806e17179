"""Faithfulness against size: against a plain loop, closed forms, and a planted circuit whose areas are known."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl import constructions
from mechicl.analysis.circuits import circuit_curve, find_circuit, measure_circuit, score_edges
from mechicl.analysis.circuits.curves import FRACTIONS, CircuitCurve
from mechicl.analysis.interventions import logit_difference, next_token_loss, squared_error
from mechicl.models.opening.edges import EMBEDDING, Edge, list_edges
from mechicl.statistics import load_result, ratio_interval
from mechicl.tasks import RepeatedTokens
from tests.analysis.circuits.oracles import run_edges, write_all
from tests.analysis.interventions.oracles import (
    EXACT,
    ids,
    inputs,
    model_of,
    no_hook_left,
    shared_bridge,
)

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
    curve = circuit_curve(model, by_edge, prompts, method="resample", reference=others, fractions=fractions,
                          only_paths=only_paths, n_random=0, progress=False)  # fmt: skip
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


# ---- closed forms ----


def drawn(model: Any) -> dict[Edge, float]:
    return {edge: torch.rand(()).item() for edge in list_edges(model)}


def test_everything_is_faithful_and_nothing_is_not():
    model = model_of("ids")
    tokens = inputs(model, 0, 4)
    curve = circuit_curve(model, drawn(model), tokens, fractions=(1e-9, 1.0), progress=False)
    assert curve.metric == "largest change of an output"
    assert curve.counts == (0, len(list_edges(model)))
    nothing, everything = curve.faithfulness()
    assert (nothing.mean, everything.mean) == pytest.approx((0, 1), abs=1e-9)
    assert curve.cpr().mean == pytest.approx(0.5)  # a line from 0 to 1
    assert curve.cmd().mean == pytest.approx(0.5)
    assert curve.cpr().high - curve.cpr().low < 1e-9
    whole = circuit_curve(model, drawn(model), tokens, fractions=[1.0], progress=False)
    assert whole.faithfulness()[0].mean == pytest.approx(1)
    assert whole.cmd().mean == whole.cpr().mean == 0  # there is no area over one size


def test_a_planted_circuit_has_the_area_of_its_size():
    model, metric = PLANTED, next_token_loss(SEQUENCES.targets())
    circuit = find_circuit(model, SEQUENCES, method="zero", progress=False)
    scores = {edge: float(edge in circuit.edges) for edge in list_edges(model)}
    worst = {edge: -score for edge, score in scores.items()}
    curve = circuit_curve(model, {"true": scores, "worst": worst}, SEQUENCES, method="zero", absolute=False,
                          progress=False)  # fmt: skip
    # all 7 of 81 edges are needed: nothing is kept before 0.1 of them, and all from there on
    expected = (0.1 - 0.05) / 2 + (1 - 0.1)
    assert curve.cpr("true").mean == pytest.approx(expected, abs=1e-6)
    assert curve.cmd("true").mean == pytest.approx(0.999 - expected, abs=1e-6)
    assert curve.n_kept["true"][FRACTIONS.index(0.2)] >= 7
    assert curve.cpr("worst").mean == pytest.approx(0.25, abs=1e-6)  # nothing up to one half
    assert curve.cpr("random").mean < 0.5
    same = circuit_curve(
        model, scores, SEQUENCES.read, metric, at="positions", method="zero", n_random=0, progress=False
    )
    assert_close(same.alone["scores"], curve.alone["true"])


def test_random_scores_are_reproducible():
    model = model_of("ids")
    tokens, scores = inputs(model, 0, 4), drawn(model)
    a, b, c = (circuit_curve(model, scores, tokens, n_random=3, seed=seed, progress=False) for seed in (0, 0, 1))
    assert a.names == ("scores", "random", "random 2", "random 3")
    for name in a.names:
        assert torch.equal(a.alone[name], b.alone[name])
    assert not torch.equal(a.alone["random"], c.alone["random"])
    assert not torch.equal(a.alone["random"], a.alone["random 2"])


def test_scores_of_gradients_and_of_untrained_models_in_one_curve():
    scores = {"trained": score_edges(PLANTED, SEQUENCES, method="zero", progress=False)}
    untrained = {"untrained": dict.fromkeys(list_edges(PLANTED), 0.0)}  # as good as none
    curve = circuit_curve(PLANTED, scores | untrained, SEQUENCES, method="zero", progress=False)
    assert curve.names == ("trained", "untrained", "random")
    assert curve.cpr("trained").mean > 0.9 > curve.cpr("untrained").mean
    alone = circuit_curve(PLANTED, scores["trained"], SEQUENCES, method="zero", n_random=0, progress=False)
    assert alone.names == ("mask-ig",)
    assert_close(alone.alone["mask-ig"], curve.alone["trained"])


def test_a_bridge_has_curves_and_completeness_too():
    model, tokens = shared_bridge(), ids(0, n=4, d_vocab=20)
    metric = logit_difference(tokens[:, 0], tokens[:, 1])
    scores = score_edges(model, tokens, metric, progress=False)
    curve = circuit_curve(model, scores, tokens, metric, progress=False)
    assert curve.faithfulness()[-1].mean == pytest.approx(1, abs=1e-4)
    assert curve.names == ("mask-ig", "random")
    circuit = find_circuit(model, tokens, metric, search="eap-ig", tolerance=0.3, effects=False, progress=False)
    measured = measure_circuit(model, circuit, tokens, metric, n_subsets=4, effects=False, progress=False)
    assert len(measured.incompleteness()) == 4
    assert measured.is_same_as(circuit)
    assert no_hook_left(model)


# ---- as a result ----


def made(n_prompts: int = 4) -> CircuitCurve:
    full = torch.zeros(n_prompts, dtype=torch.float64)
    alone = torch.tensor([1.0, 0.5, -0.25, 0.0], dtype=torch.float64)[:, None].repeat(1, n_prompts)
    return CircuitCurve((0.1, 0.2, 0.5, 1.0), (1, 2, 5, 10), {"scores": (0, 2, 5, 10)}, "loss", "zero", full, full + 1,
                        {"scores": alone})  # fmt: skip


def test_areas_by_hand():
    curve = made()
    assert [each.mean for each in curve.faithfulness()] == [0, 0.5, 1.25, 1]
    assert curve.cpr().mean == pytest.approx(0.1 * 0.25 + 0.3 * 0.875 + 0.5 * 1.125)
    assert curve.cmd().mean == pytest.approx(0.1 * 0.75 + 0.3 * 0.375 + 0.5 * 0.125)
    single = made(1)
    assert single.cpr().mean == pytest.approx(curve.cpr().mean)
    assert str(single.cpr()).endswith("± nan")


def test_it_is_saved_and_a_table_and_prints(tmp_path):
    curve = made()
    loaded = load_result(curve.save(tmp_path))
    assert loaded.fractions == curve.fractions
    assert loaded.n_kept == curve.n_kept
    assert str(loaded) == str(curve)
    assert "CPR 0.85" in str(curve)
    table = curve.to_dataframe()
    assert list(table["faithfulness"]) == [0, 0.5, 1.25, 1]
    assert list(table["kept"]) == [0, 2, 5, 10]
    assert curve.axis_names()["scores"] == ("fraction",)
