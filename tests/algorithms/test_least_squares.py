"""Least squares, and the spectra and warnings of all spectral algorithms."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.spectra import PrefixSpectra
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import (
    assert_same,
    awkward,
    awkward_prompts,
    make_prompts,
    over_prefixes,
)

# ---- least squares ----
AWKWARD, EYE = awkward_prompts(), np.eye(4)


def lstsq(xs, ys, query):
    return query @ np.linalg.lstsq(xs, ys, rcond=1e-7)[0]


def solve(penalty):
    def predict(xs, ys, query):
        return query @ np.linalg.solve(xs.T @ xs + penalty * np.eye(query.size), xs.T @ ys)

    return predict


@awkward
def test_ols_is_the_least_squares_solution_of_minimum_norm_on_every_prefix(prompts):
    # the eigenvalues of XᵀX carry the square of X's condition number, here up to 1e5
    tolerance = 1e-3 if prompts.xs.equal(AWKWARD["eigenvalues from 1 to 1e-10"].xs) else 1e-9
    assert_same(algorithms.ols(prompts).predictions[0], over_prefixes(prompts, lstsq), tolerance)


def augmented(penalty):
    """Ridge as least squares on [X; √penalty I], by numpy."""

    def predict(xs, ys, query):
        rows = np.vstack([xs, math.sqrt(penalty) * np.eye(query.size)])
        return query @ np.linalg.lstsq(rows, np.vstack([ys, np.zeros((query.size, ys.shape[1]))]), rcond=None)[0]

    return predict


@pytest.mark.parametrize("column", [0, 2, 4])
@pytest.mark.parametrize("scale", [1e-6, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("at", ["points", "query"])
def test_an_input_of_another_size_loses_no_digits(column, scale, at):
    generator = torch.Generator().manual_seed(column)
    xs = torch.randn(3, 21, 5, dtype=torch.float64, generator=generator)
    xs[..., column] *= scale
    prompts = Prompts(xs, xs @ torch.randn(5, 2, dtype=torch.float64, generator=generator))
    for penalty in (0.0, 0.1):
        algorithm = algorithms.ols if penalty == 0 else functools.partial(algorithms.ridge, penalty=penalty)
        fitted = algorithm(prompts, at=at, with_weights=True)
        expected = over_prefixes(prompts, augmented(penalty))
        np.testing.assert_allclose(fitted.predictions[0], expected if at == "points" else expected[:, -1:], rtol=1e-7)
        assert fitted.weights is not None
        asked = prompts.xs if at == "points" else prompts.xs[:, -1:]
        torch.testing.assert_close((asked[..., None, :] @ fitted.weights[0])[..., 0, :], fitted.predictions[0])


@pytest.mark.parametrize(
    ("dtype", "n", "size"), [(torch.float16, 9, 1e-2), (torch.bfloat16, 9, 0.1), (torch.float32, 400, 8e-5)]
)
def test_least_squares_and_huber_leave_out_the_same_directions(dtype, n, size):
    made = make_prompts(n_context=n, x_dim=3)
    made.xs[..., 1] = made.xs[..., 0] + size * made.xs[..., 1]
    prompts, epsilon = made.to(dtype), torch.finfo(dtype).eps
    limit = min(epsilon, torch.finfo(torch.float32).eps) * n  # above the least singular value in float32 alone
    expected = [
        x[-1] @ np.linalg.lstsq(x[:-1], y[:-1], rcond=limit)[0]
        for x, y in zip(prompts.xs.double().numpy(), prompts.ys.double().numpy(), strict=True)
    ]
    for fitted in (algorithms.ols(prompts, at="query"), algorithms.huber(prompts, threshold=1e6, at="query")):
        np.testing.assert_allclose(fitted.query()[0].float(), expected, rtol=epsilon, atol=1e-5)


def test_the_user_is_warned_of_lost_digits():
    xs = make_prompts(n_context=9, x_dim=3).xs
    nearly = torch.cat([xs, xs[..., :1] + 1e-11 * xs[..., 1:2] ** 2], dim=-1)
    prompts = Prompts(nearly, make_prompts(n_context=9, x_dim=3).ys)
    with pytest.warns(algorithms.ConditioningWarning, match=r"OLS on 3 of 3 prompts is right to about [\d.e-]+ of the"):
        algorithms.ols(prompts)
    regularised = algorithms.ridge(prompts, penalty=0.1).predictions[0]  # and this one is as good as ever
    assert_same(regularised, over_prefixes(prompts, augmented(0.1)))


@awkward
@pytest.mark.parametrize("penalty", [0.01, 1, 300.0])
def test_ridge_solves_the_penalised_normal_equations_on_every_prefix(prompts, penalty):
    predictions = algorithms.ridge(prompts, penalty=penalty).predictions[0]
    assert_same(predictions, over_prefixes(prompts, solve(penalty)), 1e-11)


@pytest.mark.parametrize("penalty", [5e-324, 1e-18, 1e-15])
@pytest.mark.parametrize("trouble", [name for name in AWKWARD if not name.startswith("eigenvalues")])
def test_a_penalty_below_rounding_noise_gives_ols_and_no_noise(penalty, trouble):
    prompts = AWKWARD[trouble]
    nearly = algorithms.ridge(prompts, penalty=penalty).predictions
    torch.testing.assert_close(nearly, algorithms.ols(prompts).predictions, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise_std", [0, 1e-170, 1e-12])
def test_bayes_without_noise_is_ols(noise_std):
    prompts = make_prompts(n_context=6, x_dim=4)
    ours = algorithms.bayes(prompts, noise_std=noise_std).predictions
    torch.testing.assert_close(ours, algorithms.ols(prompts).predictions, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("factor", [EYE, np.random.default_rng(0).normal(size=(4, 4))])
@pytest.mark.parametrize("noise_std", [0.0, 0.3])
def test_bayes_is_the_conditional_mean_of_jointly_normal_targets(noise_std, factor):
    prompts = make_prompts(n_context=6)
    covariance = factor @ factor.T

    def condition(xs, ys, query):
        kernel = 4 * xs @ covariance @ xs.T + noise_std**2 * np.eye(len(xs))
        return 4 * query @ covariance @ xs.T @ np.linalg.pinv(kernel, rcond=1e-10) @ ys

    options = {"noise_std": noise_std, "weight_std": 2.0, "weight_covariance": torch.from_numpy(covariance)}
    trajectory = algorithms.bayes(prompts, **options, with_weights=True)
    assert_same(trajectory.predictions[0], over_prefixes(prompts, condition), 1e-7)
    assert trajectory.weights is not None
    predictions = torch.einsum("npx,npxy->npy", prompts.xs, trajectory.weights[0])
    torch.testing.assert_close(predictions, trajectory.predictions[0], rtol=1e-9, atol=1e-9)
    plain = algorithms.bayes(prompts, noise_std=noise_std, weight_std=2.0).predictions
    assert torch.allclose(plain, trajectory.predictions) == (factor is EYE)


# ---- spectra ----
@awkward
def test_eigenvalues_are_those_of_each_prefixs_second_moments(prompts):
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, "points")
    for i, xs in enumerate(prompts.xs.numpy()):
        for t in range(len(xs)):
            expected = np.linalg.eigvalsh(sum((np.outer(x, x) for x in xs[:t]), np.zeros((xs.shape[1],) * 2)))
            ours = spectra.eigenvalues[i, t].numpy()
            np.testing.assert_allclose(ours, expected, atol=1e-14 * max(1, expected.max()))
            assert (np.diff(ours) >= 0).all()
            unreached = max(0, prompts.x_dim - t)  # directions that t points do not span: exactly 0
            assert not ours[:unreached].any()
            assert not spectra.target_coordinates[i, t, :unreached].any()
    alone = PrefixSpectra.decompose(prompts.xs, prompts.ys, "query")
    torch.testing.assert_close(alone.eigenvalues, spectra.eigenvalues[:, -1:], rtol=1e-9, atol=1e-13)


# ---- filters with tensors for parameters ----
EIGENVALUES = torch.tensor([0.0, 1e-9, 0.01, 0.4, 0.5, 1.3, 2.9, 3.0], dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_ridge_without_penalty_leaves_out_noise_for_the_number_of_points():
    eigenvalues = torch.tensor([[0.0, 1e-10, 1.0]], dtype=torch.float64)
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0), [[0.0, 1e10, 1.0]])
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0, n_context=10_000), [[0.0, 0.0, 1.0]])


@pytest.mark.parametrize(("filters", "values"), [
    *((lambda a, k=k: gradient_descent_filter(EIGENVALUES, k, a), [0.3]) for k in (0, 1, 2, 7)),
    *((lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [a]) for a in (1.1, -0.4, 0.0)),
    *((lambda a, k=k: newton_filter(EIGENVALUES, k, a), [0.15]) for k in (0, 1, 2, 5)),
    (lambda *p: gd_plus_plus_filters(EIGENVALUES, p[:3], p[3:]), [0.1, 0.4, 0.3, 0.05, 0.2, 0.1]),
    (lambda p: ridge_filter(EIGENVALUES, p), [0.7]),
])  # fmt: skip
def test_gradients_are_the_finite_differences(filters, values):
    assert torch.autograd.gradcheck(filters, tuple(number(value) for value in values))


@pytest.mark.parametrize("value", [-0.05, 1e-3, 0.6])
@pytest.mark.parametrize("steps", [50, 4096])
def test_gradients_of_many_steps_are_those_of_the_geometric_sum(steps, value):
    step_size = number(value)
    ours = gradient_descent_filter(EIGENVALUES, steps, step_size)
    for i, eigenvalue in enumerate(EIGENVALUES.tolist()):
        (gradient,) = torch.autograd.grad(ours[i], step_size, retain_graph=True)
        assert gradient.item() == pytest.approx(steps * (1 - value * eigenvalue) ** (steps - 1), rel=1e-7, abs=1e-12)


def test_tensors_of_parameters_are_families_of_filters():
    values, eigenvalues = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), EIGENVALUES.reshape(2, 4)
    for family in (
        lambda a: gradient_descent_filter(eigenvalues, 5, a),
        lambda a: newton_filter(eigenvalues, 3, a),
        lambda a: ridge_filter(eigenvalues, a),
        lambda a: gd_plus_plus_filters(eigenvalues, [a, a], [0.1, 0.0])[2],
    ):
        one_by_one = torch.stack([family(value) for value in values.tolist()])
        torch.testing.assert_close(family(values[:, None, None]), one_by_one, rtol=1e-12, atol=0)


# ---- the warning: true where it comes, and absent where the iteration converges ----
SAME = make_prompts(n_prompts=1, n_context=9)
BOUND = 2 / torch.linalg.matrix_norm(SAME.context.xs, ord=2).square().item()  # of step sizes on SAME
ABOVE, BELOW = 1.001 * BOUND, 0.999 * BOUND
IDENTITY = torch.eye(4, dtype=torch.float64)


def scaled(*factors: float) -> Prompts:
    """Return SAME with inputs scaled so that S is multiplied by each of the factors."""
    scale = torch.tensor(factors, dtype=torch.float64).sqrt()[:, None, None]
    return Prompts(SAME.xs * scale, SAME.ys.expand(len(factors), -1, -1))


def weights_after(learner, *steps, **parameters) -> float:
    weights = learner(SAME, *steps, at="query", with_weights=True, **parameters).weights
    return weights.abs().max().item()


@pytest.mark.parametrize("at", ["points", "query"])  # shorter prefixes converge here: the full context counts
@pytest.mark.parametrize("step_size", [-0.1, ABOVE])
def test_too_large_a_step_and_climbing_warn(step_size, at):
    bound = rf"step_size={step_size} diverges on 100% of 1 contexts.* between 0 and 2 / λ_max"
    with pytest.warns(algorithms.DivergenceWarning, match=bound):
        algorithms.gradient_descent(SAME, 100, step_size=step_size, at=at)
    with pytest.warns(algorithms.DivergenceWarning):
        early, late = (weights_after(algorithms.gradient_descent, k, step_size=ABOVE) for k in (2000, 8000))
    assert late > 100 * early


@pytest.mark.parametrize("steps", [2, 1000, 10**6])
def test_just_below_it_is_silent_and_bounded(steps):
    first = weights_after(algorithms.gradient_descent, 1, step_size=BELOW)
    assert weights_after(algorithms.gradient_descent, steps, step_size=BELOW) < 10 * first
    algorithms.gradient_descent(SAME, steps, step_size=BOUND)  # neither grows nor converges
    algorithms.gradient_descent(SAME, steps, step_size=0.0)


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_the_bound_and_the_share_of_all_chunks_are_named(chunk, monkeypatch):
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", chunk)
    with pytest.warns(algorithms.DivergenceWarning) as caught:
        algorithms.gradient_descent(scaled(0.5, 1.0, 2.0), [2, 5], step_size=1.5 * BOUND)
    (warning,) = caught
    message = str(warning.message)
    assert f"step_size={1.5 * BOUND} diverges on 67% of 3 contexts" in message
    assert f"that bound is {BOUND:.4g} on the median context, {BOUND / 2:.4g} to {2 * BOUND:.4g} on all" in message


@pytest.mark.parametrize(
    "prompts", [scaled(1.0, 3.0), scaled(1.0, 1.0, 9.0, 9.0), SAME[:0], scaled(0.0), SAME.prefix(0)]
)
def test_half_of_the_contexts_or_fewer_is_silent(prompts):
    algorithms.gradient_descent(prompts, 5, step_size=BELOW)
    algorithms.gd_plus_plus(prompts, 5, step_size=BELOW, gamma=0.1 * BOUND)
    algorithms.preconditioned_gd(prompts, 5, preconditioner=9 * BELOW * IDENTITY)


def test_gd_plus_plus_warns_above_the_bound_of_step_size_or_gamma():
    algorithms.gd_plus_plus(SAME, 50, step_size=BELOW, gamma=0.0)
    with pytest.warns(algorithms.DivergenceWarning, match="GD.. with step_size=.*, gamma=0.0 diverges on 100%"):
        algorithms.gd_plus_plus(SAME, 50, step_size=ABOVE, gamma=0.0)
    weights = [weights_after(algorithms.gd_plus_plus, k, step_size=0.1 * BOUND, gamma=BELOW) for k in (2, 8, 200)]
    assert max(weights) < 2 * weights_after(algorithms.ols)
    with pytest.warns(algorithms.DivergenceWarning, match="gamma="):
        assert weights_after(algorithms.gd_plus_plus, 9, step_size=0.1 * BOUND, gamma=1.05 * BOUND) > 1e6


@settings(max_examples=20)
@given(st.integers(2, 30), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=30, max_size=30))
def test_between_0_and_the_bound_gd_plus_plus_is_silent(steps, shares):
    step_sizes, gammas = zip(*((a * BOUND, g * BOUND) for a, g in shares[:steps]), strict=True)
    algorithms.gd_plus_plus(SAME, steps, step_size=step_sizes, gamma=gammas)


def test_preconditioned_steps_above_the_bound_grow_and_warn_below_they_do_not():
    eye = SAME.n_context * IDENTITY
    below = [weights_after(algorithms.preconditioned_gd, k, preconditioner=BELOW * eye) for k in (2, 3000)]
    assert below[1] < 2 * max(below[0], weights_after(algorithms.ols))
    with pytest.warns(
        algorithms.DivergenceWarning, match=r"100% of 1 contexts.*spectral radius of I - A S / n .* it is 1\.002"
    ):
        early, late = (weights_after(algorithms.preconditioned_gd, k, preconditioner=ABOVE * eye) for k in (1000, 4000))
    assert late > 100 * early


def test_a_preconditioner_that_turns_is_judged_by_its_radius_not_its_norm():
    """I - A S / n has norm 3 here and squares to 0."""
    second = SAME.context.xs[0].mT @ SAME.context.xs[0] / SAME.n_context
    nilpotent = torch.zeros(4, 4, dtype=torch.float64)
    nilpotent[0, 1] = 3
    after = algorithms.preconditioned_gd(
        SAME, [2, 50], preconditioner=(IDENTITY - nilpotent) @ second.inverse(), at="query"
    )
    torch.testing.assert_close(after.predictions, algorithms.ols(SAME, at="query").predictions.expand(2, -1, -1, -1))


def test_a_list_of_preconditioners_is_judged_by_its_product():
    large, small = (value * SAME.n_context * IDENTITY for value in (1.2 * BOUND, 0.45 * BOUND))
    with pytest.warns(algorithms.DivergenceWarning, match="product of all"):
        algorithms.preconditioned_gd(SAME, 2, preconditioner=[large, large])
    algorithms.preconditioned_gd(SAME, 2, preconditioner=[large, small])
    with pytest.warns(algorithms.DivergenceWarning, match="it is inf"):
        algorithms.preconditioned_gd(SAME, 400, preconditioner=[1e6 * large] * 400)


def test_directions_that_a_short_context_does_not_span_do_not_count():
    prompts = LinearRegression(x_dim=20, n_context=5, inputs="gaussian").sample(300, seed=0)
    root = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    algorithms.preconditioned_gd(prompts, 50, preconditioner=0.002 * root @ root.T)
    algorithms.gradient_descent(prompts, 10**9, step_size=0.01)
