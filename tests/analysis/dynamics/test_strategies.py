"""Strategies over training: artificial trajectories with known weights, and the fitted odds of memorising."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms, viz
from mechicl.analysis.dynamics import StrategyTracking, fit_strategy_odds, track_strategies
from mechicl.analysis.dynamics.strategies import nearest_mixture
from mechicl.checkpoints import Checkpoint
from mechicl.checkpoints.checkpoint import Snapshots, stack_models
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner, token_log_probabilities
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import load_result
from mechicl.tasks import BallsAndUrns, LinearRegression, MarkovChains, TaskPool

CHAINS = MarkovChains(d_vocab=3, n_ctx=30, n_chains=4)
TOKENS = TokenSequences.concatenate([CHAINS.sample(60, seed=0), CHAINS.new_chains.sample(60, seed=0)])
POOL = TaskPool(x_dim=3, n_context=6, n_tasks=4)
POINTS = Prompts.concatenate([POOL.sample(100, seed=0), POOL.new_tasks.sample(100, seed=0)])
WEIGHTS = torch.tensor([[0.0, 0.0, 1.0], [0.1, 0.5, 0.4], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)


def mixed_tokens(learners, weights, noise, seed):
    """A learner of tokens whose probabilities are a mixture of learners', with noise in its logits."""

    def algorithm(sequences):
        pairs = zip(weights, learners, strict=True)
        total = torch.stack([w * token_log_probabilities(each, sequences).exp() for w, each in pairs]).sum(0)
        drawn = torch.randn(total.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (total.log() + noise * drawn).log_softmax(-1)

    return TokenAlgorithmLearner(algorithm)


def mixed_points(learners, weights, noise, seed):
    """A learner of points that predicts a mixture of learners' predictions, with noise."""

    def algorithm(prompts):
        parts = [w * each.predict_prefixes(prompts) for w, each in zip(weights, learners, strict=True)]
        total = torch.stack(parts).sum(0)
        return total + noise * torch.randn(total.shape, generator=torch.Generator().manual_seed(seed))

    return AlgorithmLearner(algorithm)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_weights_of_mixtures_on_tokens_are_found(noise):
    learners = {name: algorithms.references(CHAINS)[name] for name in ("pool", "bigram", "unigram")}
    models = {
        10**i: [mixed_tokens(learners.values(), row, noise, 10 * i + seed) for seed in range(3)]
        for i, row in enumerate(WEIGHTS.tolist())
    }
    found = track_strategies(models, learners, TOKENS, n_resamples=30, progress=False)
    assert found.steps == (1, 10, 100, 1000)
    assert found.learners == ("pool", "bigram", "unigram")
    assert (found.weights.mean(-1).T - WEIGHTS).abs().max() < (0.02 if noise else 1e-7)
    assert found.residual.max() < (0.05 if noise else 1e-12)
    assert found.verdicts == ("unigram", "mixture", "pool", "pool")
    without = {name: learners[name] for name in ("bigram", "unigram")}
    assert track_strategies(models, without, TOKENS, n_resamples=2, progress=False).verdicts[-1] == "none of these"


def test_tokens_that_are_not_scored_do_not_count():
    task = MarkovChains(d_vocab=3, n_ctx=12, n_chains=4, order=2)  # the first two tokens depend on no others
    sequences = TokenSequences.concatenate([task.sample(40, seed=0), task.new_chains.sample(40, seed=0)])
    learners = {name: algorithms.references(task)[name] for name in ("pool", "order 2")}

    def half(tokens):
        total = torch.stack([token_log_probabilities(each, tokens).exp() for each in learners.values()]).mean(0)
        total[:, 0] = torch.tensor([1.0, 0.0, 0.0])  # the second token is surely 0
        return total.log()

    found = track_strategies([TokenAlgorithmLearner(half)], learners, sequences, n_resamples=2, progress=False)
    assert found.weights[:, 0, 0].tolist() == pytest.approx([0.5, 0.5], abs=1e-7)
    assert found.residual[0, 0] < 1e-12


@pytest.mark.parametrize("at", ["query", "points"])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_weights_of_mixtures_on_points_are_found(at, noise):
    zero = AlgorithmLearner(lambda prompts: torch.zeros_like(prompts.ys))
    learners = {**{name: algorithms.references(POOL)[name] for name in ("dmmse", "ridge")}, "zero": zero}
    models = [
        [mixed_points(learners.values(), row, noise, 10 * i + seed) for seed in range(3)]
        for i, row in enumerate(WEIGHTS.tolist())
    ]
    found = track_strategies(models, learners, POINTS, at=at, n_resamples=30, progress=False)
    assert (found.weights.mean(-1).T - WEIGHTS).abs().max() < (0.02 if noise else 1e-5)
    assert found.verdicts == ("zero", "mixture", "dmmse", "dmmse")
    covered = [
        abs(interval.mean - truth) <= interval.half_width + 1e-5
        for name, truths in zip(learners, WEIGHTS.T.tolist(), strict=True)
        for interval, truth in zip(found.curve(name), truths, strict=True)
    ]
    assert sum(covered) >= 11
    without = {"ridge": learners["ridge"], "zero": zero}
    assert track_strategies(models, without, POINTS, at=at, progress=False).verdicts[-1] == "none of these"


def test_distances_residuals_and_places_by_plain_sums():
    learners = {name: algorithms.references(CHAINS)[name] for name in ("pool", "bigram", "uniform")}
    model = mixed_tokens(learners.values(), (0.5, 0.2, 0.3), 0.4, 1)
    found = track_strategies([model], learners, TOKENS, n_resamples=2, progress=False)
    tables = [token_log_probabilities(each, TOKENS).exp().flatten(1).numpy() for each in (*learners.values(), model)]
    center = np.mean(tables[:3], axis=(0, 1))
    spread = max(np.square(each - center).sum(1).mean() for each in tables[:3])
    apart = [[np.square(a - b).sum(1).mean() / spread for a in tables] for b in tables]
    assert np.allclose(found.distances[:, 0, 0], apart[3][:3])
    mixture = sum(w * each for w, each in zip(found.weights[:, 0, 0].tolist(), tables[:3], strict=True))
    assert math.isclose(found.residual.item(), np.square(mixture - tables[3]).sum(1).mean() / spread, rel_tol=1e-9)
    for i, name in enumerate(learners):  # what each would give if it were the model, and no strategy
        others = {other: each for other, each in learners.items() if other != name}
        alone = track_strategies([learners[name]], others, TOKENS, n_resamples=2, progress=False)
        kept = [tables[j] for j in range(3) if j != i]
        own_center = np.mean(kept, axis=(0, 1))
        own_spread = max(np.square(each - own_center).sum(1).mean() for each in kept)
        assert math.isclose(found.left_out[i], alone.residual.item() * own_spread / spread, rel_tol=1e-8)
    places = torch.cat([found.learner_coordinates, found.coordinates.flatten(1)], 1).T.numpy()
    rows = np.stack(tables).reshape(4, -1)
    centered = (rows - rows.mean(0)) / math.sqrt(len(TOKENS))
    values = np.linalg.svd(centered, compute_uv=False) ** 2
    assert np.allclose(found.explained, values[:2] / values.sum())
    assert np.allclose(np.square(places).sum(0), values[:2])


def test_weights_of_1_and_residuals_of_0_are_no_shares():
    learners = {name: algorithms.references(CHAINS)[name] for name in ("pool", "uniform")}
    found = track_strategies([learners["pool"]], learners, TOKENS, n_resamples=2, progress=False)
    exact = replace(
        found, weights=torch.tensor([[[1.0] * 3], [[0.0] * 3]]), residual=torch.zeros(1, 3), errors=torch.zeros(3, 1)
    )
    for name, mean in (("pool", 1), ("uniform", 0), ("residual", 0)):
        (each,) = exact.curve(name)
        assert (each.mean, each.low, each.high) == (mean, mean, mean)


def test_mixtures_of_two_strategies_lie_on_a_line_at_their_weights():
    learners = {name: algorithms.references(POOL)[name] for name in ("dmmse", "ridge")}
    models = [mixed_points(learners.values(), (w, 1 - w), 0.0, 0) for w in (0.25, 0.5)]
    found = track_strategies(models, learners, POINTS, n_resamples=2, progress=False)
    first, second = found.learner_coordinates[0].tolist()
    assert math.isclose(found.explained[0], 1, rel_tol=1e-6)
    for w, place in zip((0.25, 0.5), found.coordinates[0, :, 0].tolist(), strict=True):
        assert math.isclose(place, w * first + (1 - w) * second, rel_tol=1e-5, abs_tol=1e-6)


def test_snapshots_of_a_checkpoint_are_tracked_for_each_seed_and_drawn(tmp_path):
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=4, n_ctx=12, n_layers=1, n_heads=1, d_model=8)
    models = [HookedTransformer(cfg, seed=seed).eval() for seed in range(2)]
    weights = {name: torch.stack([w, 2 * w]) for name, w in stack_models(models).items()}
    checkpoint = Checkpoint("small", models, {}, Snapshots((0, 50), weights))
    task = BallsAndUrns(d_vocab=4, n_ctx=12, n_urns=3)
    found = track_strategies(checkpoint, algorithms.references(task), task.sample(20, seed=0), n_resamples=5)
    assert found.weights.shape == (3, 2, 2)
    assert torch.allclose(found.weights.sum(0), torch.ones(2, 2).double())
    loaded = load_result(found.save(tmp_path / "tracked"))
    assert isinstance(loaded, StrategyTracking)
    assert torch.equal(loaded.weights, found.weights)
    frame = loaded.to_dataframe()
    assert frame["step"].tolist() == [0, 50]
    assert "residual" in str(found)
    assert ((frame["pool_low"] >= 0) & (frame["pool_high"] <= 1)).all()
    figure: Any = viz.plot(found)
    lines = [trace for trace in figure.data if trace.name == "pool"]
    assert np.allclose(lines[0].y, found.weights[0].mean(-1))
    assert [lines[1].x[0], lines[1].y[0]] == found.learner_coordinates[:, 0].tolist()
    assert {"pool", "unigram", "uniform", "model"} <= {trace.name for trace in figure.data}


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_nearest_mixtures_satisfy_the_conditions_of_a_minimum(k, seed):
    """Karush, Kuhn and Tucker's conditions, which are sufficient for a convex problem."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(k, k + 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(5, k + 2, generator=generator, dtype=torch.float64)
    gram, cross = rows @ rows.T, rows @ targets.T
    weights, distances = nearest_mixture(gram, cross, targets.square().sum(-1))
    assert weights.shape == (k, 5)
    assert weights.min() >= 0
    assert torch.allclose(weights.sum(0), torch.ones(5).double())
    slopes = gram @ weights - cross
    assert ((slopes - slopes.amin(0)) * weights).max() < 1e-8 * (1 + slopes.abs().max())
    assert torch.allclose(distances, (weights.T @ rows - targets).square().sum(-1))


class _Constant:
    def predict(self, prompts):
        return torch.full_like(prompts.ys[:, -1], torch.nan)


ON_POINTS: dict[str, Any] = {
    "prompts": LinearRegression(x_dim=2, n_context=4).sample(5, seed=0),
    "strategies": {name: AlgorithmLearner(getattr(algorithms, name)) for name in ("ols", "averaging")},
}


@pytest.mark.parametrize(("changes", "named"), [
    ({"strategies": {}}, "1 to 8 learners, got 0"),
    ({"strategies": {str(i): TokenAlgorithmLearner(algorithms.uniform_tokens) for i in range(9)}}, "got 9"),
    ({"prompts": TOKENS[:1]}, "two or more, got 1"),
    ({"strategies": {**(refs := algorithms.references(CHAINS)), "twin": refs["bigram"]}}, "'bigram' and 'twin'"),
    ({"strategies": {"uniform": refs["uniform"]}}, "must differ from a constant"),
    ({"checkpoint": {0: [refs["bigram"]], 1: [refs["bigram"]] * 2}}, r"as many seeds, got \[1, 2\]"),
    ({"threshold": 0.0}, "threshold"),
    ({**ON_POINTS, "checkpoint": {0: ON_POINTS["strategies"]["ols"], 7: _Constant()}}, "_Constant predicts NaN"),
    ({"checkpoint": [TokenAlgorithmLearner(algorithms.uniform_tokens, {"d_vocab": 5})]}, "as many outputs"),
    ({**ON_POINTS, "checkpoint": [_Constant()], "at": "points"}, "predict_prefixes"),
])  # fmt: skip
def test_bad_arguments_of_the_tracker_are_named(changes, named):
    arguments = {"checkpoint": [refs["bigram"]], "strategies": {"pool": refs["pool"], "bigram": refs["bigram"]}}
    with pytest.raises((ValueError, TypeError), match=named):
        track_strategies(**{**arguments, "prompts": TOKENS, "progress": False, **changes})


# ---- odds of memorising ----
SIZES, STEPS, GAPS = (2, 4, 8, 16, 32, 64), (10, 30, 100, 300, 1000), (1.2, 0.9, 0.6, 0.4, 0.25, 0.15)


def true_odds(g=0.3, alpha=0.6, k=0.2, beta=0.8):
    return torch.tensor(
        [[g * n**alpha * gap - k * size**beta for n in STEPS] for size, gap in zip(SIZES, GAPS, strict=True)],
        dtype=torch.float64,
    )


def test_the_parameters_of_the_odds_are_recovered_and_predict_held_out_pools():
    shares = true_odds().sigmoid()[..., None].expand(-1, -1, 3)
    fit = fit_strategy_odds(shares, SIZES, STEPS, GAPS, held_out=(8, 32))
    expected = (math.log(0.3), 0.6, math.log(0.2), 0.8)
    assert np.allclose(fit.parameters["loss and complexity"], expected, atol=2e-3)
    assert fit.scores["loss and complexity"].max() < 1e-6
    assert all(fit.scores[name].min() > 1e-3 for name in ("logistic", "constant"))
    assert torch.allclose(fit.predicted["loss and complexity"], true_odds().sigmoid(), atol=1e-3)
    assert "constant" in str(fit)


def test_baselines_and_scores_by_plain_loops():
    generator = torch.Generator().manual_seed(0)
    shares = (true_odds()[..., None] + torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)).sigmoid()
    shares[0, 1], shares[3, 2, 1] = math.nan, math.nan
    fit = fit_strategy_odds(shares, SIZES, STEPS, GAPS, held_out=(8,))
    kept = [(i, j, s) for i, j, s in itertools.product(range(6), range(5), range(3))
            if SIZES[i] != 8 and not shares[i, j, s].isnan()]  # fmt: skip
    mean = sum(shares[place].item() for place in kept) / len(kept)
    assert math.isclose(fit.parameters["constant"][0], math.log(mean / (1 - mean)), abs_tol=1e-5)
    slopes = np.zeros(3)  # of the cross entropy of logistic regression, 0 at its minimum
    a, b, c = fit.parameters["logistic"]
    for i, j, s in kept:
        features = np.array([1, math.log(SIZES[i]), math.log(STEPS[j])])
        share = 1 / (1 + math.exp(-features @ (a, b, c)))
        slopes += (share - shares[i, j, s].item()) * features / len(kept)
        assert math.isclose(fit.predicted["logistic"][i, j], share, rel_tol=1e-9)
    assert np.abs(slopes).max() < 1e-3
    for name, predicted in fit.predicted.items():
        for s in range(3):
            total = 0.0
            for j in range(5):
                t, p = shares[2, j, s].item(), predicted[2, j].item()
                total += t * math.log(t / p) + (1 - t) * math.log((1 - t) / (1 - p))
            assert math.isclose(fit.scores[name][s], total / 5, rel_tol=1e-9)
    assert fit.scores["loss and complexity"].mean() < fit.scores["constant"].mean()


def test_where_the_logistic_baseline_is_true_it_wins():
    odds = torch.tensor([[3 - 2 * math.log(d) + 0.5 * math.log(n) for n in STEPS] for d in SIZES], dtype=torch.float64)
    fit = fit_strategy_odds(odds.sigmoid()[..., None], SIZES, STEPS, (0.5,) * 6, held_out=(4, 16))
    assert np.allclose(fit.parameters["logistic"], (3, -2, 0.5), atol=1e-3)
    assert fit.scores["logistic"].item() < 1e-6 < fit.scores["loss and complexity"].item()


@pytest.mark.parametrize(("changes", "named"), [
    ({"pool_sizes": (2, 4)}, "for 2 pool sizes and 5 steps"),
    ({"loss_gaps": (1.0,)}, "1 loss gaps"),
    ({"pool_sizes": (2, 2, 8, 16, 32, 64)}, "different pool_sizes"),
    ({"held_out": ()}, "held_out must be some"),
    ({"held_out": (3,)}, "held_out must be some"),
    ({"held_out": SIZES}, "held_out must be some"),
    ({"shares": torch.full((6, 5, 1), 1.5)}, "from 0 to 1"),
    ({"shares": torch.full((6, 5, 1), torch.nan)}, "the others are NaN"),
    ({"loss_gaps": (-1.0, *GAPS[1:])}, "loss_gaps"),
    ({"held_out": SIZES[1:]}, "got 1 sizes and 5 steps"),
    ({"shares": torch.full((6, 1, 1), 0.5), "steps": (10,)}, "got 5 sizes and 1 steps"),
])  # fmt: skip
def test_bad_arguments_of_the_odds_are_named(changes, named):
    arguments = {"shares": true_odds().sigmoid()[..., None], "pool_sizes": SIZES, "steps": STEPS, "loss_gaps": GAPS}
    with pytest.raises(ValueError, match=named):
        fit_strategy_odds(**{**arguments, "held_out": (8,), **changes})
