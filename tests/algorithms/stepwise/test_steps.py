"""Algorithms step by step against those in eigenbases and against numpy; schedules and subspaces of hypotheses."""

import numpy as np
import torch
from hypothesis import given, settings

from mechicl import algorithms
from mechicl.algorithms.stepwise import (
    AfterCopying,
    Hypothesis,
    Induction,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    ResidualDescent,
    RidgePath,
    Runs,
    StepwiseAlgorithm,
)
from mechicl.algorithms.stepwise.descent import nearest
from mechicl.algorithms.stepwise.hypothesis import variables_of
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge, RidgeByDirections
from mechicl.learners import Learner, Trajectory
from mechicl.prompts import Prompts
from tests.algorithms.reference import prompts_of_any_size

GAMMAS = (0.03, 0.02, 0.0)


def matrix(x_dim: int) -> torch.Tensor:
    return 0.1 * torch.eye(x_dim, dtype=torch.float64) + 0.05 * torch.ones(x_dim, x_dim).double().triu(1)


def momentum_by_weights(prompts: Prompts, steps: int, step_size: float, momentum: float) -> np.ndarray:
    """Heavy ball on the weights: V ← βV + a (B - SW), W ← W + V."""
    out = []
    for xs, ys in zip(prompts.xs.double().numpy(), prompts.ys.double().numpy(), strict=True):
        weights = velocity = np.zeros((xs.shape[1], ys.shape[1]))
        for _ in range(steps):
            velocity = momentum * velocity + step_size * xs[:-1].T @ (ys[:-1] - xs[:-1] @ weights)
            weights = weights + velocity
        out.append(xs[-1] @ weights)
    return np.stack(out)


@settings(max_examples=20)
@given(prompts_of_any_size())
def test_predictions_are_those_of_the_algorithms(prompts):
    n, x_dim = prompts.n_context, prompts.x_dim
    a = matrix(x_dim)
    pairs: list[tuple[StepwiseAlgorithm, Trajectory]] = [
        (ResidualDescent(3, step_size=0.05), algorithms.gradient_descent(prompts, 3, step_size=0.05)),
        (QueryDescent(3, step_size=0.05), algorithms.gradient_descent(prompts, 3, step_size=0.05)),
        (
            ResidualDescent(3, step_size=(0.05, 0.04, 0.1), gamma=GAMMAS),
            algorithms.gd_plus_plus(prompts, 3, step_size=(0.05, 0.04, 0.1), gamma=GAMMAS),
        ),
        (
            ResidualDescent(2, step_size=1 / max(n, 1), preconditioner=a),
            algorithms.preconditioned_gd(prompts, 2, preconditioner=a),
        ),
        *((NewtonSteps(4, answer=how), algorithms.newton(prompts, 4)) for how in ("at the end", "anew", "running")),
        (NewtonSteps(2, alpha=1e-4), algorithms.newton(prompts, 2, alpha=1e-4)),
        (RidgePath((10.0, 0.3)), algorithms.ridge(prompts, penalty=0.3)),
        (RidgeByDirections(x_dim, penalty=0.3), algorithms.ridge(prompts, penalty=0.3)),
        (MomentsThenRidge(penalty=0.3), algorithms.ridge(prompts, penalty=0.3)),
    ]
    if n:
        pairs.append((OnlineDescent(n), algorithms.online_gradient_descent(prompts)))
        pairs.append((OnlineDescent(n, step_size=0.1), algorithms.online_gradient_descent(prompts, step_size=0.1)))
        pairs.append((AfterCopying(pairs[2][0]), pairs[2][1]))
        pairs.append((KernelReading(nearest), algorithms.nearest_neighbours(prompts, n_neighbours=1)))
    for algorithm, expected in pairs:
        assert isinstance(algorithm, Learner)
        wanted = expected.query()[0]
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(algorithm.predict(prompts), wanted, rtol=0, atol=1e-7 * scale, msg=algorithm.name)


def test_every_step_of_a_trajectory_and_every_prefix():
    prompts = Prompts(*(0.5 * torch.randn(2, 3, 5, d, dtype=torch.float64)[0] for d in (2, 1)))
    reached = QueryDescent(3, step_size=0.1).trajectory(prompts)
    expected = algorithms.gradient_descent(prompts, [0, 1, 2, 3], step_size=0.1)
    torch.testing.assert_close(reached.predictions, expected.predictions)
    torch.testing.assert_close(ResidualDescent(3, step_size=0.1).predict_prefixes(prompts), expected.predictions[-1])


