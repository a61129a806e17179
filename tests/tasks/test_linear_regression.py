"""Linear tasks against closed forms and the distributions that they claim."""

import itertools
import math
import sys

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl import tasks
from mechicl.tasks import LinearRegression, task_from_dict
from tests.tasks.reference import INPUTS, LEAST_P, MOST_Z, assert_follows, z_score


def sample_inputs(n_prompts=500, seed=0, **fields):
    return LinearRegression(**fields).sample(n_prompts, seed=seed, dtype=torch.float64).xs.numpy()


def second_moments(xs):
    """Each prompt's mean of x x^T over its points."""
    return (xs[..., :, None] * xs[..., None, :]).mean(1).numpy()


def true_weights(prompts):
    """The W of each noiseless prompt with at least x_dim points, and the largest residual, by least squares."""
    weights = torch.linalg.lstsq(prompts.xs, prompts.ys).solution
    return weights.numpy(), (prompts.xs @ weights - prompts.ys).abs().max().item()


@pytest.mark.parametrize(
    ("inputs", "marginal"),
    [("uniform", scipy.stats.uniform(-0.5, 1.0)), ("gaussian", scipy.stats.norm()),
     ("exponential", scipy.stats.expon()), ("laplace", scipy.stats.laplace())],
)  # fmt: skip
def test_inputs_have_their_distribution_in_every_coordinate(inputs, marginal):
    xs = sample_inputs(n_prompts=400, x_dim=3, n_context=9, inputs=inputs)
    assert xs.shape == (400, 10, 3)
    for i in range(3):
        assert_follows(xs[..., i], marginal)


@pytest.mark.parametrize("x_dim", [1, 2, 5])
def test_sphere_inputs_are_uniform_on_the_unit_sphere(x_dim):
    xs = sample_inputs(x_dim=x_dim, n_context=3, inputs="sphere")
    np.testing.assert_allclose((xs**2).sum(-1), 1.0, rtol=1e-12)
    for i in range(x_dim):
        assert abs(z_score(np.sign(xs[..., i]).ravel(), 0.0)) < MOST_Z
        if x_dim > 1:  # one squared coordinate of a uniform point on the sphere is a Beta variable
            assert_follows(xs[..., i] ** 2, scipy.stats.beta(0.5, (x_dim - 1) / 2))


@pytest.mark.parametrize("x_dim", [1, 4])
def test_gamma_sphere_inputs_have_independent_gamma_squared_radii_and_any_direction(x_dim):
    xs = sample_inputs(n_prompts=1000, x_dim=x_dim, n_context=3, inputs="gamma_sphere")
    squares = (xs**2).sum(-1)
    assert_follows(squares, scipy.stats.gamma(0.1, scale=10.0))
    assert abs(z_score(squares.ravel(), 1.0)) < MOST_Z
    if x_dim > 1:
        directions = xs[squares > 1e-200]
        directions = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
        assert_follows(directions[:, 0] ** 2, scipy.stats.beta(0.5, (x_dim - 1) / 2))
    # the radii of a prompt's points are independent
    assert abs(scipy.stats.spearmanr(squares[:, 0], squares[:, 1]).statistic) < MOST_Z / math.sqrt(1000)


@pytest.mark.parametrize("inputs", [*INPUTS, ("uniform", "sphere")])
def test_input_scale_multiplies_the_inputs_and_weight_scale_the_targets(inputs):
    task = LinearRegression(x_dim=3, n_context=4, inputs=inputs)
    plain = task.sample(20, seed=1, dtype=torch.float64)
    scaled = task.replace(input_scale=2.5).sample(20, seed=1, dtype=torch.float64)
    torch.testing.assert_close(scaled.xs, 2.5 * plain.xs)
    torch.testing.assert_close(scaled.ys, 2.5 * plain.ys)
    heavier = task.replace(weight_scale=3.0).sample(20, seed=1, dtype=torch.float64)
    torch.testing.assert_close(heavier.xs, plain.xs)
    torch.testing.assert_close(heavier.ys, 3.0 * plain.ys)


def test_a_mixture_draws_one_distribution_a_prompt_each_equally_often():
    xs = sample_inputs(n_prompts=1200, x_dim=2, n_context=19, inputs=("sphere", "exponential", "uniform"))
    on_sphere = np.isclose((xs**2).sum(-1), 1.0).all(1)
    positive = (xs >= 0).all((1, 2))
    in_box = (np.abs(xs) <= 0.5).all((1, 2))
    assert (on_sphere.astype(int) + positive + in_box == 1).all()
    assert scipy.stats.chisquare([on_sphere.sum(), positive.sum(), in_box.sum()]).pvalue > LEAST_P
    assert_follows(xs[positive], scipy.stats.expon())
    assert_follows(xs[in_box], scipy.stats.uniform(-0.5, 1.0))


COVARIANCE = ((2.0, -0.9, 0.3), (-0.9, 1.0, 0.0), (0.3, 0.0, 0.5))


