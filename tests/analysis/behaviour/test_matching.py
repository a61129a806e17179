"""Sensitivities, similarities, induced weights, best matches, growth and ranked families where the answer is known."""

import itertools
import math

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens, Match, align, match
from mechicl.analysis.behaviour import induced_weights, rank_families, regressed_weights, sensitivities
from mechicl.analysis.behaviour.alignment import (
    similarity_by_prefix,
    similarity_of_errors,
    similarity_of_weights,
)
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.analysis.behaviour.matching import STEP_COPIES, _weighted_mean
from mechicl.base.settings import settings
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Trajectory
from mechicl.learners.learners import bytes_per_prompt
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.analysis.behaviour.conftest import Bare


# ---- alignment ----
def prompts(n: int = 5, **fields) -> Prompts:
    return LinearRegression(x_dim=3, n_context=4).replace(**fields).sample(n, seed=3, dtype=torch.float64)


def gd_weights(xs: torch.Tensor, ys: torch.Tensor, steps: int, step_size: float) -> torch.Tensor:
    """The linear model that gradient descent learns from one context, by a plain loop."""
    weights = torch.zeros(xs.shape[1], ys.shape[1], dtype=torch.float64)
    for _ in range(steps):
        weights = weights - step_size * sum(torch.outer(x, x @ weights - y) for x, y in zip(xs, ys, strict=True))
    return weights


@pytest.mark.parametrize(("y_dim", "steps"), [(1, 4), (2, 1)])
def test_sensitivity_of_gradient_descent_is_the_model_that_it_learned(y_dim: int, steps: int):
    p = prompts(y_dim=y_dim)
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": [steps], "step_size": 0.3})
    construction = constructions.gradient_descent(x_dim=3, y_dim=y_dim, n_context=4, step_size=0.3, steps=steps)
    for measured in (sensitivities(learner, p), sensitivities(construction, p)):
        for i in range(len(p)):
            expected = gd_weights(p.context.xs[i], p.context.ys[i], steps, 0.3).T
            torch.testing.assert_close(measured[i], expected, rtol=1e-10, atol=1e-12)


def test_sensitivity_of_a_nonlinear_model_matches_finite_differences():
    cfg = TransformerConfig(x_dim=3, n_context=4, attention="softmax", d_model=8, n_heads=2, d_mlp=16,
                            normalization_type="LN", dtype="float64", initializer_range=0.5)  # fmt: skip
    model, p, h = HookedTransformer(cfg), prompts(), 1e-6
    exact = sensitivities(model, p)
    for j in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[j] = h
        high, low = (model.predict(p.with_query(p.query.xs + s)) for s in (step, -step))
        torch.testing.assert_close(exact[:, :, j], ((high - low) / (2 * h)).detach(), rtol=1e-6, atol=1e-8)


def test_opposite_learners_have_cosine_minus_one_and_their_distances():
    p = prompts()
    plus = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})
    minus = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": -0.2})
    with settings(memory=1e5):
        result = align(plus, minus, p)
    weights = torch.stack([gd_weights(x, y, 1, 0.2)[:, 0] for x, y in zip(*p.context, strict=True)])
    torch.testing.assert_close(result.sensitivity_cosine, -torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(result.sensitivity_distance, 2 * weights.norm(dim=1))
    torch.testing.assert_close(result.prediction_distance, 2 * (weights * p.query.xs).sum(1).abs())


def test_without_context_the_cosine_is_nan():
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})
    result = align(learner, learner, prompts(n_context=0))
    assert result.sensitivity_cosine.isnan().all()
    assert result.prediction_distance.max() == 0


