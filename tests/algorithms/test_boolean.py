import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.prompts import Prompts
from mechicl.tasks import Conjunctions, Parities


def rows(prompts):
    return zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True)


def conjunction(literals, x):
    return 1 if all(v in (0, a) for v, a in zip(literals, x, strict=True)) else -1


def plain_conjunction_bayes(xs, ys, t, p, share):
    d = len(xs[0])
    total = mean = 0.0
    for f in itertools.product((-1, 0, 1), repeat=d):
        m = sum(map(abs, f))
        weight = (p / 2) ** m * (1 - p) ** (d - m)
        for i in range(t + 1):
            value = conjunction(f, xs[i])
            weight *= (1 - share) * 0.5**d + (share * 0.5 ** (d - m) if value == 1 else 0)
            if i < t and value != ys[i]:
                weight = 0.0
        total += weight
        mean += weight * conjunction(f, xs[t])
    return mean / total


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(0, 5), st.floats(0.1, 0.9), st.floats(0, 0.9), st.integers(0, 10**6))
def test_conjunction_bayes_by_a_plain_loop(d, n, p, share, seed):
    prompts = Conjunctions(d, n, p, share).sample(2, seed=seed, dtype=torch.float64)
    got = algorithms.conjunction_bayes(prompts, literal_probability=p, positive_share=share).predictions[0, ..., 0]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        for t in range(n + 1):
            assert math.isclose(predicted[t], plain_conjunction_bayes(xs, ys, t, p, share), abs_tol=1e-9)


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.3), (1.0, 0.3), (0.3, 1.0), (0.0, 0.0)])
def test_conjunction_bayes_at_the_ends_of_its_settings(p, share):
    prompts = Conjunctions(3, 6, p, share).sample(20, seed=0)
    got = algorithms.conjunction_bayes(prompts, literal_probability=p, positive_share=share).predictions[0]
    assert got.isfinite().all()
    if p == 0.0 or share == 1.0:
        assert torch.allclose(got, torch.ones_like(got))


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 10**6), st.data())
def test_parity_bayes_by_a_plain_loop(d, n, seed, data):
    degree = data.draw(st.none() | st.integers(0, d))
    prompts = Parities(d, n, degree).sample(2, seed=seed)
    got = algorithms.parity_bayes(prompts, degree=degree).predictions[0, ..., 0]
    sizes = range(d + 1) if degree is None else [degree]
    subsets = [s for size in sizes for s in itertools.combinations(range(d), size)]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        for t in range(n + 1):
            left = [s for s in subsets if all(math.prod(xs[i][j] for j in s) == ys[i] for i in range(t))]
            mean = sum(math.prod(xs[t][j] for j in s) for s in left) / len(left)
            assert math.isclose(predicted[t], mean, abs_tol=1e-6)


@given(st.integers(1, 7), st.integers(0, 12), st.integers(0, 10**6))
def test_elimination_over_two_elements_is_bayes_over_all_parities(d, n, seed):
    prompts = Parities(d, n, None).sample(4, seed=seed, dtype=torch.float64)
    exact = algorithms.parity_bayes(prompts, degree=None).predictions
    assert torch.allclose(algorithms.gf2_elimination(prompts).predictions, exact)


@given(st.integers(1, 5), st.integers(0, 8), st.integers(0, 10**6))
def test_elimination_by_a_plain_loop(d, n, seed):
    prompts = Conjunctions(d, n).sample(3, seed=seed)
    got = algorithms.elimination(prompts).predictions[0, ..., 0]
    for (xs, ys), predicted in zip(rows(prompts), got.tolist(), strict=True):
        kept = {(i, v) for i in range(d) for v in (-1, 1)}
        for t in range(n + 1):
            assert predicted[t] == (1 if all(xs[t][i] == v for i, v in kept) else -1)
            if ys[t] == 1:
                kept = {(i, v) for i, v in kept if xs[t][i] == v}


def test_contexts_that_nothing_explains_predict_0():
    xs = torch.ones(1, 3, 2)
    ys = torch.tensor([[[1.0], [-1.0], [1.0]]])
    prompts = Prompts(xs, ys)
    for learner in (algorithms.conjunction_bayes, algorithms.parity_bayes):
        assert learner(prompts).predictions[0, 0, -1, 0] == 0