def assert_second_moment(xs, expected):
    """Gaussian inputs: all points are independent samples with this second moment."""
    points = xs.reshape(-1, xs.shape[-1])
    products = np.einsum("ni,nj->nij", points, points)
    assert np.abs(z_score(products, expected)).max() < MOST_Z
    mahalanobis = np.einsum("ni,ij,nj->n", points, np.linalg.inv(expected), points)
    assert_follows(mahalanobis, scipy.stats.chi2(xs.shape[-1]))


@pytest.mark.parametrize(("fields", "expected"), [
    ({"covariance": COVARIANCE}, np.array(COVARIANCE)),
    *(({"condition_number": c}, np.diag([c**0, c**0.5, c])) for c in (1.0, 10.0)),
    ({"x_dim": 1, "condition_number": 10.0}, np.eye(1)),
    ({"eigenvalues": (9.0, 4.0, 1.0), "eigenbasis": "shared"}, None),
])  # fmt: skip
def test_gaussian_inputs_take_any_covariance(fields, expected):
    task = LinearRegression(**{"x_dim": 3, "n_context": 9, "inputs": "gaussian", **fields})
    if expected is None:  # rotated by a basis that has its own seed, and is not the axes
        basis = task.shared_basis().numpy()
        np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-12)
        assert not torch.allclose(task.shared_basis(), task.replace(eigenbasis_seed=1).shared_basis())
        expected = basis.T @ np.diag(fields["eigenvalues"]) @ basis
        assert np.abs(expected - np.diag(np.diag(expected))).max() > 0.1
    np.testing.assert_allclose(task.input_covariance().numpy(), expected, atol=1e-12)
    for seed in (0, 1):
        assert_second_moment(task.sample(500, seed=seed, dtype=torch.float64).xs.numpy(), expected)


def test_a_basis_per_task_keeps_the_spectrum_and_points_anywhere():
    eigenvalues = (16.0, 4.0, 1.0)
    task = LinearRegression(x_dim=3, n_context=4999, inputs="gaussian", eigenvalues=eigenvalues, eigenbasis="per_task")
    for moment in second_moments(task.sample(2, seed=0, dtype=torch.float64).xs):
        measured = np.linalg.eigvalsh(moment)[::-1]
        # An eigenvalue of a sample covariance of n Gaussian points has relative standard deviation sqrt(2 / n).
        assert np.abs(measured / eigenvalues - 1).max() < MOST_Z * math.sqrt(2 / 5000)
    # In three dimensions each coordinate of a uniformly random direction is uniform. The leading eigenvector of a few
    # points is random too, but no direction is preferred.
    moments = second_moments(task.replace(n_context=9).sample(600, seed=1, dtype=torch.float64).xs)
    leading = np.linalg.eigh(moments)[1][:, :, -1]
    for i in range(3):
        assert_follows(np.abs(leading[:, i]), scipy.stats.uniform())
    for i, j in itertools.combinations(range(3), 2):
        assert abs(z_score(moments[:, i, j], 0.0)) < MOST_Z


@pytest.mark.parametrize(("x_dim", "y_dim"), [(1, 1), (3, 1), (2, 4)])
def test_targets_are_linear_in_the_inputs_with_normal_weights(x_dim, y_dim):
    task = LinearRegression(x_dim=x_dim, y_dim=y_dim, n_context=x_dim + 4, weight_scale=2.0)
    prompts = task.sample(400, seed=0, dtype=torch.float64)
    assert prompts.ys.shape == (400, x_dim + 5, y_dim)
    weights, residual = true_weights(prompts)
    assert residual < 1e-12
    assert_follows(weights, scipy.stats.norm(scale=2.0))
    flat = weights.reshape(400, -1)
    for i, j in itertools.combinations(range(flat.shape[1]), 2):
        assert abs(z_score(flat[:, i] * flat[:, j], 0.0)) < MOST_Z


@pytest.mark.parametrize("fields", [
    {"covariance": ((2.0, 0.6, 0.0), (0.6, 1.0, -0.3), (0.0, -0.3, 0.5))},
    {"condition_number": 20.0},
    {"eigenvalues": (4.0, 1.0, 0.1), "eigenbasis": "shared", "eigenbasis_seed": 3},
])  # fmt: skip
def test_weights_may_have_the_inverse_covariance_of_the_inputs(fields):
    sizes = {"x_dim": 3, "n_context": 4, "y_dim": 2, "input_scale": 2.0}
    task = LinearRegression(**sizes, inputs="gaussian", weight_covariance="inverse", **fields)
    prompts = task.sample(4000, seed=0, dtype=torch.float64)
    weights, residual = true_weights(prompts)
    assert residual < 1e-6
    inverse = np.linalg.inv(task.input_covariance().numpy())
    for y in range(2):
        products = np.einsum("ni,nj->nij", weights[..., y], weights[..., y])
        assert np.abs(z_score(products, inverse)).max() < MOST_Z
    # whatever the covariance of the inputs, Σ, the targets have the variance tr(Σ Σ⁻¹), here scaled by 2²
    assert abs(z_score((prompts.ys[:, 0, 0] ** 2).numpy(), 4 * 3.0)) < MOST_Z
    assert_second_moment(prompts.xs.numpy() / 2, task.input_covariance().numpy())
    plain = task.replace(weight_covariance="identity")
    assert torch.equal(plain.sample(5, seed=1).xs, task.sample(5, seed=1).xs)


