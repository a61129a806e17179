"""Spectra of prefixes, filters with tensors for parameters, and the warning where an iteration diverges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms import DivergenceWarning, gd_plus_plus, gradient_descent, ols, preconditioned_gd
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.spectra import PrefixSpectra, spectral_trajectory
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

from .reference import awkward, make_prompts, prompts_of_any_size


@awkward
def test_eigenvalues_are_those_of_each_prefixs_second_moments(prompts):
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, "points")
    for i, xs in enumerate(prompts.xs.numpy()):
        for t in range(len(xs)):
            expected = np.linalg.eigvalsh(sum((np.outer(x, x) for x in xs[:t]), np.zeros((xs.shape[1],) * 2)))
            ours = spectra.eigenvalues[i, t].numpy()
            np.testing.assert_allclose(ours, expected, atol=1e-14 * max(1, expected.max()))
            assert (np.diff(ours) >= 0).all()


@awkward
def test_eigenvalues_are_never_negative_and_exactly_zero_beyond_the_number_of_points(prompts):
    for at in ("points", "query"):
        spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, at)
        assert (spectra.eigenvalues >= 0).all()
        counts = range(prompts.n_context + 1) if at == "points" else [prompts.n_context]
        for position, count in enumerate(counts):
            unreached = max(0, prompts.x_dim - count)
            assert not spectra.eigenvalues[:, position, :unreached].any()
            assert not spectra.target_coordinates[:, position, :unreached].any()


@settings(max_examples=15)
@given(prompts_of_any_size())
def test_a_filter_that_is_the_eigenvalue_multiplies_by_the_second_moments(prompts):
    ours = spectral_trajectory(
        prompts, lambda values: torch.stack([values, values**2]), name="powers", steps=(1, 2), at="query"
    ).predictions
    xs, ys = prompts.context
    second = xs.mT @ xs
    once = prompts.query.xs[:, None] @ second @ (xs.mT @ ys)
    twice = prompts.query.xs[:, None] @ second @ second @ (xs.mT @ ys)
    torch.testing.assert_close(ours[0], once, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours[1], twice, rtol=0, atol=1e-10)


# ---- filters with tensors for parameters ----

EIGENVALUES = torch.tensor([0.0, 1e-9, 0.01, 0.4, 0.5, 1.3, 2.9, 3.0], dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_ridge_without_penalty_leaves_out_noise_for_the_number_of_points():
    eigenvalues = torch.tensor([[0.0, 1e-10, 1.0]], dtype=torch.float64)
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0), [[0.0, 1e10, 1.0]])
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0, n_context=10_000), [[0.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("filters", "values"),
    [
        *((lambda a, k=k: gradient_descent_filter(EIGENVALUES, k, a), [0.3]) for k in (0, 1, 2, 7)),
        *((lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [a]) for a in (1.1, -0.4, 0.0)),
        *((lambda a, k=k: newton_filter(EIGENVALUES, k, a), [0.15]) for k in (0, 1, 2, 5)),
        (lambda *p: gd_plus_plus_filters(EIGENVALUES, p[:3], p[3:]), [0.1, 0.4, 0.3, 0.05, 0.2, 0.1]),
        (lambda p: ridge_filter(EIGENVALUES, p), [0.7]),
    ],
)
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
    with pytest.warns(DivergenceWarning, match=bound):
        gradient_descent(SAME, 100, step_size=step_size, at=at)


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")
def test_just_above_the_bound_gradient_descent_grows():
    early, late = (weights_after(gradient_descent, k, step_size=ABOVE) for k in (2000, 8000))
    assert late > 100 * early


@pytest.mark.parametrize("steps", [2, 1000, 10**6])
def test_just_below_it_is_silent_and_bounded(steps):
    first = weights_after(gradient_descent, 1, step_size=BELOW)
    assert weights_after(gradient_descent, steps, step_size=BELOW) < 10 * first
    gradient_descent(SAME, steps, step_size=BOUND)  # neither grows nor converges
    gradient_descent(SAME, steps, step_size=0.0)


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_the_bound_and_the_share_of_all_chunks_are_named(chunk, monkeypatch):
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", chunk)
    with pytest.warns(DivergenceWarning) as caught:
        gradient_descent(scaled(0.5, 1.0, 2.0), [2, 5], step_size=1.5 * BOUND)
    (warning,) = caught
    message = str(warning.message)
    assert f"step_size={1.5 * BOUND} diverges on 67% of 3 contexts" in message
    assert f"that bound is {BOUND:.4g} on the median context, {BOUND / 2:.4g} to {2 * BOUND:.4g} on all" in message


@pytest.mark.parametrize(
    "prompts", [scaled(1.0, 3.0), scaled(1.0, 1.0, 9.0, 9.0), SAME[:0], scaled(0.0), SAME.prefix(0)]
)
def test_half_of_the_contexts_or_fewer_is_silent(prompts):
    gradient_descent(prompts, 5, step_size=BELOW)
    gd_plus_plus(prompts, 5, step_size=BELOW, gamma=0.1 * BOUND)
    preconditioned_gd(prompts, 5, preconditioner=9 * BELOW * IDENTITY)


def test_gd_plus_plus_warns_above_the_bound_of_step_size_or_gamma():
    gd_plus_plus(SAME, 50, step_size=BELOW, gamma=0.0)
    with pytest.warns(DivergenceWarning, match="GD.. with step_size=.*, gamma=0.0 diverges on 100%"):
        gd_plus_plus(SAME, 50, step_size=ABOVE, gamma=0.0)
    weights = [weights_after(gd_plus_plus, k, step_size=0.1 * BOUND, gamma=BELOW) for k in (2, 8, 200)]
    assert max(weights) < 2 * weights_after(ols)
    with pytest.warns(DivergenceWarning, match="gamma="):
        assert weights_after(gd_plus_plus, 9, step_size=0.1 * BOUND, gamma=1.05 * BOUND) > 1e6


def test_a_gamma_that_shrinks_the_inputs_allows_a_larger_step():
    """Show why the residual decides, and no bound on the first step's parameters."""
    gd_plus_plus(SAME, 20, step_size=1.3 * BOUND, gamma=0.2 * BOUND)
    weights = [weights_after(gd_plus_plus, k, step_size=1.3 * BOUND, gamma=0.2 * BOUND) for k in (20, 500)]
    assert weights[1] < 3 * weights[0]


