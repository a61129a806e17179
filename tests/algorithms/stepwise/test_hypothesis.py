"""Schedules and subspaces of hypotheses."""

import pytest
import torch

from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.algorithms.stepwise.hypothesis import variables_of

DESCENT = ResidualDescent(3, step_size=0.1)


def test_by_default_a_layer_is_a_step():
    hypothesis = Hypothesis(DESCENT)
    assert hypothesis.schedule == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert hypothesis.between == ((1, 1), (2, 2))
    assert hypothesis.segments[1] == (range(1, 2), range(1, 2))
    assert hypothesis.name == DESCENT.name


def test_layers_may_share_steps_and_steps_layers():
    hypothesis = Hypothesis(DESCENT, schedule=((0, 0), (2, 0), (3, 2), (5, 3)), name="mine")
    assert hypothesis.n_layers == 5
    assert hypothesis.segments == ((range(2), range(0)), (range(2, 3), range(2)), (range(3, 5), range(2, 3)))


@pytest.mark.parametrize(
    "schedule", [((1, 0), (3, 3)), ((0, 0), (3, 2)), ((0, 0), (2, 2), (2, 3)), ((0, 0), (1, 2), (2, 1), (3, 3))]
)
def test_a_schedule_that_falls_or_ends_early_is_refused(schedule):
    with pytest.raises(ValueError, match="schedule"):
        Hypothesis(DESCENT, schedule=schedule)


def test_the_rest_is_what_no_variable_lies_in():
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    hypothesis = Hypothesis(DESCENT, subspaces={"x": basis[:, :3], "residual": basis[:, 3:4]})
    assert hypothesis.rest is not None
    torch.testing.assert_close(hypothesis.rest @ hypothesis.rest.T, basis[:, 4:] @ basis[:, 4:].T)
    assert Hypothesis(DESCENT).rest is None
    assert Hypothesis(DESCENT, subspaces={"x": basis}).rest is None
    assert variables_of("x, residual") == ("x", "residual")


def test_subspaces_are_orthonormal_and_of_variables_that_exist():
    with pytest.raises(ValueError, match="not orthonormal"):
        Hypothesis(DESCENT, subspaces={"x": torch.ones(4, 2)})
    with pytest.raises(ValueError, match="has the variables"):
        Hypothesis(DESCENT, subspaces={"momentum": torch.eye(4)[:, :1]})
    with pytest.raises(ValueError, match="all subspaces together"):
        _ = Hypothesis(DESCENT, subspaces={"x": torch.eye(4)[:, :2], "residual": torch.eye(4)[:, 1:2]}).rest