def test_alignment_does_not_change_a_model_and_splits_prompts_to_fit_memory():
    model = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, initializer_range=0.3)).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    sizes = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    p = prompts().to(torch.float32)
    with settings(memory=2.5 * 8 * model.bytes_per_prompt(p)):
        result = align(model, model, p)
    assert sizes == [2, 2, 2, 2, 1, 1]
    assert not any(values.requires_grad for values in result.samples().values())  # no batch's graph is kept
    assert result.prediction_distance.max() == 0
    assert result.sensitivity_cosine.allclose(torch.ones(5, dtype=torch.float64))
    assert model.training
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


NOISY = LinearRegression(x_dim=3, n_context=5, inputs="gaussian", noise_std=0.3)
SIZES = pytest.mark.parametrize(("y_dim", "n_context"), [(1, 1), (1, 6), (2, 4)])


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@SIZES
def test_similarity_of_errors_is_a_cosine_over_points_two_to_the_last(y_dim, n_context):
    prompts = NOISY.replace(y_dim=y_dim, n_context=n_context).sample(3, seed=0, dtype=torch.float64)
    a = algorithms.newton(prompts, [0, 2])
    b = algorithms.gradient_descent(prompts, [1, 4, 9], step_size=0.02)
    measured = similarity_of_errors(a, b, prompts)
    assert measured.shape == (2, 3, 3)
    errors_a, errors_b = ((t.predictions - prompts.ys)[:, :, 1:].flatten(2).numpy() for t in (a, b))
    for i, j, p in itertools.product(range(2), range(3), range(3)):
        assert measured[i, j, p].item() == pytest.approx(cosine_of(errors_a[i, p], errors_b[j, p]), abs=1e-9)


@SIZES
def test_similarity_of_weights_is_a_cosine_for_each_number_of_points(y_dim, n_context):
    prompts = NOISY.replace(y_dim=y_dim, n_context=n_context).sample(2, seed=1, dtype=torch.float64)
    a = algorithms.newton(prompts, [1, 3], with_weights=True)
    b = algorithms.ridge(prompts, penalty=0.5, with_weights=True)
    measured = similarity_of_weights(a, b)
    assert measured.shape == (2, 1, 2, n_context)
    assert a.weights is not None
    assert b.weights is not None
    for i, p, t in itertools.product(range(2), range(2), range(1, n_context + 1)):
        expected = cosine_of(a.weights[i, p, t].flatten().numpy(), b.weights[0, p, t].flatten().numpy())
        assert measured[i, 0, p, t - 1].item() == pytest.approx(expected, abs=1e-9)


FIVE_POINTS = LinearRegression(x_dim=3, n_context=5, inputs="gaussian")
FOUR_PROMPTS = FIVE_POINTS.sample(4, seed=0, dtype=torch.float64)
QUERIES = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CFG = TransformerConfig(
    x_dim=3, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24, attention="softmax",
    normalization_type="LN", initializer_range=0.4, dtype="float64",
)  # fmt: skip


def test_induced_weights_of_least_squares_are_numpys_solution():
    weights = induced_weights(AlgorithmLearner(algorithms.ols), FOUR_PROMPTS)
    for p in range(4):
        for t in range(6):
            expected = np.linalg.pinv(FOUR_PROMPTS.xs[p, :t].numpy()) @ FOUR_PROMPTS.ys[p, :t].numpy()
            np.testing.assert_allclose(weights[0, p, t].numpy(), expected, atol=1e-9)


def test_regressed_weights_of_a_linear_learner_are_its_induced_weights():
    newton = AlgorithmLearner(algorithms.newton, {"steps": [1, 4]})
    exact = induced_weights(newton, FOUR_PROMPTS)
    torch.testing.assert_close(regressed_weights(newton, FOUR_PROMPTS, QUERIES), exact, atol=1e-8, rtol=1e-8)


def test_induced_weights_of_a_model_are_those_of_its_last_layer():
    model = HookedTransformer(CFG, seed=1).eval()
    whole = induced_weights(model, FOUR_PROMPTS)
    by_layer = induced_weights(Lens(model), FOUR_PROMPTS)
    assert whole.shape == (1, 4, 6, 3, 1)
    torch.testing.assert_close(whole[0], by_layer[-1], atol=1e-9, rtol=1e-7)


