"""Weights of families: the information criterion by hand, and what they may and may not do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour import FamilyMatch
from mechicl.analysis.behaviour.families import family_weights
from mechicl.tasks import LinearRegression

WIDER = LinearRegression(x_dim=3, n_context=8)


def test_weights_are_the_criterion_where_prompts_agree():
    distances, fitted = [0.05, 0.1, 0.02], [2, 1, 6]
    rows = torch.tensor(distances)[:, None].expand(3, 40).double()
    pairs = zip([*distances, 0.12], [*fitted, 0], strict=True)
    scores = [-(20 - 0.7 * k) / 2 * math.log(d / 4 + 1e-10) for d, k in pairs]
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(
        family_weights(rows, fitted, 4.0, evidence=20.0, price=0.7, elsewhere=0.03).numpy(), expected[:3], rtol=1e-6
    )


def test_resampled_prompts_keep_an_answer_open():
    generator = torch.Generator().manual_seed(0)
    shared = torch.rand(4000, generator=generator, dtype=torch.float64)
    noisy = shared + 2 * (torch.rand(4000, generator=generator, dtype=torch.float64) < 0.05)  # a few prompts go astray
    for n, sure in ((8, 0.95), (4000, 0.99)):
        rows = torch.stack([shared, noisy])[:, :n]
        weights = family_weights(rows, [1, 1], 0.3, evidence=64, elsewhere=1e9)
        assert (weights[0] > sure) == (n == 4000)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 30)), min_size=1, max_size=5),
    st.integers(2, 9),
    st.floats(0.5, 200),
)
def test_weights_are_shares(families, n, evidence):
    rows = torch.tensor([distance for distance, _ in families], dtype=torch.float64)[:, None].expand(-1, n)
    weights = family_weights(rows, [k for _, k in families], 1.0, evidence=evidence)
    assert weights.sum().item() <= 1 + 1e-9
    assert (weights >= 0).all()


def test_families_with_infinite_distances_have_no_weight():
    rows = torch.tensor([[1.0, math.inf], [1.0, 1.0]], dtype=torch.float64)
    assert family_weights(rows, [0, 9], 1.0, elsewhere=1e30).tolist() == [0, pytest.approx(1)]


def test_what_is_like_nothing_is_none_of_them():
    nothing = _identification(one=(0.9, 2), other=(0.8, 3))
    assert next(iter(nothing.weights)) == "none of these"
    assert nothing.confidence < 0.1
    assert sum(nothing.weights.values()) == pytest.approx(1)


def _identification(**distances: tuple[float, int]) -> Identification:
    def match(name: str, distance: float, fitted: int) -> FamilyMatch:
        squared = torch.full((30,), distance, dtype=torch.float64)
        return FamilyMatch(name.replace("_", ", "), None, {}, fitted, squared, torch.ones_like(squared), squared)

    matches = [match(name, *values) for name, values in distances.items()]
    ones = torch.ones(30, dtype=torch.float64)
    return Identification(matches, [], ones, ones, ones[None])


def test_the_answer_is_the_likeliest_family_and_its_likeliest_member():
    nested = _identification(general=(0.0100, 20), plain_3=(0.0101, 2), plain_4=(0.0103, 2), other=(0.5, 0))
    assert nested.best.name == "general"
    assert nested.answer.name == "plain, 3"
    assert next(iter(nested.weights)) == "plain"
    assert nested.weights["plain"] > 1e3 * nested.weights["general"]
    assert nested.confidence == nested.weights["plain"] > 0.9
    assert "plain, 3 (with a confidence of 100%)" in str(nested).splitlines()[-1]
    worth_it = _identification(general=(1e-6, 20), plain_3=(0.0101, 2))
    assert worth_it.answer.name == "general"


def test_a_model_that_runs_its_algorithm_almost_is_called_by_it():
    """A family that contains the right one comes nearer, since it takes some of the noise too."""
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.4, steps=3)
    noisy = constructions.hide(model, seed=2, noise=1e-3).model
    result = identify(noisy, WIDER, n_prompts=200, with_limits=False, progress=False)
    assert result.limits == []
    assert result.distance(result.best).mean > 1e-8
    assert result.answer.name == "gradient descent, 3 steps"
    assert result.answer.family == "gradient descent"
