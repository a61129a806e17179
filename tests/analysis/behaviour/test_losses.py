"""Regrets, and losses on shifted prompts, against plain loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import algorithms, viz
from mechicl.analysis import measure_shifted_losses, regret
from mechicl.analysis.behaviour import Regret
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval, load_result
from mechicl.tasks import GaussianClusters, LinearRegression, MarkovChains, Parities

NOISY = LinearRegression(x_dim=2, n_context=5, noise_std=0.5)


def nothing(prompts):
    return torch.zeros_like(prompts.ys)


def test_regret_on_points_is_that_of_a_plain_loop():
    zero = AlgorithmLearner(nothing)
    result = regret(zero, NOISY, n_prompts=50, seed=3)
    prompts = NOISY.sample(50, seed=3, dtype=torch.float64)
    assert result.points == (0, 1, 2, 3, 4, 5)
    assert result.loss == "squared error"
    for i in range(50):
        xs, ys = prompts.xs[i], prompts.ys[i, :, 0]
        for t in range(6):
            x, y = xs[:t], ys[:t]
            weights = torch.linalg.solve(x.T @ x + 0.25 * torch.eye(2).double(), x.T @ y)
            best = (ys[t] - xs[t] @ weights) ** 2
            assert math.isclose(result.regret()[t, i].item(), ys[t] ** 2 - best, abs_tol=1e-9)
    assert str(result.curve()[2]) == str(interval(result.regret()[2]))
    assert str(result.mean()) == str(interval(result.regret().mean(0)))
    assert str(result.last()) == str(interval(result.regret()[-1]))


def test_the_best_learner_has_no_regret_and_no_other_less():
    result = regret(algorithms.references(NOISY)["bayes"], NOISY, n_prompts=2000)
    assert result.regret().abs().max() == 0
    assert result.mean("ols").low > 0
    few = regret(AlgorithmLearner(nothing), NOISY, with_references=False, n_prompts=4)
    assert list(few.losses) == [few.learner, "bayes"]
    other = regret(AlgorithmLearner(nothing), NOISY, reference="ols", n_prompts=100)
    assert torch.equal(other.regret("ols"), torch.zeros(6, 100).double())
    assert (other.regret("bayes").mean() < 0).all()


def test_on_tokens_it_is_the_divergence_on_average():
    task = MarkovChains(d_vocab=3, n_ctx=20)
    uniform = TokenAlgorithmLearner(algorithms.uniform_tokens, {"d_vocab": 3})
    result = regret(uniform, task, n_prompts=300, seed=1)
    assert list(result.losses) == ["uniform_tokens(d_vocab=3)", "bigram", "unigram", "uniform"]
    assert (result.loss, result.points) == ("nats", tuple(range(1, 21)))
    assert torch.equal(result.regret(), result.regret("uniform"))
    sequences = task.sample(300, seed=1)
    logs = algorithms.bigram_bayes(sequences, d_vocab=3)
    for t in (0, 7, 19):
        expected = [math.log(3) + logs[i, t, sequences.ids[i, t + 1]].item() for i in range(300)]
        assert torch.allclose(result.regret()[t], torch.tensor(expected).double())
    last = regret(uniform, task, n_prompts=300, seed=1, at="query")
    assert last.points == (20,)
    assert torch.equal(last.regret()[0], result.regret()[-1])


def test_models_with_an_untrained_control():
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=9, n_layers=1, n_heads=1, d_model=8, d_head=4,
                            attention="softmax")  # fmt: skip
    model = HookedTransformer(cfg)
    result = regret(model, MarkovChains(3, 9), untrained=HookedTransformer(cfg, seed=1), n_prompts=64, memory=2e6)
    whole = regret(model, MarkovChains(3, 9), n_prompts=64)
    assert list(result.losses) == ["model", "bigram", "unigram", "uniform", "untrained"]
    assert torch.allclose(result.regret(), whole.regret(), atol=1e-6)
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=5, prompt_format="interleaved", d_model=8))
    assert regret(points, NOISY, n_prompts=20, memory=1e5).regret().shape == (6, 20)


def test_losses_of_classes():
    task = Parities(x_dim=4, n_context=3, degree=None)
    exact, zero = algorithms.references(task)["elimination over GF(2)"], AlgorithmLearner(nothing)
    errors = regret(zero, task, loss="errors", n_prompts=200)
    assert (errors.losses[errors.learner] == 0.5).all()
    assert set(errors.losses["elimination over GF(2)"].unique().tolist()) <= {0.0, 0.5}
    logs = regret(zero, task, loss="log loss", n_prompts=200)
    assert torch.allclose(logs.losses[logs.learner], torch.full((4, 200), math.log(2)).double())
    known = logs.losses["elimination over GF(2)"]
    assert torch.allclose(known.unique(), torch.tensor([-math.log(0.999), math.log(2)]).double())
    assert regret(exact, task, loss="log loss", n_prompts=20).mean().mean == 0

    clusters = GaussianClusters(x_dim=3, n_context=4, n_classes=8, n_labels=4, classes="new")
    flat = AlgorithmLearner(lambda prompts: torch.full_like(prompts.ys, 0.25))
    logs = regret(flat, clusters, loss="log loss", n_prompts=50, at="query")
    assert torch.allclose(logs.losses[logs.learner], torch.full((1, 50), math.log(4)).double())
    errors = regret(flat, clusters, loss="errors", n_prompts=50, at="query")
    assert (errors.losses[errors.learner] == 0.75).all()


def test_the_table_the_text_the_file_and_the_picture(tmp_path):
    result = regret(AlgorithmLearner(nothing), NOISY, n_prompts=50)
    table = result.to_dataframe()
    assert list(table.columns) == ["learner", "points", "loss", "regret", "low", "high"]
    assert len(table) == 6 * 3
    assert table.regret[0] == pytest.approx(result.curve()[0].mean)
    assert "squared error" in str(result)
    assert "after 5" in str(result)
    loaded = load_result(result.save(tmp_path / "regret"))
    assert isinstance(loaded, Regret)
    assert torch.equal(loaded.regret("ols"), result.regret("ols"))
    figure: Any = viz.plot(result)
    drawn = {trace.name: trace for trace in figure.data if trace.name}
    assert list(drawn[result.learner].y) == pytest.approx([each.mean for each in result.curve()])
    assert set(drawn) >= {result.learner, "ols"}
    assert "bayes" in figure.layout.title.text


def test_further_learners():
    zero = AlgorithmLearner(nothing)
    result = regret(zero, NOISY, also={"nothing": zero}, n_prompts=10)
    assert torch.equal(result.regret("nothing"), result.regret())


SMALL = LinearRegression(x_dim=3, n_context=4)
STEP = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})
HALF = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})


@pytest.mark.parametrize("scaled", ["input_scale", "weight_scale"])
def test_losses_are_those_of_prompts_scaled_by_hand(scaled):
    result = measure_shifted_losses({"gd": STEP}, SMALL, [0.5, 2.0], scaled=scaled, n_prompts=30, seed=4)
    base = SMALL.sample(30, seed=4)
    for i, scale in enumerate((0.5, 2.0)):
        xs, ys = base.xs.double().numpy(), base.ys.double().numpy() * scale
        xs = xs * scale if scaled == "input_scale" else xs
        for j in range(30):
            prediction = 0.4 * sum((xs[j, -1] @ xs[j, t]) * ys[j, t, 0] for t in range(4))
            expected = (prediction - ys[j, -1, 0]) ** 2
            np.testing.assert_allclose(result.squared_errors[0, i, j], expected, rtol=2e-5, atol=1e-7)


def test_ratio_and_its_interval():
    result = measure_shifted_losses({"gd": STEP, "half": HALF}, SMALL, [1.0, 1.5], n_prompts=2000)
    means = result.mean()
    for i, ratio in enumerate(result.ratio("half", "gd")):
        assert ratio.mean == pytest.approx((means[1, i] / means[0, i]).item())
        a, b = (result.squared_errors[k, i].numpy() for k in (1, 0))
        generator = np.random.default_rng(0)
        draws = [generator.integers(0, 2000, 2000) for _ in range(400)]
        bootstrap = np.std([a[d].mean() / b[d].mean() for d in draws])
        assert ratio.half_width == pytest.approx(1.96 * bootstrap, rel=0.2)
