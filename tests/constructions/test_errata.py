"""Errata of the papers: each printed statement fails here, and the corrected one is true."""

import dataclasses

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.algorithms import newton_moments
from mechicl.constructions import Head, Stream, assemble
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import descend, iterate, precondition
from tests.constructions.reference import assert_same, at_query, random_prompts

# ---- Fu et al. 2024, A.1 (eq. 10) and C.3: α = 2 / ‖S Sᵀ‖₂ ----


def newton_with(fraction: float, prompts: Prompts, steps: int) -> np.ndarray:
    """Predict with the construction at a fraction of the printed α, on one prompt."""
    xs = prompts.context.xs[0].numpy()
    alpha = fraction * 2 / float(np.linalg.norm(xs.T @ xs @ xs.T @ xs, 2))
    model = constructions.newton(x_dim=3, n_context=8, steps=steps, alpha=alpha)
    return model.predict(prompts).detach().numpy()


def top_direction_prompts() -> tuple[Prompts, np.ndarray]:
    """Return a prompt whose query is the top eigenvector of S, and the prediction of least squares."""
    prompts = random_prompts(8, 3, 1, n_prompts=1)
    xs, ys = prompts.context.xs[0].numpy(), prompts.context.ys[0].numpy()
    top = np.linalg.eigh(xs.T @ xs)[1][:, -1]
    return prompts.with_query(torch.from_numpy(top)[None]), (top @ np.linalg.lstsq(xs, ys, rcond=None)[0])[None]


def test_at_the_printed_alpha_the_top_direction_goes_to_2_and_then_stays_0():
    prompts, least_squares = top_direction_prompts()
    assert_same(torch.from_numpy(newton_with(1, prompts, 0)), 2 * least_squares)
    for steps in (1, 5, 12):
        assert np.abs(newton_with(1, prompts, steps)).max() < 1e-9 * np.abs(least_squares).max()


# ---- Fu et al. 2024, section 3 and C.3: the iterates as polynomials ----


@pytest.mark.parametrize(
    ("steps", "corrected", "printed"), [(1, [2, -1], [2, -4]), (2, [4, -6, 4, -1], [4, -12, 16, -16])]
)
def test_the_coefficients_of_the_first_two_iterates(steps, corrected, printed):
    prompts, alpha = random_prompts(y_dim=1), 0.02

    def polynomial(coefficients):
        def predict(xs, ys, query):
            second = xs.T @ xs
            powers = [np.linalg.matrix_power(second, 2 * s + 1) for s in range(len(coefficients))]
            inverse = sum(c * alpha ** (s + 1) * powers[s] for s, c in enumerate(coefficients))
            return query @ inverse @ xs.T @ ys

        return at_query(prompts, predict)

    model = constructions.newton(x_dim=3, n_context=6, steps=steps, alpha=alpha)
    assert_same(model.predict(prompts), polynomial(corrected))
    assert_same(model.predict(prompts), at_query(prompts, iterate(steps, alpha)))
    assert newton_moments(steps, 1.0) == corrected
    difference = np.abs(model.predict(prompts).detach().numpy() - polynomial(printed)).max()
    assert difference > 0.05 * np.abs(polynomial(corrected)).max()


# ---- Nertinger 2025, Theorem 4: the sign of Q_0 ----


def as_printed(sign: int, d: int = 5, n: int = 20) -> HookedTransformer:
    """Build ReLU attention that reads out minus the query's y, with P_0 = 1 for y and Q_0 = `sign` c I for x."""
    stream = Stream(x=d, y=1)
    scale = 1 / (0.5 * (n - 1) / n + (d + 2) / n)
    head = Head(sign * scale * stream.read("x"), stream.read("x"), stream.read("y"), stream.write("y"))
    return assemble(stream, [[head]], n_context=n, attention="relu", normalize_by_context=True)


