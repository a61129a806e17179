import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms import spectra
from mechicl.algorithms.gradient_descent import gradient_descent_filter
from mechicl.learners import AlgorithmLearner

from .reference import awkward_prompts, descend, make_prompts, over_prefixes, prompts_of_any_size, transform

quick = settings(max_examples=40)
anyhow = pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")  # equal where it diverges, too
AWKWARD = awkward_prompts()
awkward = pytest.mark.parametrize("prompts", AWKWARD.values(), ids=AWKWARD.keys())


def assert_equal(ours, loops, relative=1e-12):
    loops = np.stack(loops)
    assert np.isfinite(loops).all()
    scale = max(1.0, np.abs(loops).max(initial=0.0))
    np.testing.assert_allclose(ours.detach().numpy(), loops, rtol=0, atol=relative * scale)


# ---- gradient descent ----


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
    assert_equal(ours, [over_prefixes(prompts, descend(steps, step_size, start))])


def test_no_step_predicts_the_initial_weights_everywhere():
    prompts = make_prompts(y_dim=2)
    start = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    predictions = algorithms.gradient_descent(prompts, 0, step_size=0.1, initial_weights=start).predictions[0]
    torch.testing.assert_close(predictions, prompts.xs @ start.double())


def test_a_step_size_above_the_stable_one_diverges_as_the_loop_does():
    prompts = make_prompts(n_prompts=2, scale=1.0)
    largest = torch.linalg.eigvalsh(prompts.context.xs.mT @ prompts.context.xs)[:, -1].min().item()
    step_size, steps = 3 / largest, [1, 30, 31, 150]
    with pytest.warns(algorithms.DivergenceWarning, match="100% of 2 contexts"):
        ours = algorithms.gradient_descent(prompts, steps, step_size=step_size).predictions.numpy()
    for slice_, k in zip(ours, steps, strict=True):
        loops = over_prefixes(prompts, descend(k, step_size))
        np.testing.assert_allclose(slice_, loops, rtol=1e-9, atol=1e-11 * np.abs(loops).max())
    assert np.abs(ours[-1, :, -1]).min() > 1e20


def test_a_diverged_prediction_is_infinite_or_nan_and_never_looks_converged():
    prompts = make_prompts(scale=1.0)
    with pytest.warns(algorithms.DivergenceWarning, match="100%"):
        far = algorithms.gradient_descent(prompts, 10**6, step_size=100.0, at="query").predictions
    assert not far.isfinite().any()


def test_thousands_of_steps_agree_with_the_loop():
    prompts = make_prompts(n_prompts=1, n_context=5, x_dim=3)
    ours = algorithms.gradient_descent(prompts, 3000, step_size=0.2).predictions
    assert_equal(ours, [over_prefixes(prompts, descend(3000, 0.2))], relative=1e-11)


def test_a_thousand_billion_steps_do_not_leave_the_span_of_a_short_context():
    """Rounding noise in the directions that no point spans would grow in proportion to the steps."""
    prompts = make_prompts(n_context=5, x_dim=10)
    ours = algorithms.gradient_descent(prompts, 10**12, step_size=0.2).predictions[0]
    loops = over_prefixes(prompts, lambda xs, ys, q: q @ (np.linalg.pinv(xs) @ ys) if len(xs) else np.zeros(1))
    np.testing.assert_allclose(ours.numpy(), loops, atol=1e-9)


@given(st.floats(1e-12, 1.9), st.integers(0, 60))
@quick
def test_the_filter_is_the_geometric_sum(scaled, steps):
    eigenvalue = torch.tensor([0.7], dtype=torch.float64)
    step_size = scaled / 0.7
    expected = math.fsum(step_size * (1 - scaled) ** k for k in range(steps))
    assert gradient_descent_filter(eigenvalue, steps, step_size).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("eigenvalue", [0.0, 5e-324, 1e-310, 1e-301, 1e-200, 1e-30, 1e-17])
def test_the_filter_of_a_vanishing_eigenvalue_is_steps_times_step_size(eigenvalue):
    value = gradient_descent_filter(torch.tensor([eigenvalue], dtype=torch.float64), 1000, 0.3)
    assert value.item() == pytest.approx(300, rel=1e-12)


