"""Gradient descent on one prompt as a plain loop over its points, whose variables can be changed between steps."""

import numpy as np


class PlainDescent:
    """Residuals of the context's points and the query's prediction, one number after the other."""

    def __init__(self, xs: np.ndarray, ys: np.ndarray, query: np.ndarray, step_size: float):
        self.xs, self.residuals, self.query = [x.copy() for x in xs], [y.copy() for y in ys], query
        self.prediction, self.step_size = np.zeros(ys.shape[1]), step_size

    def pull(self, x: np.ndarray) -> np.ndarray:
        total = np.zeros_like(self.prediction)
        for point, residual in zip(self.xs, self.residuals, strict=True):
            total += self.step_size * float(point @ x) * residual
        return total

    def step(self, *, context: bool = True, query: bool = True) -> None:
        pulls = [self.pull(x) for x in self.xs]
        at_query = self.pull(self.query)
        if context:
            self.residuals = [r - pull for r, pull in zip(self.residuals, pulls, strict=True)]
        if query:
            self.prediction = self.prediction + at_query

    def run(self, steps: int, **who: bool) -> "PlainDescent":
        for _ in range(steps):
            self.step(**who)
        return self