def test_the_printed_sign_of_relu_attention_has_loss_14_and_the_negative_one_has_2():
    prompts = LinearRegression(x_dim=5, n_context=20, inputs="gaussian").sample(30_000, seed=0, dtype=torch.float64)
    printed = interval(squared_errors(as_printed(+1), prompts), level=0.999)
    negative = interval(squared_errors(as_printed(-1), prompts), level=0.999)
    optimum = interval(squared_errors(constructions.relu_optimum(x_dim=5, n_context=20), prompts), level=0.999)
    scale = 1 / (0.5 * 19 / 20 + 7 / 20)
    exact = 5 + scale * 5 + scale**2 * (19 / 20 * 5 / 4 + 5 * 7 / 2 / 20)  # minus a prediction adds the cross term
    assert exact == pytest.approx(14.1, abs=0.05)
    assert exact in printed
    assert 1.970 in negative
    assert 1.970 in optimum
    assert printed.low > 5 > optimum.high  # 5 is the loss of predicting 0


# ---- The lecture note on ICL, Theorem 2.1: the learning rate by scaling W_Q or W_K by its root ----


@pytest.mark.parametrize(("query", "key", "power"), [(0.5, 0, 0.5), (0, 0.5, 0.5), (0.5, 0.5, 1), (1, 0, 1), (0, 1, 1)])
def test_one_root_gives_a_root_and_two_roots_or_one_whole_the_learning_rate(query, key, power):
    prompts, rate = random_prompts(y_dim=1), 0.09
    stream = Stream(x=3, y=1)
    head = Head(rate**query * stream.read("x"), rate**key * stream.read("x"), stream.read("y"), -stream.write("y"))
    model = assemble(stream, [[head]], n_context=6)
    assert_same(model.predict(prompts), at_query(prompts, descend(1, rate**power)))
    is_the_learning_rate = np.allclose(model.predict(prompts).detach().numpy(), at_query(prompts, descend(1, rate)))
    assert is_the_learning_rate == (power == 1)


# ---- von Oswald et al. 2023, A.9 (eq. 16 to 21): two softmax heads ----


def centred(xs, ys, query):
    scores = xs @ query
    return 0.1 * (scores - scores.mean()) @ ys


def relative_errors(sink: bool, expected, scales=(0.1, 0.01, 0.001)) -> np.ndarray:
    prompts = random_prompts(n_context=10, x_dim=4)
    exact, errors = at_query(prompts, expected), []
    for score_scale in scales:
        model = constructions.softmax_gradient_descent(
            x_dim=4, y_dim=2, n_context=10, step_size=0.1, score_scale=score_scale, sink=sink
        )
        errors.append(np.abs(model.predict(prompts).detach().numpy() - exact).max() / np.abs(exact).max())
    return np.array(errors)


def test_without_a_sink_the_limit_is_not_gradient_descent():
    errors = relative_errors(False, descend(1, 0.1))
    assert errors.min() > 0.05
    assert errors[1] == pytest.approx(errors[2], rel=1e-3)  # and it stays away


@pytest.mark.parametrize(("sink", "limit"), [(False, centred), (True, descend(1, 0.1))])
def test_the_limit_is_the_centred_sum_and_with_a_sink_gradient_descent(sink, limit):
    errors = relative_errors(sink, limit)
    np.testing.assert_allclose(errors[1:] / errors[:-1], 0.01, rtol=0.05)  # the square of the score scale
    assert errors[-1] < 1e-5


# ---- Nertinger 2025, section 2: W + η A ∇L ----


def flipped(model: HookedTransformer) -> HookedTransformer:
    """Return the model with the opposite sign of every step: `W + A ∇L`."""
    with torch.no_grad():
        model.blocks[0].attn.W_O.neg_()
    return model


def test_preconditioned_gradient_descent_goes_down_the_gradient():
    prompts = random_prompts(n_context=40, y_dim=1)
    weights = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    prompts = dataclasses.replace(prompts, ys=prompts.xs @ weights)
    matrix = np.diag([1.0, 2.0, 3.0])

    def model(steps):
        return constructions.preconditioned_gd(
            x_dim=3, n_context=40, preconditioner=torch.from_numpy(matrix), steps=steps
        )

    def loss(learner):
        return squared_errors(learner, prompts).mean().item()

    zero = prompts.query.ys.square().mean().item()
    assert loss(model(1)) < zero < loss(flipped(model(1))) < loss(flipped(model(4))) / 2
    assert loss(model(25)) < 1e-3 * zero
    assert_same(flipped(model(4)).predict(prompts), at_query(prompts, precondition([-matrix] * 4)))
