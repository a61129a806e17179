"""Preconditioned gradient descent, and the weights that are best for one layer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis.weights import linear_attention_optimum
from mechicl.learners import squared_errors
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import precondition
from tests.constructions.reference import assert_same, at_query, cases, quick

# ---- preconditioned gradient descent ----


@quick
@given(cases(), st.booleans())
def test_the_transformer_is_preconditioned_gd_on_every_prompt(case, alike):
    matrices = list(0.3 * case.rng.standard_normal((case.steps, case.prompts.x_dim, case.prompts.x_dim)))
    matrices = matrices[:1] * case.steps if alike else matrices
    each = [torch.from_numpy(matrix) for matrix in matrices]
    model = constructions.preconditioned_gd(**case.sizes, preconditioner=each[0] if alike else each, steps=case.steps)
    assert_same(model.predict(case.prompts), at_query(case.prompts, precondition(matrices)))
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps, 1)
    assert model.cfg.d_model == case.prompts.x_dim + case.prompts.y_dim
    assert model.cfg.recurrent == (case.steps > 1 and alike)


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("preconditioner", "steps", "message"),
    [
        *((EYE, steps, "steps must be an int of at least 1") for steps in (0, -1)),
        *((matrices, 2, "needs a preconditioner") for matrices in ([EYE], [EYE] * 3)),
        (
            [EYE, torch.eye(2)],
            2,
            r"preconditioner must be a tensor of floats \[x x\] or a seq.*, got the list",
        ),
        *((matrices, 1, "needs a preconditioner") for matrices in (torch.eye(2), [])),
        (math.nan * EYE, 1, "not finite"),
    ],
)
def test_bad_preconditioners_are_refused(preconditioner, steps, message):
    with pytest.raises(ValueError, match=message):
        constructions.preconditioned_gd(x_dim=3, n_context=4, preconditioner=preconditioner, steps=steps)


# ---- the best layer of linear attention ----


def preconditioner_of(model) -> np.ndarray:
    """A of the one layer's prediction `x A Σ_i x_iᵀ y_i / n`, whose values read y alone."""
    d = model.cfg.x_dim
    moved = model.OV.AB[0, 0].detach().numpy()
    assert not moved[:d].any()
    assert not moved[:, :d].any()
    return -moved[d, d] * model.QK.AB[0, 0].detach().numpy()[:d, :d]


def gaussian_loss(matrix: np.ndarray, sigma: np.ndarray, n: int, noise_variance: float = 0.0) -> float:
    """`E ‖x - x A Ŝ‖²` by the moments of Gaussian inputs: `E ŜŜ = ((n + 1) Σ² + tr(Σ) Σ) / n`, and noise's ν² Σ / n."""
    second = ((n + 1) * sigma @ sigma + (np.trace(sigma) + noise_variance) * sigma) / n
    loss = np.trace(sigma) - 2 * np.trace(sigma @ matrix @ sigma) + np.trace(matrix.T @ sigma @ matrix @ second)
    return float(loss)


@pytest.mark.parametrize(
    ("eigenvalues", "published", "digits"), [([1.0] * 5, 1.1538, 5e-5), ([10 ** (i / 4) for i in range(5)], 4.58, 5e-3)]
)
def test_its_loss_is_the_closed_form(eigenvalues, published, digits):
    n, total = 20, sum(eigenvalues)
    model = constructions.linear_optimum(covariance=torch.tensor(eigenvalues).diag(), n_context=n)
    loss = gaussian_loss(preconditioner_of(model), np.diag(eigenvalues), n)
    assert loss == pytest.approx(published, abs=digits)
    assert loss == pytest.approx(sum(v * (1 - v / ((n + 1) / n * v + total / n)) for v in eigenvalues), rel=1e-6)


