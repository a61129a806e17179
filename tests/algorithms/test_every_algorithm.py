"""The common properties of all algorithms: their axes, their precision, what they read, and their weights."""

import pytest
import torch

from mechicl import algorithms
from tests.algorithms.reference import make_prompts

POOL = torch.linspace(-1, 1, 24).reshape(3, 4, 2)
ALGORITHMS = {
    "gradient_descent": {"steps": [0, 1, 7], "step_size": 0.05},
    "gradient_descent from other weights": {"steps": [0, 3], "step_size": 0.05, "initial_weights": torch.ones(4, 2)},
    "gd_plus_plus": {"steps": [1, 3], "step_size": 0.05, "gamma": 0.01},
    "newton": {"steps": [0, 2, 5]},
    "ols": {},
    "ridge": {"penalty": 0.3},
    "bayes": {"noise_std": 0.2},
    "dmmse": {"pool": torch.cat([POOL, -POOL]), "noise_std": 1.0},
    "mixture_bayes": {"noise_stds": (0.2, 1.0)},
    "sparse_bayes": {"sparsity": 2, "noise_std": 0.3},
    "lasso": {"penalty": 0.05},
    "greedy_tree": {"depth": 2},
    "chebyshev": {"steps": [1, 2]},
    "steepest_descent": {"steps": [1, 3]},
    "conjugate_gradient": {"steps": [1, 3]},
    "ridge_path": {"steps": [0, 3]},
    "preconditioned_gd": {"steps": [1, 2], "preconditioner": 0.3 * torch.eye(4)},
    "online_gradient_descent": {},
    "averaging": {},
    "nearest_neighbours": {},
    "kernel_smoothing": {"bandwidth": [0.5, 1.0]},
    "network_descent": {"n_hidden": 3, "steps": 2},
    "on_features": {"features": torch.square},
}
NOT_LINEAR = ("nearest_neighbours", "kernel_smoothing", "greedy_tree", "network_descent", "on_features")
LINEAR = [name for name in ALGORITHMS if name not in NOT_LINEAR]
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
PROMPTS = make_prompts(y_dim=2)


def run(name, prompts, **options):
    return getattr(algorithms, name.split()[0])(prompts, **ALGORITHMS[name], **options)


@every_algorithm
def test_the_query_alone_is_predicted_as_the_last_of_all_points(name):
    everything, query = run(name, PROMPTS), run(name, PROMPTS, at="query")
    steps = ALGORITHMS[name].get("steps", ALGORITHMS[name].get("bandwidth", [1]))
    steps = steps if isinstance(steps, list) else [steps]
    assert everything.steps == query.steps == tuple(steps)
    assert everything.predictions.shape == (len(steps), 3, 8, 2)
    assert everything.weights is None
    torch.testing.assert_close(query.predictions, everything.predictions[:, :, -1:], rtol=1e-10, atol=1e-12)
    if name in LINEAR:
        weights = [run(name, PROMPTS, at=at, with_weights=True).weights for at in ("points", "query")]
        torch.testing.assert_close(weights[1], weights[0][:, :, -1:], rtol=1e-9, atol=1e-10)


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictions_have_the_prompts_dtype_and_are_computed_in_float64(name, dtype):
    prompts = PROMPTS.to(dtype)
    low, high = run(name, prompts).predictions, run(name, prompts.to(torch.float64)).predictions
    assert low.dtype == dtype
    assert torch.equal(low, high.to(dtype))


@every_algorithm
def test_the_points_own_target_and_later_points_are_not_read(name):
    changed = make_prompts(y_dim=2)
    changed.ys[:, 4:] += 100
    changed.xs[:, 5:] -= 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **options: None)  # the changed prompts may diverge
        before, after = run(name, PROMPTS).predictions, run(name, changed).predictions
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:])


@every_algorithm
def test_without_a_context_the_prediction_is_zero_or_that_of_the_initial_weights(name):
    prompts = PROMPTS.prefix(0)
    expected = prompts.xs.sum(-1, keepdim=True).expand(-1, -1, 2) if "other weights" in name else 0 * prompts.ys
    predictions = run(name, prompts).predictions
    torch.testing.assert_close(predictions, expected.expand_as(predictions))


@every_algorithm
def test_many_prompts_are_worked_on_in_parts_with_equal_results(name, monkeypatch):
    whole = run(name, PROMPTS)
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(run(name, PROMPTS).predictions, whole.predictions, rtol=1e-11, atol=1e-11)
    assert run(name, PROMPTS[:0]).predictions.shape == (len(whole.steps), 0, 8, 2)


@pytest.mark.parametrize("name", LINEAR)
def test_weights_are_the_predictions_of_unit_queries_and_the_gradient_of_the_query(name):
    trajectory = run(name, PROMPTS, with_weights=True)
    weights = trajectory.weights
    assert weights is not None
    assert weights.shape == (len(trajectory.steps), 3, 8, 4, 2)
    for t in (0, 2, 7):  # also fewer points than dimensions, where S is singular
        prefix = PROMPTS.prefix(t)
        for i in range(4):
            unit = torch.eye(4, dtype=torch.float64)[i].expand(3, 4)
            expected = run(name, prefix.with_query(unit), at="query").query()
            torch.testing.assert_close(weights[:, :, t, i], expected, atol=1e-9, rtol=1e-9)
        for at in ("points", "query"):
            query = prefix.query.xs.clone().requires_grad_()
            last = run(name, prefix.with_query(query), at=at).query()[-1]
            (gradient,) = torch.autograd.grad(last.sum(), query)
            torch.testing.assert_close(gradient, weights[-1, :, t].sum(-1), atol=1e-9, rtol=1e-9)
