"""The warning of divergence is true where it comes, and does not come where the iteration converges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms import (
    DivergenceWarning,
    gd_plus_plus,
    gradient_descent,
    ols,
    preconditioned_gd,
)
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import make_prompts

SAME = make_prompts(n_prompts=1, n_context=9)
LARGEST = torch.linalg.matrix_norm(SAME.context.xs, ord=2).square().item()
BOUND = 2 / LARGEST  # of step sizes on SAME
ABOVE, BELOW = 1.001 * BOUND, 0.999 * BOUND


def scaled(*factors: float) -> Prompts:
    """SAME with inputs scaled so that S is multiplied by each of the factors."""
    scale = torch.tensor(factors, dtype=torch.float64).sqrt()[:, None, None]
    return Prompts(SAME.xs * scale, SAME.ys.expand(len(factors), -1, -1))


def weights_after(learner, steps, prompts=SAME, **parameters) -> float:
    weights = learner(prompts, steps, at="query", with_weights=True, **parameters).weights
    return weights.abs().max().item()


# ---- gradient descent ----


@pytest.mark.parametrize("at", ["points", "query"])  # shorter prefixes converge here: the full context counts
@pytest.mark.parametrize("step_size", [-0.1, ABOVE])
def test_too_large_a_step_and_climbing_warn(step_size, at):
    bound = rf"step_size={step_size} diverges on 100% of 1 contexts.* between 0 and 2 / λ_max"
    with pytest.warns(DivergenceWarning, match=bound):
        gradient_descent(SAME, 100, step_size=step_size, at=at)


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")
def test_just_above_the_bound_gradient_descent_grows():
    assert weights_after(gradient_descent, 8000, step_size=ABOVE) > 100 * weights_after(
        gradient_descent, 2000, step_size=ABOVE
    )


@pytest.mark.parametrize("steps", [2, 3, 1000, 10**6])
def test_just_below_it_is_silent_and_bounded(steps):
    assert weights_after(gradient_descent, steps, step_size=BELOW) < 10 * weights_after(
        gradient_descent, 1, step_size=BELOW
    )
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


@pytest.mark.parametrize("steps", [0, 1, [0, 1]])
def test_a_single_step_may_be_of_any_size(steps):
    gradient_descent(SAME, steps, step_size=10 * BOUND)
    gd_plus_plus(SAME, steps, step_size=10 * BOUND, gamma=10 * BOUND)
    preconditioned_gd(SAME, steps, preconditioner=100 * torch.eye(4))


@pytest.mark.parametrize(
    "prompts", [scaled(1.0, 3.0), scaled(1.0, 1.0, 9.0, 9.0), SAME[:0], scaled(0.0), SAME.prefix(0)]
)
def test_half_of_the_contexts_or_fewer_is_silent(prompts):
    gradient_descent(prompts, 5, step_size=BELOW)
    gd_plus_plus(prompts, 5, step_size=BELOW, gamma=0.1 * BOUND)
    preconditioned_gd(prompts, 5, preconditioner=9 * BELOW * torch.eye(4, dtype=torch.float64))


# ---- GD++ ----


def test_gd_plus_plus_warns_where_gradient_descent_does():
    gd_plus_plus(SAME, 50, step_size=BELOW, gamma=0.0)
    with pytest.warns(DivergenceWarning, match="GD.. with step_size=.*, gamma=0.0 diverges on 100%"):
        gd_plus_plus(SAME, 50, step_size=ABOVE, gamma=0.0)


def test_a_gamma_above_the_bound_makes_gd_plus_plus_grow_and_one_below_it_does_not():
    weights = [weights_after(gd_plus_plus, k, step_size=0.1 * BOUND, gamma=BELOW) for k in (2, 8, 200)]
    assert max(weights) < 2 * weights_after(ols_steps, 1)
    with pytest.warns(DivergenceWarning, match="gamma="):
        assert weights_after(gd_plus_plus, 9, step_size=0.1 * BOUND, gamma=1.05 * BOUND) > 1e6


def ols_steps(prompts, steps, **options):
    return ols(prompts, **options)


def test_a_gamma_that_shrinks_the_inputs_allows_a_larger_step():
    """Why the residual decides, and no bound on the first step's parameters."""
    gd_plus_plus(SAME, 20, step_size=1.3 * BOUND, gamma=0.2 * BOUND)
    weights = [weights_after(gd_plus_plus, k, step_size=1.3 * BOUND, gamma=0.2 * BOUND) for k in (20, 500)]
    assert weights[1] < 3 * weights[0]


@settings(max_examples=20)
@given(st.integers(2, 30), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=30, max_size=30))
def test_between_0_and_the_bound_gd_plus_plus_is_silent(steps, shares):
    step_sizes, gammas = zip(*((a * BOUND, g * BOUND) for a, g in shares[:steps]), strict=True)
    gd_plus_plus(SAME, steps, step_size=step_sizes, gamma=gammas)


# ---- preconditioned gradient descent ----


def test_preconditioned_steps_above_the_bound_grow_and_warn_below_they_do_not():
    eye = SAME.n_context * torch.eye(4, dtype=torch.float64)
    below = [weights_after(preconditioned_gd, k, preconditioner=BELOW * eye) for k in (2, 3000)]
    assert below[1] < 2 * max(below[0], weights_after(ols_steps, 1))
    with pytest.warns(DivergenceWarning, match=r"100% of 1 contexts.*spectral radius of I - A S / n .* it is 1\.002"):
        early, late = (weights_after(preconditioned_gd, k, preconditioner=ABOVE * eye) for k in (1000, 4000))
    assert late > 100 * early


def test_a_preconditioner_that_turns_is_judged_by_its_radius_not_its_norm():
    """I - A S / n has norm 3 here and squares to 0."""
    second = SAME.context.xs[0].mT @ SAME.context.xs[0] / SAME.n_context
    nilpotent = torch.zeros(4, 4, dtype=torch.float64)
    nilpotent[0, 1] = 3
    matrix = (torch.eye(4, dtype=torch.float64) - nilpotent) @ second.inverse()
    after = preconditioned_gd(SAME, [2, 50], preconditioner=matrix, at="query").predictions
    torch.testing.assert_close(after, ols(SAME, at="query").predictions.expand(2, -1, -1, -1))


def test_a_list_of_preconditioners_is_judged_by_its_product():
    large, small = (value * SAME.n_context * torch.eye(4, dtype=torch.float64) for value in (1.2 * BOUND, 0.45 * BOUND))
    with pytest.warns(DivergenceWarning, match="product of all"):
        preconditioned_gd(SAME, 2, preconditioner=[large, large])
    preconditioned_gd(SAME, 2, preconditioner=[large, small])
    with pytest.warns(DivergenceWarning, match="it is inf"):
        preconditioned_gd(SAME, 400, preconditioner=[1e6 * large] * 400)


def test_directions_that_a_short_context_leaves_open_do_not_count():
    prompts = LinearRegression(x_dim=20, n_context=5, inputs="gaussian").sample(300, seed=0)
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 20, dtype=torch.float64, generator=generator)
    preconditioned_gd(prompts, 50, preconditioner=0.002 * root @ root.T)
    gradient_descent(prompts, 10**9, step_size=0.01)
