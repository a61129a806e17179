"""Averaging and nearest neighbours against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl.algorithms import averaging, nearest_neighbours
from tests.algorithms.reference import make_prompts, over_prefixes


def average(xs, ys, query):
    if len(xs) == 0:
        return np.zeros(ys.shape[1])
    return query @ (sum(np.outer(x, y) for x, y in zip(xs, ys, strict=True)) / len(xs))


def nearest(n_neighbours):
    def predict(xs, ys, query):
        if len(xs) == 0:
            return np.zeros(ys.shape[1])
        order = sorted(range(len(xs)), key=lambda i: (((xs[i] - query) ** 2).sum(), i))
        return np.mean([ys[i] for i in order[:n_neighbours]], axis=0)

    return predict


@given(x_dim=st.integers(1, 4), y_dim=st.integers(1, 3), n_context=st.integers(0, 7), k=st.integers(1, 9))
def test_any_shape(x_dim, y_dim, n_context, k):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim, y_dim=y_dim)
    for got, expected in (
        (averaging(prompts), average),
        (nearest_neighbours(prompts, n_neighbours=k), nearest(k)),
    ):
        np.testing.assert_allclose(got.predictions[0], over_prefixes(prompts, expected), rtol=1e-12, atol=1e-13)


def test_ties_go_to_the_earlier_points():
    prompts = make_prompts(n_context=5)
    prompts.xs[:] = 1.0
    got = nearest_neighbours(prompts, n_neighbours=2).predictions[0]
    torch.testing.assert_close(got[:, -1], prompts.ys[:, :2].mean(1))


def test_no_neighbours_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        nearest_neighbours(make_prompts(), n_neighbours=0)