# ---- GD++ ----


@anyhow
@awkward
def test_gd_plus_plus_equals_the_transformation_of_the_tokens(prompts):
    step_sizes, gammas = [0.1, 0.3, -0.2, 0.5, 0.05], [0.02, 0.0, 0.1, -0.05, 0.3]
    ours = algorithms.gd_plus_plus(prompts, [5], step_size=step_sizes, gamma=gammas).predictions
    assert_equal(ours, [over_prefixes(prompts, transform(step_sizes, gammas))])


@anyhow
@quick
@given(prompts_of_any_size(), st.integers(1, 6), st.floats(-0.3, 0.6), st.floats(-0.2, 0.3))
def test_gd_plus_plus_gives_all_steps_at_once_in_the_order_asked_for(prompts, steps, step_size, gamma):
    asked = [steps, 0, 1]
    ours = algorithms.gd_plus_plus(prompts, asked, step_size=step_size, gamma=gamma)
    assert ours.steps == tuple(asked)
    assert_equal(ours.predictions, [over_prefixes(prompts, transform([step_size] * k, [gamma] * k)) for k in asked])


def test_without_gamma_gd_plus_plus_is_gradient_descent():
    prompts = make_prompts(y_dim=2)
    ours = algorithms.gd_plus_plus(prompts, range(6), step_size=0.2, gamma=0).predictions
    torch.testing.assert_close(ours, algorithms.gradient_descent(prompts, range(6), step_size=0.2).predictions)


def test_a_gd_plus_plus_that_diverges_does_so_as_the_loop_does():
    prompts = make_prompts(n_prompts=2, n_context=6, x_dim=3, scale=1.0)
    with pytest.warns(algorithms.DivergenceWarning, match="100%"):
        ours = algorithms.gd_plus_plus(prompts, 4, step_size=1.5, gamma=0.9).predictions
    loops = over_prefixes(prompts, transform([1.5] * 4, [0.9] * 4))
    assert np.abs(loops).max() > 1e9
    np.testing.assert_allclose(ours[0].numpy(), loops, rtol=1e-6, atol=1e-12 * np.abs(loops).max())


# ---- both ----


def both(prompts, steps, **options):
    yield algorithms.gradient_descent(prompts, steps, step_size=0.2, **options)
    yield algorithms.gd_plus_plus(prompts, steps, step_size=0.2, gamma=0.05, **options)


@awkward
def test_the_query_alone_is_predicted_as_the_last_of_all_points(prompts):
    for alone, all_points in zip(both(prompts, [1, 9], at="query"), both(prompts, [1, 9], at="points"), strict=True):
        assert alone.predictions.shape == (2, len(prompts), 1, prompts.y_dim)
        torch.testing.assert_close(alone.query(), all_points.query(), rtol=1e-12, atol=1e-12)


def test_with_initial_weights_too():
    prompts, start = make_prompts(y_dim=2), torch.ones(4, 2, dtype=torch.float64)
    alone, everywhere = (
        algorithms.gradient_descent(prompts, 3, step_size=0.2, initial_weights=start, at=at).query()
        for at in ("query", "points")
    )
    torch.testing.assert_close(alone, everywhere)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_predictions_have_the_prompts_dtype_and_are_computed_in_float64(dtype):
    prompts = make_prompts(dtype=dtype)
    for low, high in zip(both(prompts, [5]), both(prompts.to(torch.float64), [5]), strict=True):
        assert low.predictions.dtype == dtype
        assert torch.equal(low.predictions, high.predictions.to(dtype))


@anyhow
def test_the_target_of_the_query_and_later_points_are_not_read():
    prompts = make_prompts()
    changed = make_prompts()
    changed.ys[:, 4:] += 100
    changed.xs[:, 5:] -= 3
    for before, after in zip(both(prompts, [1, 3]), both(changed, [1, 3]), strict=True):
        assert torch.equal(before.predictions[:, :, :5], after.predictions[:, :, :5])
        assert not torch.allclose(before.predictions[:, :, 5:], after.predictions[:, :, 5:])


