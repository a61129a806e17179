import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mechicl.algorithms.spectra import PrefixSpectra, checked_steps, spectral_trajectory

from .reference import awkward_prompts, make_prompts, prompts_of_any_size

AWKWARD = awkward_prompts()
awkward = pytest.mark.parametrize("prompts", AWKWARD.values(), ids=AWKWARD.keys())


@awkward
def test_eigenvalues_are_those_of_each_prefixs_second_moments(prompts):
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, "points")
    for i, xs in enumerate(prompts.xs.numpy()):
        for t in range(len(xs)):
            expected = np.linalg.eigvalsh(sum((np.outer(x, x) for x in xs[:t]), np.zeros((xs.shape[1],) * 2)))
            ours = spectra.eigenvalues[i, t].numpy()
            np.testing.assert_allclose(ours, expected, atol=1e-14 * max(1, expected.max()))
            assert (np.diff(ours) >= 0).all()


@awkward
def test_eigenvalues_are_never_negative_and_exactly_zero_beyond_the_number_of_points(prompts):
    for at in ("points", "query"):
        spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, at)
        assert (spectra.eigenvalues >= 0).all()
        counts = range(prompts.n_context + 1) if at == "points" else [prompts.n_context]
        for position, count in enumerate(counts):
            unreached = max(0, prompts.x_dim - count)
            assert not spectra.eigenvalues[:, position, :unreached].any()
            assert not spectra.target_coordinates[:, position, :unreached].any()


@settings(max_examples=15)
@given(prompts_of_any_size())
def test_a_filter_that_is_the_eigenvalue_multiplies_by_the_second_moments(prompts):
    ours = spectral_trajectory(
        prompts, lambda values: torch.stack([values, values**2]), name="powers", steps=(1, 2), at="query"
    ).predictions
    xs, ys = prompts.context
    second = xs.mT @ xs
    once = prompts.query.xs[:, None] @ second @ (xs.mT @ ys)
    twice = prompts.query.xs[:, None] @ second @ second @ (xs.mT @ ys)
    torch.testing.assert_close(ours[0], once, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours[1], twice, rtol=0, atol=1e-10)


def test_an_unknown_choice_of_points_is_refused():
    with pytest.raises(Exception, match="points") as caught:
        spectral_trajectory(make_prompts(), lambda v: v[None], name="", at="last")  # pyright: ignore[reportArgumentType]
    assert "last" in str(caught.value)


@pytest.mark.parametrize(("steps", "numbers"), [(3, (3,)), ([2, 0, 2], (2, 0, 2)), (range(3), (0, 1, 2))])
def test_steps_come_back_as_a_tuple_in_the_order_given(steps, numbers):
    assert checked_steps(steps) == numbers
