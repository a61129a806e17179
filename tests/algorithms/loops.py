"""Algorithms on one prompt as plain loops over points and numbers, whose variables can be changed between steps.

Each function returns what one point carries after step k, from itself and the points that it reads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Point = dict[str, np.ndarray]
Step = Callable[[int, Point, list[Point]], Point]


def descent(k, point, context, step_size, gamma=0.0, momentum=0.0, matrix=None, clip=np.inf):
    """Residuals, refined inputs and a velocity."""
    pull, shrink = np.zeros_like(point["residual"]), np.zeros_like(point["x"])
    for other in context:
        right = other["x"] if matrix is None else matrix @ other["x"]
        pull = pull + step_size * sum(a * b for a, b in zip(point["x"], right, strict=True)) * other["residual"]
        shrink = shrink + gamma * float(other["x"] @ point["x"]) * other["x"]
    new = {"x": point["x"] - shrink}
    if momentum:
        pull = new["velocity"] = momentum * point["velocity"] + pull
    new["residual"] = point["residual"] - pull
    return {name: np.minimum(np.maximum(value, -clip), clip) for name, value in new.items()}


def query_descent(k, point, context, step_size):
    """A running prediction and a transformed input, from a context that stays."""
    new = dict(point)
    for other in context:
        score = step_size * float(other["x"] @ point["transformed x"])
        new["prediction"] = new["prediction"] + score * other["y"]
        new["transformed x"] = new["transformed x"] - score * other["x"]
    return new


def newton(k, point, context, n_steps, alpha=None, answer="at the end"):
    """Inputs times the inverse, and the answer at the end, anew or running."""
    new = dict(point)
    if k == 0:
        moments = sum((np.outer(p["x"], p["x"]) for p in context), np.zeros((len(point["x"]),) * 2))
        factor = alpha if alpha is not None else 1 / max(np.linalg.norm(moments @ moments.T), 1e-300)
        return new | {"inverse times x": point["inverse times x"] + factor * moments @ point["x"]}
    values = "residual" if answer == "running" else "y"
    read = np.zeros_like(point["y"])
    for other in context:
        read = read + float(other["inverse times x"] @ point["x"]) * other[values]
    if answer == "running":
        new["prediction"], new["residual"] = point["prediction"] + read, point["residual"] - read
    elif answer == "anew":
        new["prediction"] = read if context else point["prediction"]
    elif k == n_steps - 1:
        new["prediction"] = point["prediction"] + read
    if k < n_steps - 1 and not (answer == "running" and k == 1):
        sandwiched = np.zeros_like(point["x"])
        for other in context:
            sandwiched = sandwiched + float(other["inverse times x"] @ point["x"]) * other["inverse times x"]
        new["inverse times x"] = 2 * point["inverse times x"] - sandwiched
    return new


def online(k, point, context, step_size=None, offset=None):
    """One point's residual is taken from all others' in each step, at a rate of 1 / |x|², or as given."""
    residual = point["residual"]
    for other in context if k else []:
        square = float(other["x"] @ other["x"])
        rate = 1 / square if step_size is None else step_size / (1.0 if offset is None else offset + square)
        residual = residual - rate * float(other["x"] @ point["x"]) * other["turn"]
    return point | {"residual": residual, "turn": residual if point["number"].item() == k else 0 * residual}


def residual_ridge(k, point, context, penalty):
    """The prediction of ridge regression on the others' residuals is taken from the residual."""
    second, cross = penalty * np.eye(len(point["x"])), np.zeros((len(point["x"]), len(point["residual"])))
    for other in context:
        second = second + np.outer(other["x"], other["x"])
        cross = cross + np.outer(other["x"], other["residual"])
    return point | {"residual": point["residual"] - point["x"] @ np.linalg.solve(second, cross)}


def recursive(k, point, context, discount):
    """The inverse times x and the residual are corrected by point k."""
    new = dict(point)
    for other in context:
        if other["number"].item() == k:
            m, total = other["inverse times x"], discount + float(other["inverse times x"] @ other["x"])
            score = float(point["inverse times x"] @ other["x"])
            new["residual"] = point["residual"] - score / total * other["residual"]
            new["inverse times x"] = (point["inverse times x"] - score / total * m) / discount
    return new


def discounted(k, point, context, step_size, discount):
    """Residuals weighed by how far back their points lie."""
    residual = point["residual"]
    for other in context:
        weight = step_size * discount ** (point["number"].item() - other["number"].item())
        residual = residual - weight * float(other["x"] @ point["x"]) * other["residual"]
    return point | {"residual": residual}


def ridge_path(k, point, context, penalties):
    """The ridge prediction of the step's penalty."""
    if not context:
        return dict(point)
    xs, ys = np.stack([p["x"] for p in context]), np.stack([p["y"] for p in context])
    weights = np.linalg.solve(xs.T @ xs + penalties[k] * np.eye(xs.shape[1]), xs.T @ ys)
    return point | {"prediction": point["x"] @ weights}


def eigendirections(k, point, context):
    """Add the contribution of the context's eigendirection k to the least-squares prediction."""
    if k >= min(len(context), len(point["x"])):
        return dict(point)
    xs, ys = np.stack([p["x"] for p in context]), np.stack([p["y"] for p in context])
    left, values, right = np.linalg.svd(xs, full_matrices=False)
    added = (point["x"] @ right[k]) / values[k] * (left[:, k] @ ys)
    return point | {"prediction": point["prediction"] + added}


def nearest_neighbour(k, point, context):
    """The nearest point's residual is taken from every point's."""
    if not context:
        return dict(point)
    closest = min(context, key=lambda other: float(((other["x"] - point["x"]) ** 2).sum()))
    return point | {"residual": point["residual"] - closest["residual"]}


class PlainRun:
    """Points, the query last, that go through an algorithm's steps one by one."""

    def __init__(self, step: Step, points: list[Point], causal: bool = False):
        self.step, self.points, self.causal = step, [dict(point) for point in points], causal

    def run(self, steps: Any, *, context=True, query=True, reads=True, alone=False) -> "PlainRun":
        """Take steps; context or query may not change, the query not read, or points read only themselves."""
        n = len(self.points) - 1
        for k in steps:
            before, new = self.points, []
            for j, point in enumerate(before):
                seen = before[: j + 1] if self.causal and j < n else before[:n]
                seen = [] if j == n and not reads else seen
                seen = [point] if alone and j < n else seen
                moves = query if j == n else context
                new.append(self.step(k, point, seen) if moves else point)
            self.points = new
        return self

    def take(self, source: "PlainRun", where: slice, variables: tuple[str, ...] | None = None) -> "PlainRun":
        """Some points' variables from another run."""
        for point, other in zip(self.points[where], source.points[where], strict=True):
            for name in point if variables is None else variables:
                point[name] = other[name]
        return self
