"""Every card of the library has an independent computation: a plain loop that the card's family contains."""

import sys

import numpy as np
import pytest
import scipy
import torch

from mechicl.algorithms.card import Algorithm, FitProblem
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import (
    Predict,
    at_query,
    average,
    descend,
    discounted,
    iterate,
    pass_over,
    precondition,
    recursion,
    transform,
)
from tests.algorithms.test_baselines import nearest
from tests.algorithms.test_descent import chebyshev, search_lines
from tests.algorithms.test_every_algorithm import on_the_path
from tests.algorithms.test_least_squares import lstsq, solve
from tests.algorithms.test_other_regressions import flow, huber, kernel, l1, unit_lms, unit_ridge

PROMPTS = LinearRegression(x_dim=3, n_context=8).sample(60, seed=0, dtype=torch.float64)
MATRIX = np.array([[0.5, 0.1, 0.0], [0.2, 0.4, 0.1], [0.0, 0.1, 0.6]])


def on_one_and_x(matrix: np.ndarray) -> Predict:
    def predict(xs, ys, query):
        features = np.concatenate([np.ones((len(xs), 1)), xs], axis=1)
        return precondition([matrix])(features, ys, np.concatenate([[1.0], query]))

    return predict


INDEPENDENT: dict[str, Predict] = {
    "gradient descent": descend(3, 0.3),
    "GD++": transform([0.3] * 3, [0.05] * 3),
    "gradient descent with momentum": descend(3, 0.2, momentum=0.4),
    "Newton": iterate(3),
    "preconditioned gradient descent": precondition([MATRIX]),
    "kernel gradient descent on 1 and x": on_one_and_x(np.pad(MATRIX, (1, 0), constant_values=0.2)),
    "any first-order learner": transform([0.2, 0.4], [0.0, 0.0]),
    "any function of S": descend(1, 0.3),
    "Chebyshev": chebyshev(2),
    "steepest descent": search_lines(1, conjugate=False),
    "conjugate gradients": search_lines(1, conjugate=True),
    "least squares": lstsq,
    "ridge": solve(0.5),
    "ridge path": on_the_path(1),
    "averaging": average,
    "nearest neighbours": nearest(3),
    "softmax smoothing": lambda xs, ys, query: scipy.special.softmax(xs @ query / 0.1) @ ys,
    "online gradient descent": pass_over(0.4),
    "normalised LMS": pass_over(0.4, offset=0.1),
    "recursive least squares": recursion(0.3, 0.9),
    "discounted gradient descent": discounted(0.8, scale=0.3),
    "discounted averaging": discounted(0.8, mean=True),
    "gradient flow": flow,
    "kernel ridge": kernel,
    "Huber regression": huber,
    "lasso": l1,
    "least mean squares on unit inputs": unit_lms,
    "ridge on unit inputs": unit_ridge,
}
OF_BANDWIDTHS = ("softmax smoothing",)  # the step form takes the best of 16


def nearest_error(card: Algorithm, problem: FitProblem) -> float:
    """Return the least relative error of the card's fitted members, first steps or step forms."""
    learners = [member.learner for member in card.members(problem)]
    if not learners and card.path is not None:
        learners = [card.on(problem.prompts, steps=(1,))]
    if not learners and card.step_forms is not None:
        learners = list(card.step_forms(problem))
    return (
        min(problem.error(each.predict(problem.prompts)) for each in learners) / problem.targets.square().mean().item()
    )


def of_the_library() -> dict[str, Algorithm]:
    """Return the cards that modules of the library define; other tests register their own."""
    modules = [module for name, module in sys.modules.items() if name.startswith("mechicl.algorithms.")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Algorithm)}


def test_every_card_has_an_independent_computation():
    assert of_the_library().keys() == INDEPENDENT.keys(), "add a plain loop of the new algorithm to INDEPENDENT"


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_family_contains_what_a_plain_loop_predicts(name):
    targets = at_query(PROMPTS, INDEPENDENT[name])
    problem = FitProblem(PROMPTS, torch.from_numpy(targets).expand(3, -1, -1), steps=3)
    assert nearest_error(of_the_library()[name], problem) < (0.05 if name in OF_BANDWIDTHS else 1e-8)
