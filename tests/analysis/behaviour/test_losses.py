"""Regrets, losses on shifted prompts, use of the context, and tuned descent, against plain loops."""

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mechicl
from mechicl import algorithms, constructions
from mechicl.analysis import align, measure_shifted_losses, regret
from mechicl.analysis.behaviour import tuned_clipped_descent, tuned_descent
from mechicl.analysis.behaviour.losses import are_classes
from mechicl.analysis.behaviour.tuned_descent import ClippedDescent
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner, squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval, ratio_interval
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


def test_the_best_learner_has_no_regret_and_no_other_less():
    result = regret(algorithms.references(NOISY)["bayes"], NOISY, n_prompts=2000)
    assert result.regret().abs().max() == 0
    assert result.mean("ols").low > 0
    few = regret(AlgorithmLearner(nothing), NOISY, references="bayes", n_prompts=4)
    assert list(few.losses) == [few.learner, "bayes"]
    other = regret(AlgorithmLearner(nothing), NOISY, references=["ols", "bayes"], n_prompts=100)
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
    with mechicl.settings(memory=2e6):
        result = regret(model, MarkovChains(3, 9), also={"untrained": HookedTransformer(cfg, seed=1)}, n_prompts=64)
    whole = regret(model, MarkovChains(3, 9), n_prompts=64)
    assert list(result.losses) == ["model", "bigram", "unigram", "uniform", "untrained"]
    assert torch.allclose(result.regret(), whole.regret(), atol=1e-6)


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


def test_ratio_is_that_of_means_over_the_same_prompts():
    result = measure_shifted_losses({"gd": STEP, "half": HALF}, SMALL, [1.0, 1.5], n_prompts=200)
    expected = [ratio_interval(result.squared_errors[1, i], result.squared_errors[0, i]) for i in range(2)]
    assert result.ratio("half", "gd") == expected
    assert [each.mean for each in expected] == pytest.approx((result.mean()[1] / result.mean()[0]).tolist())


# ---- tuned descent ----
THREE_INPUTS = LinearRegression(x_dim=3, n_context=4)


def in_a_plain_loop(prompts, sizes, gammas, clip):
    predicted = []
    for xs, ys in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True):
        tokens = np.concatenate([xs, ys], axis=1)
        tokens[-1, -1] = 0.0
        for a, gamma in zip(sizes, gammas, strict=True):
            rates = np.array([gamma] * xs.shape[1] + [a])
            moved = [token - rates * sum((token[:-1] @ t[:-1]) * t for t in tokens[:-1]) for token in tokens]
            tokens = np.clip(np.stack(moved), -clip, clip)
        predicted.append([-tokens[-1, -1]])
    return torch.tensor(predicted, dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=4),
    st.floats(0.05, 20),
)
def test_clipped_descent_is_a_loop_on_tokens(seed, parameters, clip):
    prompts = THREE_INPUTS.sample(3, seed=seed, dtype=torch.float64)
    sizes, gammas = zip(*parameters, strict=True)
    learner = ClippedDescent(sizes, gammas, clip, {})
    torch.testing.assert_close(learner.predict(prompts), in_a_plain_loop(prompts, sizes, gammas, clip))


def test_clipped_descent_is_the_construction_with_a_clip():
    prompts = LinearRegression(x_dim=3, n_context=4, input_scale=4.0).sample(20, seed=0, dtype=torch.float64)
    made = constructions.gd_plus_plus(x_dim=3, n_context=4, step_size=[0.5, 1.0], gamma=[0.2, 0.1], steps=2)
    layers = HookedTransformer(made.cfg.replace(token_clip=2.0))
    layers.load_state_dict(made.state_dict())
    learner = ClippedDescent([0.5, 1.0], [0.2, 0.1], 2.0, {})
    assert (learner.predict(prompts).abs() == 2).any()
    torch.testing.assert_close(learner.predict(prompts), layers.double().predict(prompts))
    assert align(layers.double(), learner, prompts).sensitivity_cosine.nan_to_num(1).min() > 1 - 1e-6
    torch.testing.assert_close(learner.predict_prefixes(prompts)[:, -1], learner.predict(prompts))