def test_noise_is_on_the_query_unless_it_is_turned_off():
    noisy = LinearRegression(x_dim=3, n_context=6, noise_std=0.5)
    clean, half = noisy.replace(noise_std=0.0), noisy.replace(query_noise=False)
    a, b, c = (task.sample(500, seed=2, dtype=torch.float64) for task in (noisy, clean, half))
    assert torch.equal(a.xs, b.xs)  # noise is drawn last: the same seed gives the same tasks
    assert_follows((a.query.ys - b.query.ys).numpy(), scipy.stats.norm(scale=0.5))
    assert_follows((a.context.ys - b.context.ys).numpy(), scipy.stats.norm(scale=0.5))
    assert torch.equal(c.query.ys, b.query.ys)
    assert torch.equal(c.context.ys, a.context.ys)


@pytest.mark.parametrize("n_distractors", [1, 6])
def test_distractors_of_a_prompt_follow_one_other_task(n_distractors):
    task = LinearRegression(x_dim=1, y_dim=2, n_context=6, n_distractors=n_distractors)
    prompts = task.sample(600, seed=0, dtype=torch.float64)
    slopes = (prompts.ys / prompts.xs).numpy()  # one input: the weights can be read off each point
    strange = ~np.isclose(slopes[:, :-1], slopes[:, -1:]).all(-1)
    assert (strange.sum(1) == n_distractors).all()
    others = slopes[:, :-1][strange].reshape(600, n_distractors, 2)
    np.testing.assert_allclose(others, others[:, :1].repeat(n_distractors, 1))
    assert_follows(others[:, 0], scipy.stats.norm())
    assert abs(z_score(others[:, 0, 0] * slopes[:, -1, 0], 0.0)) < MOST_Z
    chance = n_distractors / 6  # of every place
    assert (np.abs(strange.sum(0) - 600 * chance) <= 4 * math.sqrt(600 * chance * (1 - chance))).all()


def test_distractors_may_be_noise():
    task = LinearRegression(x_dim=2, n_context=8, n_distractors=3, distractor_labels="noise", weight_scale=5.0)
    prompts, clean = task.sample(2000, seed=0), task.replace(n_distractors=0).sample(2000, seed=0)
    assert torch.equal(prompts.xs, clean.xs)
    changed = (prompts.ys != clean.ys)[..., 0]
    assert (changed.sum(1) == 3).all()
    assert not changed[:, -1].any()
    assert_follows(prompts.ys[changed].flatten().double().numpy(), scipy.stats.norm())
    assert np.abs(z_score(changed[:, :8].double().numpy(), 3 / 8)).max() < MOST_Z


def test_inputs_may_be_divided_by_the_norm_of_their_context():
    task = LinearRegression(x_dim=3, n_context=4, inputs=("exponential", "gaussian", "laplace"))
    plain, scaled = (each.sample(50, seed=0, dtype=torch.float64) for each in (
        task, task.replace(normalize_inputs=True, input_scale=2.0)
    ))  # fmt: skip
    for before, after in zip(plain.xs.numpy(), scaled.xs.numpy(), strict=True):
        np.testing.assert_allclose(after, 2 * before / np.sqrt((before[:-1] ** 2).sum()), rtol=1e-12)
    assert true_weights(scaled)[1] < 1e-9
    few = task.replace(normalize_inputs=True, active_dims=1).sample(50, seed=0, dtype=torch.float64)
    np.testing.assert_allclose(few.context.xs.square().sum((1, 2)), 1)


def test_its_text_has_the_sizes_and_the_fields_that_differ_from_the_defaults():
    assert repr(LinearRegression()) == "LinearRegression(x_dim=10, n_context=10)"
    task = LinearRegression(x_dim=2, inputs="gaussian", noise_std=0.5)
    assert repr(task) == "LinearRegression(x_dim=2, n_context=10, inputs='gaussian', noise_std=0.5)"
    assert repr(tasks.MarkovChains()) == "MarkovChains(d_vocab=3, n_ctx=64)"


@pytest.mark.parametrize("make", [lambda fields: task_from_dict({"type": "LinearRegression", **fields}),
                                  lambda fields: LinearRegression(**fields)], ids=["read", "made"])  # fmt: skip
def test_the_elements_of_a_large_covariance_are_not_visited_in_python(make):
    """The number of Python calls grows with the rows, not with the elements: 1,200 x 1,200 took 5 s."""

    def calls(x_dim: int) -> int:
        events: list[str] = []
        fields = {"x_dim": x_dim, "inputs": "gaussian", "covariance": torch.eye(x_dim).tolist()}
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            make(fields)
        finally:
            sys.setprofile(before)
        return events.count("call")

    calls(4)  # what is cached at a first call
    assert calls(120) - calls(60) < 60 * 60  # of 10,800 more elements, in 60 more rows