@settings(max_examples=20)
@given(st.integers(2, 30), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=30, max_size=30))
def test_between_0_and_the_bound_gd_plus_plus_is_silent(steps, shares):
    step_sizes, gammas = zip(*((a * BOUND, g * BOUND) for a, g in shares[:steps]), strict=True)
    gd_plus_plus(SAME, steps, step_size=step_sizes, gamma=gammas)


def test_preconditioned_steps_above_the_bound_grow_and_warn_below_they_do_not():
    eye = SAME.n_context * IDENTITY
    below = [weights_after(preconditioned_gd, k, preconditioner=BELOW * eye) for k in (2, 3000)]
    assert below[1] < 2 * max(below[0], weights_after(ols))
    with pytest.warns(DivergenceWarning, match=r"100% of 1 contexts.*spectral radius of I - A S / n .* it is 1\.002"):
        early, late = (weights_after(preconditioned_gd, k, preconditioner=ABOVE * eye) for k in (1000, 4000))
    assert late > 100 * early


def test_a_preconditioner_that_turns_is_judged_by_its_radius_not_its_norm():
    """I - A S / n has norm 3 here and squares to 0."""
    second = SAME.context.xs[0].mT @ SAME.context.xs[0] / SAME.n_context
    nilpotent = torch.zeros(4, 4, dtype=torch.float64)
    nilpotent[0, 1] = 3
    after = preconditioned_gd(SAME, [2, 50], preconditioner=(IDENTITY - nilpotent) @ second.inverse(), at="query")
    torch.testing.assert_close(after.predictions, ols(SAME, at="query").predictions.expand(2, -1, -1, -1))


def test_a_list_of_preconditioners_is_judged_by_its_product():
    large, small = (value * SAME.n_context * IDENTITY for value in (1.2 * BOUND, 0.45 * BOUND))
    with pytest.warns(DivergenceWarning, match="product of all"):
        preconditioned_gd(SAME, 2, preconditioner=[large, large])
    preconditioned_gd(SAME, 2, preconditioner=[large, small])
    with pytest.warns(DivergenceWarning, match="it is inf"):
        preconditioned_gd(SAME, 400, preconditioner=[1e6 * large] * 400)


def test_directions_that_a_short_context_does_not_span_do_not_count():
    prompts = LinearRegression(x_dim=20, n_context=5, inputs="gaussian").sample(300, seed=0)
    root = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    preconditioned_gd(prompts, 50, preconditioner=0.002 * root @ root.T)
    gradient_descent(prompts, 10**9, step_size=0.01)