@pytest.mark.parametrize("per_step", [False, True])
def test_a_clip_that_nothing_reaches_changes_nothing(per_step):
    prompts = LinearRegression().sample(600, seed=1, dtype=torch.float64)
    with_clip = tuned_clipped_descent(prompts, 2, 1e6, gamma=True, per_step=per_step)
    without = tuned_descent(prompts, 2, gamma=True, per_step=per_step)
    assert squared_errors(with_clip, prompts).mean() <= squared_errors(without, prompts).mean() * 1.01
    assert set(with_clip.hyperparameters) == set(without.hyperparameters)
    plain, expected = tuned_clipped_descent(prompts, 1, 1e6), tuned_descent(prompts, 1)
    a, b = (learner.hyperparameters["step_size"] for learner in (plain, expected))
    assert a == pytest.approx(b, rel=1e-2)
    assert plain.gammas == [0.0]


def error_of(logs, unit, clip, prompts):
    values = (unit * np.exp(logs)).tolist()
    return squared_errors(ClippedDescent(values[:5], [*values[5:], 0.0], clip, {}), prompts).mean().item()


def test_a_first_step_that_is_negative_without_a_clip_does_not_end_the_search_with_one():
    prompts = LinearRegression().sample(128, seed=3, dtype=torch.float64)
    unclipped = list(tuned_descent(prompts, 5, gamma=True, per_step=True).hyperparameters.values())
    assert unclipped[0] < 0
    args = np.abs(unclipped), 10.0, prompts
    simple = scipy.optimize.minimize(error_of, np.zeros(9), args, method="BFGS", options={"maxiter": 30})
    found = squared_errors(tuned_clipped_descent(prompts, 5, 10.0, gamma=True, per_step=True), prompts).mean()
    assert found < simple.fun * 1.02


# with more parameters, guards against explosion decide
@pytest.mark.parametrize(("steps", "per_step"), [(2, True), (5, False)])
def test_no_further_search_improves_tuned_descent(steps, per_step):
    prompts = LinearRegression().sample(512, seed=1, dtype=torch.float64)
    values = np.array([*tuned_descent(prompts, steps, gamma=True, per_step=per_step).hyperparameters.values()])

    def error(logs):
        sizes, gammas = np.split(values * np.exp(logs), [steps if per_step else 1])
        sizes, gammas = (np.resize(each, n).tolist() for each, n in ((sizes, steps), (gammas, steps - 1)))
        return squared_errors(ClippedDescent(sizes, [*gammas, 0.0], math.inf, {}), prompts).mean().item()

    start = np.zeros(len(values))
    further = scipy.optimize.minimize(error, start, method="BFGS", options={"maxiter": 100})
    assert error(start) < further.fun * 1.0001


def test_tuned_deep_descent_does_not_explode_on_contexts_that_it_was_not_tuned_on():
    task = LinearRegression()
    fresh = task.sample(10_000, seed=99, dtype=torch.float64)
    plain = tuned_descent(task.sample(2048, seed=5, dtype=torch.float64), 3)
    deep = tuned_descent(task.sample(2048, seed=5, dtype=torch.float64), 3, gamma=True, per_step=True)
    losses = [(each.predict(fresh) - fresh.query.ys).square().mean().item() for each in (deep, plain)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize(("ys", "classes"), [
    ([[1.0], [-1.0]], True), ([[1.0], [0.5]], False), ([[1.0, 0.0], [0.0, 1.0]], True),
    ([[1.0, 0.0], [0.0, 0.0]], False), ([[1.0, 1.0], [0.0, 1.0]], False), ([[0.25, 0.75], [0.0, 1.0]], False),
])  # fmt: skip
def test_classes_are_signs_or_one_hot(ys, classes):
    assert are_classes(torch.tensor(ys)) is classes