def test_momentum_is_the_heavy_ball_on_the_weights():
    prompts = Prompts(torch.randn(3, 7, 3), torch.randn(3, 7, 2))
    expected = momentum_by_weights(prompts, 5, 0.03, 0.6)
    got = ResidualDescent(5, step_size=0.03, momentum=0.6).predict(Prompts(prompts.xs.double(), prompts.ys.double()))
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_causal_points_read_only_what_came_before():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 1).double())
    algorithm = ResidualDescent(3, step_size=0.1, causal=True)
    state = algorithm.states(prompts)[2]
    for t in range(1, 5):  # what follows a point does not change what it carries
        shorter = algorithm.states(prompts.prefix(t))[2]
        for name, value in shorter.items():
            torch.testing.assert_close(state[name][:, :t], value[:, :t])
    # a point sees itself
    own = prompts.ys[:, 0] - 0.1 * prompts.ys[:, 0] * prompts.xs[:, 0].square().sum(-1, keepdim=True)
    torch.testing.assert_close(algorithm.states(prompts)[1]["residual"][:, 0], own)


def test_before_copying_targets_are_at_tokens_of_their_own():
    prompts = Prompts(torch.randn(2, 4, 3), torch.randn(2, 4, 1))
    algorithm = AfterCopying(ResidualDescent(2, step_size=0.1))
    before, after = algorithm.states(prompts)[:2]
    assert not before["residual"].any()
    torch.testing.assert_close(before["target"][:, :-1], prompts.context.ys.double())
    torch.testing.assert_close(after["residual"], before["target"])


def test_normalized_weights_are_those_of_the_points_that_are_seen():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 1).double())

    def weights(readers: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return (readers @ points.mT).exp()

    algorithm = KernelReading(weights, normalized=True, causal=True)
    residuals = algorithm.states(prompts)[1]["residual"]
    for row in range(2):
        for j in range(6):
            seen = slice(0, min(j + 1, 5))
            shares = (prompts.xs[row, seen] @ prompts.xs[row, j]).softmax(0)
            start = prompts.ys[row, j] if j < 5 else 0.0
            torch.testing.assert_close(residuals[row, j], start - shares @ prompts.ys[row, seen])


def test_moments_are_collected_before_anything_is_solved():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 2).double())
    state = MomentsThenRidge(penalty=0.5).states(prompts)[1]
    for row, (xs, ys) in enumerate(zip(prompts.context.xs.numpy(), prompts.context.ys.numpy(), strict=True)):
        expected = np.concatenate([sum(np.outer(x, np.append(x, y)) for x, y in zip(xs, ys, strict=True))])
        for point in range(6):
            np.testing.assert_allclose(state["moments"][row, point].reshape(3, 5), expected, atol=1e-12)
    assert not state["prediction"].any()
    seen = MomentsThenRidge(causal=True).states(prompts)[1]["moments"]
    torch.testing.assert_close(
        seen[:, 0].reshape(2, 3, 5)[..., :3], torch.einsum("pi,pj->pij", *[prompts.xs[:, 0]] * 2)
    )


def test_induction_takes_the_target_of_the_nearest_input_that_a_target_remembers():
    prompts = Prompts(torch.randn(4, 6, 3).double(), torch.randn(4, 6, 2).double())
    algorithm = Induction()
    start, remembered, end = algorithm.states(prompts)
    assert not start["previous"].any()
    torch.testing.assert_close(remembered["previous"], prompts.xs)
    for row in range(4):
        distances = [((x - prompts.xs[row, -1]) ** 2).sum().item() for x in prompts.context.xs[row]]
        best = prompts.ys[row, int(np.argmin(distances))]
        torch.testing.assert_close(algorithm.read({k: v[:, -1:] for k, v in end.items()})[row], best)
    # without the first step nothing tells the targets apart
    skipped = Runs(algorithm, algorithm.states(prompts), algorithm.states(prompts)).skip(range(1), "context")
    torch.testing.assert_close(skipped, prompts.context.ys.mean(1))


# ---- hypotheses ----

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


def test_the_rest_is_the_complement_of_all_subspaces():
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    hypothesis = Hypothesis(DESCENT, subspaces={"x": basis[:, :3], "residual": basis[:, 3:4]})
    assert hypothesis.rest is not None
    torch.testing.assert_close(hypothesis.rest @ hypothesis.rest.T, basis[:, 4:] @ basis[:, 4:].T)
    assert Hypothesis(DESCENT).rest is None
    assert Hypothesis(DESCENT, subspaces={"x": basis}).rest is None
    assert variables_of("x, residual") == ("x", "residual")
