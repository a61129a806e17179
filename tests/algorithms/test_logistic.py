import math

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms import nonlinear
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.prompts import Prompts
from mechicl.tasks import LogisticRegression

from .reference import over_prefixes

PROMPTS = LogisticRegression(x_dim=3, n_context=12).sample(4, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("weight_std", [0.3, 1.0, 30.0])
def test_the_mode_is_the_solution_of_scikit_learn(weight_std):
    linear_model = pytest.importorskip("sklearn.linear_model")

    def predict(xs, ys, query):
        if len(np.unique(ys)) < 2:
            return np.full(1, np.nan)  # scikit-learn needs both classes
        model = linear_model.LogisticRegression(C=weight_std**2, fit_intercept=False, tol=1e-10, max_iter=10_000)
        return model.fit(xs, ys[:, 0]).predict_proba(query[None])[:, 1] * 2 - 1

    expected = over_prefixes(PROMPTS, predict)
    predictions = algorithms.logistic(PROMPTS, weight_std=weight_std, posterior="mode").predictions[0].numpy()
    both = np.isfinite(expected)
    assert both.sum() > 30
    np.testing.assert_allclose(predictions[both], expected[both], rtol=0, atol=2e-4)


@pytest.mark.parametrize("weight_std", [0.1, 1.0, 100.0])
def test_at_the_mode_the_posterior_is_flat_on_every_prefix(weight_std):
    room = nonlinear  # for its private functions
    xs, signs = PROMPTS.xs, PROMPTS.ys[..., 0]
    earlier = torch.ones(13, 13, dtype=torch.float64).tril(-1)
    weights = room._mode(xs, signs, earlier, weight_std**-2)
    for t in range(13):
        w = weights[:, t].clone().requires_grad_()
        margins = signs[:, :t] * torch.einsum("npx,nx->np", xs[:, :t], w)
        cost = torch.nn.functional.softplus(-margins).sum() + w.square().sum() / (2 * weight_std**2)
        (gradient,) = torch.autograd.grad(cost, w)
        assert gradient.abs().max() < 1e-7 * (1 + w.abs().max())


def test_the_laplace_average_is_nearer_to_exact_bayes_than_the_mode():
    task = LogisticRegression(x_dim=1, n_context=6, weight_scale=2.0)
    prompts = task.sample(200, seed=1, dtype=torch.float64)
    grid = np.linspace(-16, 16, 4001)
    prior = -(grid**2) / 8

    def predict(xs, ys, query):
        logs = prior - np.logaddexp(0, -np.outer(grid, xs[:, 0] * ys[:, 0])).sum(1)
        density = np.exp(logs - logs.max())
        return np.atleast_1d((density * np.tanh(grid * query[0] / 2)).sum() / density.sum())

    exact = over_prefixes(prompts, predict)[:, 1:]
    errors = {
        kind: np.sqrt(((algorithms.logistic(prompts, weight_std=2.0, posterior=kind).predictions[0].numpy()[:, 1:]
                        - exact) ** 2).mean())
        for kind in ("mode", "laplace")
    }  # fmt: skip
    assert errors["laplace"] < 0.07
    assert errors["laplace"] < 0.8 * errors["mode"]


def test_references_beat_averaging_and_are_odd_in_the_labels():
    for labels in ("sampled", "sign"):
        task = LogisticRegression(x_dim=3, n_context=20, weight_scale=2.0, labels=labels)
        prompts = task.sample(1000, seed=0)
        references = algorithms.references(task)
        losses = {name: squared_errors(each, prompts, at="points").mean() for name, each in references.items()}
        assert list(losses) == ["laplace", "logistic regression", "averaging"][labels == "sign" :]
        assert list(losses.values()) == sorted(losses.values())
        best = next(iter(references.values()))
        flipped = best.predict(Prompts(prompts.xs, -prompts.ys))
        torch.testing.assert_close(flipped, -best.predict(prompts), rtol=1e-4, atol=1e-4)


def test_without_a_context_it_is_undecided_and_separable_labels_stay_finite():
    assert algorithms.logistic(PROMPTS.prefix(0)).predictions.abs().max() < 1e-12
    xs = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(1, 9, 1) + 0.01
    mode = algorithms.logistic(Prompts(xs, xs.sign()), weight_std=1e4, posterior="mode").predictions[0, 0]
    assert mode.isfinite().all()
    assert mode[-1] > 0.999


def test_targets_of_several_dimensions_the_query_alone_and_parts(monkeypatch):
    two = Prompts(PROMPTS.xs, torch.cat([PROMPTS.ys, -PROMPTS.ys], -1))
    learner = AlgorithmLearner(algorithms.logistic)
    whole = learner.predict_prefixes(two)
    torch.testing.assert_close(whole[..., :1], learner.predict_prefixes(PROMPTS))
    torch.testing.assert_close(whole[..., 0], -whole[..., 1])
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(learner.predict(two), whole[:, -1])
    assert learner.predict_prefixes(two[:0]).shape == (0, 13, 2)
    assert learner.predict(two.to(torch.float32)).dtype == torch.float32


@pytest.mark.usefixtures("unchecked_types")
def test_other_labels_and_settings_are_refused():
    with pytest.raises(ValueError, match=r"must be -1 or 1, got 0\.5"):
        algorithms.logistic(Prompts(PROMPTS.xs, PROMPTS.ys * 0.5))
    with pytest.raises(ValueError, match="posterior must be 'mode' or 'laplace', got 'mean'"):
        algorithms.logistic(PROMPTS, posterior="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_std must be positive"):
        algorithms.logistic(PROMPTS, weight_std=math.inf)