@pytest.mark.parametrize("at", ["points", "query"])
@pytest.mark.parametrize("n_context", [0, 2, 7])
def test_the_gradient_with_respect_to_the_query_is_the_learned_weights(at, n_context):
    """Finite also where S is singular: fewer points than dimensions."""
    prompts = make_prompts(n_context=n_context)
    query = prompts.query.xs.clone().requires_grad_()
    ours = algorithms.gradient_descent(prompts.with_query(query), 4, step_size=0.3, at=at)
    (gradient,) = torch.autograd.grad(ours.query().sum(), query)
    for i in range(len(prompts)):
        context = prompts.context.xs[i].numpy(), prompts.context.ys[i].numpy()
        weights = [descend(4, 0.3)(*context, axis).item() for axis in np.eye(4)]
        np.testing.assert_allclose(gradient[i].numpy(), weights, atol=1e-12)


def counted_chunks(monkeypatch):
    """A list that fills with the number of prompts in each chunk."""
    sizes, make = [], spectra.PrefixSpectra.decompose

    def counted(xs, ys, at):
        sizes.append(len(xs))
        return make(xs, ys, at)

    monkeypatch.setattr(spectra.PrefixSpectra, "decompose", staticmethod(counted))
    return sizes


def test_a_large_input_is_worked_on_in_chunks_with_equal_results(monkeypatch):
    prompts = make_prompts(n_prompts=11, y_dim=2)
    whole = [t.predictions for t in both(prompts, [1, 2, 3])]
    sizes = counted_chunks(monkeypatch)
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 8 * 4 * 4 * 3)
    for expected, chunked in zip(whole, both(prompts, [1, 2, 3]), strict=True):
        torch.testing.assert_close(chunked.predictions, expected, rtol=1e-13, atol=1e-13)
    assert sizes == [3, 3, 3, 2] * 2
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 1)
    for expected, chunked in zip(whole, both(prompts, [1, 2, 3]), strict=True):
        torch.testing.assert_close(chunked.predictions, expected, rtol=1e-13, atol=1e-13)
    assert sizes[8:] == [1] * 22


def test_many_steps_count_towards_the_size_of_a_chunk(monkeypatch):
    prompts, sizes = make_prompts(n_prompts=4), counted_chunks(monkeypatch)
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 8 * 4 * 50)
    algorithms.gradient_descent(prompts, range(100), step_size=0.1)
    assert sizes == [1] * 4


def test_as_a_learner_gradient_descent_predicts_after_its_last_step():
    prompts = make_prompts(y_dim=2)
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": [1, 6], "step_size": 0.1})
    loops = over_prefixes(prompts, descend(6, 0.1))
    np.testing.assert_allclose(learner.predict_prefixes(prompts).numpy(), loops, atol=1e-12)
    np.testing.assert_allclose(learner.predict(prompts).numpy(), loops[:, -1], atol=1e-12)


# ---- refusals ----


@pytest.mark.parametrize("steps", [[], [-1], -2, [1, True], True])
def test_steps_that_are_no_whole_numbers_from_zero_are_refused(steps):
    with pytest.raises(ValueError, match="whole numbers >= 0"):
        algorithms.gradient_descent(make_prompts(), steps, step_size=0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_that_are_not_finite_are_refused(value):
    prompts = make_prompts()
    with pytest.raises(ValueError, match="step_size must be finite"):
        algorithms.gradient_descent(prompts, step_size=value)
    with pytest.raises(ValueError, match="step_size must be finite"):
        algorithms.gd_plus_plus(prompts, step_size=value, gamma=0.0)
    with pytest.raises(ValueError, match="gamma must be finite"):
        algorithms.gd_plus_plus(prompts, 2, step_size=0.1, gamma=[0.0, value])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_parameters_than_of_steps_is_refused(count):
    with pytest.raises(ValueError, match=f"gamma has {count} entries for 3 steps"):
        algorithms.gd_plus_plus(make_prompts(), [1, 3], step_size=0.1, gamma=[0.1] * count)


@pytest.mark.parametrize("shape", [(4, 1), (1, 2), (2, 4), (1, 1)])
def test_initial_weights_of_another_shape_are_refused_rather_than_broadcast(shape):
    with pytest.raises(ValueError, match="initial_weights must be"):
        algorithms.gradient_descent(make_prompts(y_dim=2), step_size=0.1, initial_weights=torch.zeros(shape))