# ---- matches ----
PROMPTS = LinearRegression(x_dim=4, n_context=9, inputs="gaussian").sample(60, seed=0, dtype=torch.float64)
NEWTON = AlgorithmLearner(algorithms.newton, {"steps": list(range(1, 13))})


def _as_layers(steps: list[int]) -> Trajectory:
    """A model whose layers run these numbers of Newton iterations."""
    newton = algorithms.newton(PROMPTS, steps, with_weights=True)
    return Trajectory(tuple(range(1, len(steps) + 1)), newton.predictions, "layer", newton.weights)


@pytest.mark.parametrize("similarity", ["errors", "weights"])
def test_layers_that_run_newton_match_their_own_iterations(similarity):
    with settings(memory=STEP_COPIES * 2 * bytes_per_prompt(NEWTON, PROMPTS) * 17):
        result = match(_as_layers([2, 4, 6, 8, 10]), NEWTON, PROMPTS, similarity=similarity)
    best = result.best()
    assert [b.column for b in best] == [2, 4, 6, 8, 10]
    assert [(b.low, b.high) for b in best] == [(2, 2), (4, 4), (6, 6), (8, 8), (10, 10)]
    assert all(b.similarity.mean == pytest.approx(1) for b in best)
    assert not any(b.at_edge for b in best)
    growth = result.growth()
    assert growth.slope.mean == pytest.approx(2, abs=1e-6)
    assert growth.slope.low == pytest.approx(2, abs=1e-6)  # every resample chooses the same steps
    assert growth.better == "linear"
    assert growth.linear_share == 1


def test_a_best_match_at_the_edge_is_marked_and_left_out_of_the_growth():
    result = match(_as_layers([1, 3, 5, 7, 12]), NEWTON, PROMPTS)
    assert [b.at_edge for b in result.best()] == [True, False, False, False, True]
    assert result.growth_rows() == [2, 3, 4]
    with pytest.raises(ValueError, match="at least 5 different layers"):
        result.growth()
    assert result.growth(rows=[5, 1, 2, 3, 4]).columns == (1, 3, 5, 7, 12)


def test_edges_are_those_of_the_values_whatever_their_order():
    values = torch.tensor([[[0.1], [0.9], [0.2]], [[0.9], [0.1], [0.2]]], dtype=torch.float64).expand(-1, -1, 3)
    assert [b.at_edge for b in Match("a", "b", (1, 2), (4, 1, 9), values, "errors").best()] == [True, False]


def test_growth_ends_where_nothing_grows_any_more():
    result = match(_as_layers([1, 2, 2, 4, 6, 8, 10, 10, 10]), NEWTON, PROMPTS)
    assert result.growth_rows() == [3, 4, 5, 6, 7]


def test_means_are_over_common_prompts_with_a_similarity():
    values = torch.full((1, 2, 10), 0.99, dtype=torch.float64)
    values[0, 0] = math.nan
    values[0, 0, 0], values[0, 1, 0] = 1.0, 0.999
    mean = Match("a", "b", (1,), (1, 2), values, "errors").mean()
    torch.testing.assert_close(mean, torch.tensor([[1.0, 0.999]], dtype=torch.float64))  # on the one common prompt
    never = Match("a", "b", (1,), (1, 2), torch.full((1, 2, 10), math.nan, dtype=torch.float64), "errors").best()[0]
    assert math.isnan(never.column)
    some = torch.tensor([[[1.0, math.nan, 0.5], [0.6, 0.6, 0.6]]], dtype=torch.float64)
    result = Match("a", "b", (0,), (1, 2), some, "errors")
    assert result.mean()[0, 0].item() == pytest.approx(0.75)
    assert result.best()[0].similarity.n == 2


