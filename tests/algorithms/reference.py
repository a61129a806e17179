"""The algorithms as plain numpy loops over prompts, prefixes and steps."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mechicl.prompts import Prompts

Predict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def over_prefixes(prompts: Prompts, predict: Predict, *, empty: bool = False) -> np.ndarray:
    """Call `predict(X, Y, x_q)` for every prefix, `[prompt point y]`; 0 for the empty ones, unless `empty`."""
    xs, ys = (values.detach().double().numpy() for values in (prompts.xs, prompts.ys))
    out = np.zeros_like(ys)
    for prompt in range(len(xs)):
        for t in range(0 if empty else 1, xs.shape[1]):
            out[prompt, t] = predict(xs[prompt, :t], ys[prompt, :t], xs[prompt, t])
    return out


def at_query(prompts: Prompts, predict: Predict) -> np.ndarray:
    """Return `predict(X, Y, x_q)` for every prompt, `[prompt y]`."""
    xs, ys = prompts.xs.numpy(), prompts.ys.numpy()
    return np.stack([predict(x[:-1], y[:-1], x[-1]) for x, y in zip(xs, ys, strict=True)])


def assert_same(ours: Tensor, expected: np.ndarray | list[np.ndarray], tolerance: float = 1e-9) -> None:
    """Assert equality up to a fraction of the largest expected value, or of 1."""
    expected = np.stack(expected) if isinstance(expected, list) else expected
    assert np.isfinite(expected).all()
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=0, atol=tolerance * scale)


def average(xs, ys, query):
    return query @ (sum(np.outer(x, y) for x, y in zip(xs, ys, strict=True)) / len(xs))


def descend(steps: int, step_size: float, start: np.ndarray | None = None, momentum: float = 0.0) -> Predict:
    """Gradient descent on the weights, one residual after the other."""

    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1])) if start is None else start.copy()
        velocity = np.zeros_like(weights)
        for _ in range(steps):
            gradient = np.zeros_like(weights)
            for x, y in zip(xs, ys, strict=True):
                gradient += np.outer(x, x @ weights - y)
            velocity = momentum * velocity - step_size * gradient
            weights = weights + velocity
        return query @ weights

    return predict


def pass_over(
    step_size: float | None = None, *, offset: float | None = None, discount: float = 1.0, epochs: int = 1
) -> Predict:
    """Online gradient descent, point by point; normalised by |x|² plus an offset if that or no step size is given."""

    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1]))
        for x, y in zip(np.tile(xs, (epochs, 1)), np.tile(ys, (epochs, 1)), strict=True):
            rate = 1.0 if step_size is None else step_size
            if step_size is None or offset is not None:
                rate = rate / ((offset or 0.0) + x @ x) if x @ x > 0 else 0.0
            weights = discount * weights
            weights = weights - rate * np.outer(x, x @ weights - y)
        return query @ weights

    return predict


def recursion(penalty: float, discount: float) -> Predict:
    """The textbook recursion of recursive least squares: weights and an inverse, point by point."""

    def predict(xs, ys, query):
        weights, inverse = np.zeros((query.size, ys.shape[1])), np.eye(query.size) / penalty
        for x, y in zip(xs, ys, strict=True):
            gain = inverse @ x / (discount + x @ inverse @ x)
            weights = weights + np.outer(gain, y - x @ weights)
            inverse = (inverse - np.outer(gain, x @ inverse)) / discount
        return query @ weights

    return predict


def discounted(discount: float, *, penalty: float | None = None, scale: float = 1.0, mean: bool = False) -> Predict:
    """Discounted moments, one added to the other point by point; with a penalty, solved for the weights."""

    def predict(xs, ys, query):
        second, cross, total = np.zeros((query.size,) * 2), np.zeros((query.size, ys.shape[1])), 0.0
        for x, y in zip(xs, ys, strict=True):
            second, cross = discount * second + np.outer(x, x), discount * cross + np.outer(x, y)
            total = discount * total + 1
        weights = cross if penalty is None else np.linalg.solve(second + penalty * np.eye(query.size), cross)
        return scale * query @ weights / (total if mean and total else 1.0)

    return predict


def precondition(matrices: list[np.ndarray]) -> Predict:
    """Preconditioned gradient descent on the mean squared error, one residual after the other."""

    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1]))
        for matrix in matrices:
            gradient = np.zeros_like(weights)
            for x, y in zip(xs, ys, strict=True):
                gradient += np.outer(x, x @ weights - y) / len(xs)
            weights = weights - matrix @ gradient
        return query @ weights

    return predict


def iterate(steps: int, alpha: float | None = None, penalty: float = 0.0) -> Predict:
    """Iterative Newton on the second moments plus `penalty` times the identity; alpha is 1 over their squared norm."""

    def predict(xs, ys, query):
        second = penalty * np.eye(query.size)
        for x in xs:
            second += np.outer(x, x)
        inverse = (alpha or 1 / max(np.linalg.norm(second @ second), 1e-300)) * second
        for _ in range(steps):
            inverse = 2 * inverse - inverse @ second @ inverse
        return query @ inverse @ (xs.T @ ys)

    return predict


def transform(step_sizes: list[float], gammas: list[float]) -> Predict:
    """GD++ as appendix A.10 has it: every step rewrites the tokens; minus the query's y is the prediction."""

    def predict(xs, ys, query):
        xs, ys, query = xs.copy(), ys.copy(), query.copy()
        query_y = np.zeros(ys.shape[1])
        for a, g in zip(step_sizes, gammas, strict=True):
            update = a * sum((np.outer(x, y) for x, y in zip(xs, ys, strict=True)), np.zeros((query.size, ys.shape[1])))
            second = sum((np.outer(x, x) for x in xs), np.zeros((query.size, query.size)))
            ys, query_y = ys - xs @ update, query_y - query @ update
            xs, query = xs - g * xs @ second, query - g * query @ second
        return -query_y

    return predict


