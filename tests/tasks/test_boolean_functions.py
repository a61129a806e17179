import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from mechicl.tasks import Conjunctions, Parities


def explains(literals, xs, ys):
    return all(
        (y == 1) == all(v in (0, x) for v, x in zip(literals, row, strict=True)) for row, y in zip(xs, ys, strict=True)
    )


@given(st.integers(1, 4), st.integers(0, 6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_targets_are_those_of_some_conjunction(d, n, p, share, seed):
    task = Conjunctions(d, n, p, share)
    prompts = task.sample(3, seed=seed)
    assert (prompts.xs.abs() == 1).all()
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
        assert any(explains(f, xs, ys) for f in itertools.product((-1, 0, 1), repeat=d))


def test_the_share_of_positives_is_that_of_the_model():
    task = Conjunctions(x_dim=8, n_context=40, literal_probability=0.3, positive_share=0.3)
    positives = (task.sample(4000, seed=0).ys > 0).double().mean()
    of_uniform = (1 - 0.3 / 2) ** 8  # E 2^-m
    assert abs(positives - (0.3 + 0.7 * of_uniform)) < 0.01
    plain = task.replace(positive_share=0.0).sample(4000, seed=0)
    assert abs((plain.ys > 0).double().mean() - of_uniform) < 0.01
    assert plain.xs.mean((0, 1)).abs().max() < 0.02


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 10**6), st.data())
def test_targets_are_those_of_some_parity_of_the_degree(d, n, seed, data):
    degree = data.draw(st.none() | st.integers(0, d))
    prompts = Parities(d, n, degree).sample(3, seed=seed)
    sizes = range(d + 1) if degree is None else [degree]
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
        assert any(
            all(math.prod(x[i] for i in subset) == y for x, y in zip(xs, ys, strict=True))
            for size in sizes
            for subset in itertools.combinations(range(d), size)
        )


def test_subsets_are_equally_likely():
    """A parity's correlation with its own product is 1, with others 0: means over prompts are the subsets' chances."""
    prompts = Parities(x_dim=4, n_context=200, degree=2).sample(3000, seed=0)
    for i, j in itertools.combinations(range(4), 2):
        agrees = (prompts.xs[..., i] * prompts.xs[..., j] == prompts.ys[..., 0]).all(1)
        assert abs(agrees.double().mean() - 1 / 6) < 0.03