def test_means_of_all_rows_at_once_are_those_of_each_row():
    values = torch.rand(3, 4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[1, 2] = math.nan  # nowhere defined
    counts = torch.arange(20.0).view(2, 10)
    left_out = torch.zeros(3, 4, 1, dtype=torch.float64)
    left_out[0], left_out[1, 2] = math.nan, math.nan  # of a prompt that was never drawn
    each_row = _weighted_mean(torch.cat([values, left_out], -1), torch.cat([counts, torch.zeros(2, 1)], -1))
    torch.testing.assert_close(_weighted_mean(values, counts), each_row, equal_nan=True)


def test_a_family_over_another_hyperparameter_and_a_learner_without_steps_are_matched_too():
    penalties = AlgorithmFamily(algorithms.ridge, "penalty", (0.01, 0.3, 5.0))
    steps = AlgorithmLearner(algorithms.ridge, {"penalty": 0.3})

    for similarity in ("errors", "weights"):
        result = match(steps, penalties, PROMPTS, similarity=similarity)
        assert result.best()[0].column == 0.3
        assert result.columns == (0.01, 0.3, 5.0)
    assert match(Bare(steps), penalties, PROMPTS).best()[0].column == 0.3
    with pytest.raises(ValueError, match="not linear in the query"):
        match(AlgorithmLearner(algorithms.nearest_neighbours), penalties, PROMPTS, similarity="weights")


def test_a_model_on_paired_prompts_is_compared_on_the_query():
    construction = constructions.gradient_descent(x_dim=4, n_context=9, step_size=0.02, steps=3)
    descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": [1, 2, 3, 4], "step_size": 0.02})
    result = match(Lens(construction), descent, PROMPTS, similarity="weights")
    assert [b.column for b in result.best()[1:]] == [1, 2, 3]


@pytest.mark.parametrize(("slope", "start"), [(0.6, 1.0), (2.3, 4.0), (5.7, 2.5)])
def test_linear_and_exponential_growth_are_found(slope, start):
    growth = fit_growth(list(range(3, 10)), [max(1, round(start + slope * i)) for i in range(7)])
    assert growth.slope.mean == pytest.approx(slope, rel=0.35, abs=0.15)
    growth = fit_growth(list(range(2, 9)), [max(1, round(2 ** (1 + (slope + 1) / 2 * i))) for i in range(7)])
    assert growth.doubling.mean == pytest.approx((slope + 1) / 2, rel=0.1)
    assert growth.better == "exponential"


def test_the_exponential_fit_is_a_regression_of_the_logarithm():
    rows, columns = [1, 2, 3, 4, 5], [2, 3, 9, 14, 40]
    growth = fit_growth(rows, columns)
    slope, intercept = np.polyfit(rows, np.log2(columns), 1)
    np.testing.assert_allclose(np.log2(growth.exponential_fit), slope * np.array(rows) + intercept, atol=1e-9)
    residuals = np.log(columns) - np.log(growth.exponential_fit)
    aic = 5 * math.log(residuals @ residuals / 5) + 6 + 24 / 1
    assert growth.exponential_aic == pytest.approx(aic, rel=1e-9)


FEWER = LinearRegression(x_dim=3, n_context=8, inputs="gaussian").sample(60, seed=0)
LONG_NEWTON = AlgorithmLearner(algorithms.newton, {"steps": tuple(range(1, 13))})
FAMILIES = {
    "Newton": LONG_NEWTON,
    "ridge path": AlgorithmLearner(algorithms.ridge_path, {"steps": tuple(range(12))}),
    "Newton again": LONG_NEWTON,
}


def ranked(learner, families=FAMILIES, prompts=FEWER):
    return rank_families({name: match(learner, each, prompts) for name, each in families.items()})


def test_newtons_iterations_are_nearest_to_newton_and_as_near_to_its_double():
    ranking = ranked(algorithms.newton(FEWER, [3, 6]))
    assert ranking.rows == (3, 6)
    assert ranking.nearest(6)[0] == "Newton"
    assert set(ranking.nearest(6)) == {"Newton", "Newton again"}
    assert ranking.steps[0] == (3, 6)
    assert all(each.low > 0 for each in ranking.minus("Newton", "ridge path"))
    assert all(each.mean == 0 for each in ranking.minus("Newton", "Newton again"))


def test_steps_are_chosen_on_other_prompts_than_those_that_measure():
    ranking = ranked(algorithms.ridge_path(FEWER, [2, 5]))
    matched = match(algorithms.ridge_path(FEWER, [2, 5]), LONG_NEWTON, FEWER)
    means = matched.similarities[:, :, ::2].mean(-1)
    for row in (0, 1):
        best = int(means[row].argmax())
        torch.testing.assert_close(ranking.similarities[0, row], matched.similarities[row, best, 1::2])
        assert ranking.steps[0][row] == matched.columns[best]


# ---- errors, every number of points counted equally ----
def erring(p: Prompts, errors: torch.Tensor, name: str = "a") -> Trajectory:
    """A learner with these errors [prompt point] for all numbers of points."""
    return Trajectory((1,), (p.ys + errors[..., None])[None], name)


def test_normalised_similarity_is_the_mean_over_prefixes_of_the_cosine_over_prompts():
    p = prompts(40, y_dim=2)
    a = algorithms.gradient_descent(p, [1, 4], step_size=0.3)
    b = algorithms.newton(p, [0, 2, 3])
    values = similarity_by_prefix(a, b, p)
    for i, j in itertools.product(range(2), range(3)):
        errors = ((each.predictions[k] - p.ys).numpy() for each, k in ((a, i), (b, j)))
        pairs = [[each[:, n].flatten() for n in range(1, 5)] for each in errors]
        cosines = [cosine_of(first, second) for first, second in zip(*pairs, strict=True)]
        assert values[i, j].mean().item() == pytest.approx(np.mean(cosines))
    measured = match(a, b, p, similarity="normalised errors", progress=False)
    torch.testing.assert_close(measured.similarities, values)
    published = match(a, b, p, progress=False)
    torch.testing.assert_close(published.similarities, similarity_of_errors(a, b, p))


def test_only_the_normalised_similarity_sees_errors_that_are_exchanged_where_they_are_small():
    p = LinearRegression(x_dim=3, n_context=12).sample(400, seed=0, dtype=torch.float64)
    errors = torch.randn(400, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors[:, 4:] *= 1e-3  # more points than dimensions
    exchanged = errors.clone()
    exchanged[:, 4:] = errors.roll(1, 0)[:, 4:]
    pair = erring(p, errors), erring(p, exchanged, "b")
    assert match(*pair, p, progress=False).mean().item() > 0.9999
    assert match(*pair, p, similarity="normalised errors", progress=False).mean().item() == pytest.approx(
        3 / 12, abs=0.05
    )
    same = match(pair[0], pair[0], p, similarity="normalised errors", progress=False)
    assert same.mean().item() == pytest.approx(1)


def test_prefixes_without_errors_are_left_out_if_neither_learner_errs_and_count_zero_if_one_does():
    p = LinearRegression(x_dim=3, n_context=8).sample(50, seed=0, dtype=torch.float64)
    exact, ridge = algorithms.ols(p), algorithms.ridge(p, penalty=0.1)
    alone = match(exact, exact, p, similarity="normalised errors", progress=False)
    assert alone.mean().item() == pytest.approx(1)
    mixed = match(exact, ridge, p, similarity="normalised errors", progress=False)
    errors = [(each.predictions[0] - p.ys)[:, :, 0].T.numpy() for each in (ridge, exact)]
    cosines = [cosine_of(errors[0][n], errors[1][n]) for n in (1, 2)]
    assert mixed.mean().item() == pytest.approx(sum(cosines) / 8)  # 0 after three points and more