@quick
@given(st.integers(1, 20), st.integers(1, 30), st.sampled_from([0.0, 0.25, 9.0]), st.integers(0, 2**20))
def test_every_other_preconditioner_has_a_larger_loss(x_dim, n_context, noise, seed):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((x_dim, x_dim))
    sigma = root @ root.T
    model = constructions.linear_optimum(covariance=torch.from_numpy(sigma), n_context=n_context, noise_variance=noise)
    best = preconditioner_of(model)
    least = gaussian_loss(best, sigma, n_context, noise)
    closed_form = linear_attention_optimum(np.linalg.eigvalsh(sigma).tolist(), n_context, noise)
    assert least == pytest.approx(closed_form, rel=1e-6, abs=1e-9 * np.trace(sigma))
    direction = np.abs(best).max() * rng.standard_normal((x_dim, x_dim))
    up, down = (gaussian_loss(best + sign * 0.1 * direction, sigma, n_context, noise) for sign in (1, -1))
    assert min(up, down) > least
    # the loss is a parabola along any line: at its lowest point both sides rise alike
    assert up - down == pytest.approx(0, abs=1e-6 * (up + down - 2 * least) + 1e-9 * least)


def test_with_noise_its_loss_on_many_prompts_is_the_closed_form():
    n, noise, eigenvalues = 10, 4.0, (0.5, 1.0, 3.0)
    task = LinearRegression(
        x_dim=3, n_context=n, inputs="gaussian", eigenvalues=eigenvalues, noise_std=noise**0.5, query_noise=False
    )
    prompts = task.sample(30_000, seed=0, dtype=torch.float64)
    sigma = torch.tensor(eigenvalues).diag()
    model = constructions.linear_optimum(covariance=sigma, n_context=n, noise_variance=noise)
    sampled = interval(squared_errors(model, prompts), level=0.999)
    assert linear_attention_optimum(list(eigenvalues), n, noise) in sampled
    assert sampled.half_width < 0.05 * sampled.mean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_variance": -0.1}, "noise_variance must be finite and not negative"),
        ({"noise_variance": math.nan}, "noise_variance must be a finite number, got nan"),
        ({"covariance": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, "symmetric"),
        ({"covariance": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, "semidefinite"),
        (
            {"covariance": torch.tensor([[math.nan, 0.0], [0.0, 1.0]])},
            "covariance has 1 of 4 values that are not fin",
        ),
        ({"covariance": torch.zeros(2, 2)}, "no best step"),
        *(({"n_context": n_context}, "n_context must be an int of at least 1") for n_context in (0, -1)),
    ],
)
def test_what_has_no_optimum_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        constructions.linear_optimum(**{"covariance": torch.eye(2), "n_context": 4, **change})
    if "n_context" in change:
        with pytest.raises(ValueError, match=message):
            constructions.relu_optimum(x_dim=2, **change)


# ---- the best layer of ReLU attention ----


def relu_loss(scale: float, d: int, n: int) -> float:
    """`E ‖x - c/n Σ relu(<x, x_i>) x_i‖²`: `E[relu(s) x_i | x] = x/2` and `E[relu(s)² ‖x_i‖² | x] = (d + 2) ‖x‖²/2`."""
    return d - 2 * scale * d / 2 + scale**2 * ((n - 1) / n * d / 4 + d * (d + 2) / 2 / n)


@quick
@given(cases(y_dim=1))
def test_it_is_one_step_with_rectified_scores(case):
    n, d = case.n_context + 1, case.prompts.x_dim
    model = constructions.relu_optimum(x_dim=d, n_context=n)
    scale = 1 / (0.5 * (n - 1) / n + (d + 2) / n)

    def predict(xs, ys, query):
        out = np.zeros(1)
        for x, y in zip(xs, ys, strict=True):
            out += scale * max(x @ query, 0) * y / len(xs)
        return out

    assert_same(model.predict(case.prompts), at_query(case.prompts, predict))
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.attention) == (1, 1, "relu")


def test_its_loss_is_the_closed_form_and_no_other_scale_has_less():
    d, n = 5, 20
    model = constructions.relu_optimum(x_dim=d, n_context=n)
    scale = -(model.W_V[0, 0] @ model.W_O[0, 0])[d, d].item()
    least = relu_loss(scale, d, n)
    closed_form = d - (d / 2) ** 2 / (d / 2 * (0.5 * (n - 1) / n + (d + 2) / n))
    assert least == pytest.approx(closed_form, rel=1e-12)
    assert least == pytest.approx(1.970, abs=5e-4)
    assert all(relu_loss(factor * scale, d, n) > least for factor in (-1, 0, 0.9, 0.999, 1.001, 1.1))

    prompts = LinearRegression(x_dim=d, n_context=n, inputs="gaussian").sample(40_000, seed=0, dtype=torch.float64)
    assert least in interval(squared_errors(model, prompts), level=0.999)
