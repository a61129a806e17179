import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms import spectra
from mechicl.algorithms.gradient_descent import gradient_descent_filter

from .reference import awkward, descend, make_prompts, over_prefixes, prompts_of_any_size, transform

quick = settings(max_examples=15)
anyhow = pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")  # equal where it diverges, too


def assert_equal(ours, loops, relative=1e-12):
    loops = np.stack(loops)
    assert np.isfinite(loops).all()
    scale = max(1.0, np.abs(loops).max(initial=0.0))
    np.testing.assert_allclose(ours.detach().numpy(), loops, rtol=0, atol=relative * scale)


@anyhow
@awkward
@pytest.mark.parametrize("step_size", [0.05, 0.3, -0.1])
def test_gradient_descent_equals_the_plain_loop_on_every_prefix_and_step(prompts, step_size):
    steps = [7, 0, 1, 2, 40]
    ours = algorithms.gradient_descent(prompts, steps, step_size=step_size)
    assert ours.steps == tuple(steps)
    assert_equal(ours.predictions, [over_prefixes(prompts, descend(k, step_size)) for k in steps], relative=1e-11)


@anyhow
@quick
@given(prompts_of_any_size(), st.integers(0, 12), st.floats(-0.5, 2.0), st.integers(0, 100))
def test_gradient_descent_with_initial_weights_equals_the_plain_loop(prompts, steps, step_size, seed):
    start = np.random.default_rng(seed).standard_normal((prompts.x_dim, prompts.y_dim))
    ours = algorithms.gradient_descent(
        prompts, [steps], step_size=step_size, initial_weights=torch.from_numpy(start)
    ).predictions
    assert_equal(ours, [over_prefixes(prompts, descend(steps, step_size, start), empty=True)])


def test_a_diverged_prediction_is_infinite_or_nan_and_never_looks_converged():
    prompts = make_prompts(scale=1.0)
    with pytest.warns(algorithms.DivergenceWarning, match="100%"):
        far = algorithms.gradient_descent(prompts, 10**6, step_size=100.0, at="query").predictions
    assert not far.isfinite().any()


def test_a_thousand_billion_steps_do_not_leave_the_span_of_a_short_context():
    """Rounding noise in the directions that no point spans would grow in proportion to the steps."""
    prompts = make_prompts(n_context=5, x_dim=10)
    ours = algorithms.gradient_descent(prompts, 10**12, step_size=0.2).predictions[0]
    loops = over_prefixes(prompts, lambda xs, ys, q: q @ (np.linalg.pinv(xs) @ ys))
    np.testing.assert_allclose(ours.numpy(), loops, atol=1e-9)


@pytest.mark.parametrize("eigenvalue", [0.0, 5e-324, 1e-310, 1e-301, 1e-200, 1e-30, 1e-17])
def test_the_filter_of_a_vanishing_eigenvalue_is_steps_times_step_size(eigenvalue):
    value = gradient_descent_filter(torch.tensor([eigenvalue], dtype=torch.float64), 1000, 0.3)
    assert value.item() == pytest.approx(300, rel=1e-12)


@anyhow
@awkward
def test_gd_plus_plus_equals_the_transformation_of_the_tokens(prompts):
    step_sizes, gammas = [0.1, 0.3, -0.2, 0.5, 0.05], [0.02, 0.0, 0.1, -0.05, 0.3]
    ours = algorithms.gd_plus_plus(prompts, [5], step_size=step_sizes, gamma=gammas).predictions
    assert_equal(ours, [over_prefixes(prompts, transform(step_sizes, gammas))])


@anyhow
@quick
@given(prompts_of_any_size(), st.integers(1, 6), st.floats(-0.3, 0.6), st.floats(-0.2, 0.3))
def test_gd_plus_plus_gives_all_steps_at_once_in_the_requested_order(prompts, steps, step_size, gamma):
    counts = [steps, 0, 1]
    ours = algorithms.gd_plus_plus(prompts, counts, step_size=step_size, gamma=gamma)
    assert ours.steps == tuple(counts)
    assert_equal(ours.predictions, [over_prefixes(prompts, transform([step_size] * k, [gamma] * k)) for k in counts])


def test_many_steps_count_towards_the_size_of_a_chunk(monkeypatch):
    prompts, sizes, decompose = make_prompts(n_prompts=4), [], spectra.PrefixSpectra.decompose

    def counted(xs, ys, at):
        sizes.append(len(xs))
        return decompose(xs, ys, at)

    monkeypatch.setattr(spectra.PrefixSpectra, "decompose", staticmethod(counted))
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 8 * 4 * 50)
    algorithms.gradient_descent(prompts, range(100), step_size=0.1)
    assert sizes == [1] * 4