def make_prompts(n_prompts=3, n_context=7, x_dim=4, y_dim=1, seed=0, dtype=torch.float64, scale=0.5) -> Prompts:
    """Normal inputs and targets."""
    rng = np.random.default_rng(seed)
    xs = scale * rng.standard_normal((n_prompts, n_context + 1, x_dim))
    ys = rng.standard_normal((n_prompts, n_context + 1, y_dim))
    return Prompts(torch.from_numpy(xs).to(dtype), torch.from_numpy(ys).to(dtype))


def awkward_prompts() -> dict[str, Prompts]:
    """Contexts that strain a spectral method, each by the name of its trouble."""
    plain = make_prompts(x_dim=3, y_dim=2)
    repeated = Prompts(plain.xs[:, [0, 0, 0, 0, 1, 1, 0, 2]], plain.ys)
    flat = Prompts(plain.xs * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), plain.ys)
    rng = np.random.default_rng(1)
    rotation = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    spread = rng.standard_normal((3, 8, 3)) * [1.0, 1e-3, 1e-5] @ rotation
    return {
        "no context": make_prompts(n_context=0, y_dim=2),
        "fewer points than dimensions": make_prompts(n_context=3, x_dim=9),
        "repeated points": repeated,
        "rank-deficient": flat,
        "an input that is zero": Prompts(plain.xs * (torch.arange(8) != 2)[None, :, None], plain.ys),
        "eigenvalues from 1 to 1e-10": Prompts(torch.from_numpy(spread), plain.ys),
        "more targets than inputs": make_prompts(x_dim=2, y_dim=5),
        "one dimension": make_prompts(x_dim=1),
        "all inputs zero": Prompts(torch.zeros_like(plain.xs), plain.ys),
        "no prompts": plain[:0],
    }


awkward = pytest.mark.parametrize("prompts", [pytest.param(each, id=name) for name, each in awkward_prompts().items()])


@st.composite
def prompts_of_any_size(draw: st.DrawFn, max_x_dim: int = 6, max_context: int = 8) -> Prompts:
    """Random prompts; now and then with a repeated point."""
    n_context, x_dim = draw(st.integers(0, max_context)), draw(st.integers(1, max_x_dim))
    prompts = make_prompts(2, n_context, x_dim, draw(st.integers(1, 3)), draw(st.integers(0, 2**20)))
    if n_context > 1 and draw(st.booleans()):
        prompts.xs[:, 1] = prompts.xs[:, 0]
    return prompts
