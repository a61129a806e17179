"""The common properties of all algorithms: axes, precision, what they read, weights, and arguments refused by name."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters
from mechicl.algorithms.stepwise import (
    DiscountedDescent,
    Hypothesis,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    RecursiveSteps,
    ResidualDescent,
    RidgePath,
    Runs,
)
from mechicl.algorithms.stepwise.copying import best_match
from mechicl.algorithms.stepwise.descent import nearest
from mechicl.algorithms.stepwise.hypothesis import select_interventions
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge, RidgeByDirections
from mechicl.prompts import Prompts, TokenSequences
from mechicl.tasks import GaussianClusters, Parities, RepeatedTokens
from tests.algorithms.reference import (
    Predict,
    average,
    descend,
    discounted,
    make_prompts,
    over_prefixes,
    pass_over,
    precondition,
    recursion,
)
from tests.algorithms.test_descent import search_lines
from tests.algorithms.test_least_squares import solve

# ---- every algorithm ----
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
    "online_gradient_descent with weight decay": {"step_size": 0.1, "discount": 0.9},
    "online_gradient_descent, normalised": {"step_size": 0.5, "offset": 0.3},
    "recursive_least_squares": {"penalty": 0.3, "discount": 0.9},
    "recursive_least_squares, lasting penalty": {"penalty": 0.3, "discount": 0.8, "fading": False},
    "discounted_gradient_descent": {"step_size": 0.1, "discount": 0.8},
    "discounted_averaging": {"discount": 0.8},
    "averaging": {},
    "nearest_neighbours": {},
    "kernel_smoothing": {"bandwidth": 0.5},
    "network_descent": {"n_hidden": 3, "steps": 2},
    "on_features": {"features": torch.square},
}
NOT_LINEAR = ("nearest_neighbours", "kernel_smoothing", "greedy_tree", "network_descent", "on_features")
LINEAR = [name for name in ALGORITHMS if name not in NOT_LINEAR]
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
PROMPTS = make_prompts(y_dim=2)


def run(name, prompts, **options):
    return getattr(algorithms, re.split("[ ,]", name)[0])(prompts, **ALGORITHMS[name], **options)


@every_algorithm
def test_the_query_alone_is_predicted_as_the_last_of_all_points(name):
    everything, query = run(name, PROMPTS), run(name, PROMPTS, at="query")
    steps = ALGORITHMS[name].get("steps", [1])
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


# ---- plain loops ----
def on_the_path(step: int) -> Predict:
    """Ridge with a penalty that starts at the size of the prefix's moments and is halved at every step."""
    return lambda xs, ys, query: solve(np.linalg.norm(xs.T @ xs @ xs.T @ xs) ** 0.5 / 2**step)(xs, ys, query)


MATRICES = [0.3 * torch.eye(4).double() + 0.1 * torch.ones(4, 4).double().triu(k) for k in (1, 2, 3)]
LOOPS: list[tuple[str, dict[str, Any], Callable[[int], Predict]]] = [  # algorithm, options, and its loop of some steps
    ("preconditioned_gd", {"steps": [0, 1, 3], "preconditioner": MATRICES},
     lambda k: precondition([matrix.numpy() for matrix in MATRICES[:k]])),
    ("steepest_descent", {"steps": [0, 1, 2, 4, 9]}, lambda k: search_lines(k, conjugate=False)),
    ("conjugate_gradient", {"steps": [0, 1, 2, 4, 9]}, lambda k: search_lines(k, conjugate=True)),
    ("ridge_path", {"steps": [4, 0, 1]}, on_the_path),
    ("online_gradient_descent", {}, lambda k: pass_over()),
    ("online_gradient_descent", {"step_size": 0.3}, lambda k: pass_over(0.3)),
    ("online_gradient_descent", {"step_size": 0.1, "discount": 0.8}, lambda k: pass_over(0.1, discount=0.8)),
    ("online_gradient_descent", {"step_size": 0.4, "offset": 0.3}, lambda k: pass_over(0.4, offset=0.3)),
    ("online_gradient_descent", {"step_size": 0.4, "offset": 0.0}, lambda k: pass_over(0.4, offset=0.0)),
    *(("recursive_least_squares", {"penalty": 0.3, "discount": d}, lambda k, d=d: recursion(0.3, d))
      for d in (1.0, 0.6)),
    *(("recursive_least_squares", {"penalty": 0.3, "discount": d, "fading": False},
       lambda k, d=d: discounted(d, penalty=0.3)) for d in (1.0, 0.6)),
    ("online_gradient_descent", {"offset": 0.0}, lambda k: pass_over()),
    ("discounted_gradient_descent", {"step_size": 0.1}, lambda k: descend(1, 0.1)),
    ("discounted_gradient_descent", {"step_size": 0.1, "discount": 0.7}, lambda k: discounted(0.7, scale=0.1)),
    ("discounted_averaging", {}, lambda k: average),
    ("discounted_averaging", {"discount": 0.7}, lambda k: discounted(0.7, mean=True)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")
@pytest.mark.parametrize(("name", "options", "loop"), LOOPS)
def test_every_prefix_and_step_is_the_plain_loop(name, options, loop):
    prompts = make_prompts(y_dim=2)
    prompts.xs[0, 2] = 0
    found = getattr(algorithms, name)(prompts, **options)
    for k, predictions in zip(found.steps, found.predictions, strict=True):
        np.testing.assert_allclose(predictions, over_prefixes(prompts, loop(k)), rtol=1e-7, atol=1e-9)


# ---- errors ----
SIGNS, LABELS = Parities(x_dim=12, n_context=2).sample(1, seed=0), GaussianClusters().sample(1, seed=0)
TOKENS = TokenSequences(torch.tensor([[0, 1, 2]]), torch.tensor([[False, True, True]]))
REAL, BLANK_XS, BLANK_YS = make_prompts(), make_prompts(), make_prompts()
BLANK_XS.xs[:], BLANK_YS.ys[:] = 0, 0
HALVES, ONES = Prompts(SIGNS.xs / 2, SIGNS.ys), Prompts(torch.ones(1, 3, 3), torch.ones(1, 3, 1))
EYE, DESCENT = torch.eye(4), ResidualDescent(3, step_size=0.1)
OVERLAPPING = {"x": EYE[:, :2], "residual": EYE[:, 1:2]}
MANY = GaussianClusters(n_context=20).sample(1, seed=0)
TABLE: dict[str, Any] = {"means": torch.zeros(3, 2), "labels": torch.eye(3), "frequencies": torch.ones(3) / 3}
nan, inf = math.nan, math.inf


def runs() -> Runs:
    return Runs(DESCENT, *[DESCENT.states(REAL)] * 2)


OPTIONS: list[tuple[str, dict[str, Any], str]] = [  # algorithm, options, and what the message names
    *(
        (name, options | {"steps": steps}, "steps")
        for name, options in (("gradient_descent", {"step_size": 0.1}), ("newton", {}), ("conjugate_gradient", {}))
        for steps in ([], [-1], -2, [1, True], True)
    ),
    *((name, {"step_size": value}, "step_size") for name in ("gradient_descent", "online_gradient_descent")
      for value in (nan, inf)),
    *(("gradient_descent", {"step_size": 0.1, "initial_weights": torch.zeros(shape)}, "initial_weights")
      for shape in ((4, 2), (1, 2), (2, 4), (1, 1))),  # some would be broadcast
    ("gd_plus_plus", {"step_size": -inf, "gamma": 0.0}, "step_size"),
    ("gd_plus_plus", {"step_size": 0.1, "steps": 2, "gamma": [0.0, inf]}, "gamma"),
    *(("gd_plus_plus", {"step_size": 0.1, "steps": [1, 3], "gamma": [0.1] * n}, "gamma") for n in (0, 2, 4)),
    *(("newton", {"alpha": alpha}, "alpha") for alpha in (0.0, nan)),
    *(("preconditioned_gd", {"steps": 2, "preconditioner": m}, "preconditioner") for m in (EYE[:3], [EYE])),
    *((name, {"penalty": penalty}, "penalty") for name in ("ridge", "lasso", "recursive_least_squares")
      for penalty in (0, inf)),
    *((name, options | {"discount": discount}, "discount") for discount in (0.0, 1.1, nan) for name, options in (
        ("recursive_least_squares", {"penalty": 1.0}), ("discounted_gradient_descent", {"step_size": 0.1}),
        ("discounted_averaging", {}))),
    ("online_gradient_descent", {"offset": -0.1}, "offset"),
    ("bayes", {"noise_std": -0.1}, "noise_std"),
    ("bayes", {"noise_std": 0.1, "weight_std": 0.0}, "weight_std"),
    *(("bayes", {"weight_covariance": m}, "weight_covariance") for m in (EYE[:3, :3], EYE.cumsum(0), -EYE)),
    *(("dmmse", {"pool": torch.zeros(shape), "noise_std": 0.5}, "pool") for shape in ((3, 5), (0, 4), (3, 4, 2))),
    ("dmmse", {"pool": torch.full((3, 4), nan), "noise_std": 0.5}, "pool"),
    ("mixture_bayes", {"noise_stds": ()}, "noise_stds"),
    ("mixture_bayes", {"noise_stds": (0.1, 0.2), "weight_stds": (1.0, 1.0, 1.0)}, "weight_stds"),
    ("mixture_bayes", {"noise_stds": (0.1, 0.0)}, "noise_stds"),
    *(("sparse_bayes", {"sparsity": sparsity}, "sparsity") for sparsity in (0, 5)),
    ("greedy_tree", {"depth": 0}, "depth"),
    ("nearest_neighbours", {"n_neighbours": 0}, "n_neighbours"),
    *(("kernel_smoothing", {"bandwidth": h}, "bandwidth") for h in (0.0, inf)),
    ("network_descent", {"n_hidden": 0}, "n_hidden"),
    ("on_features", {"features": lambda xs: xs.sum(-1)}, "features"),
    ("logistic", {}, "labels of the context must be -1 or 1"),
    ("logistic", {"posterior": "mean"}, "posterior must be 'mode' or 'laplace'"),
    ("tuned_step_size", {"steps": 0}, "steps"),
]  # fmt: skip
CALLS = [
    *((partial(getattr(algorithms, name), REAL, **options), named) for name, options, named in OPTIONS),
    *((partial(algorithms.tuned_step_size, prompts), "tuning needs") for prompts in (REAL[:0], REAL.prefix(0))),
    *((partial(algorithms.tuned_step_size, p, k), "nothing to tune") for p in (BLANK_XS, BLANK_YS) for k in (1, 4)),
    (partial(algorithms.stable_step_size, REAL.prefix(0)), "a context point other than 0"),
    (partial(algorithms.conjunction_bayes, SIGNS), "too many to enumerate.*take elimination"),
    (partial(algorithms.parity_bayes, SIGNS, degree=13), "degree"),
    (partial(algorithms.parity_bayes, Parities(x_dim=25, n_context=1).sample(1, seed=0)), "take gf2_elimination"),
    *((partial(each, HALVES), "inputs") for each in (algorithms.elimination, algorithms.gf2_elimination)),
    (partial(algorithms.elimination, Prompts(SIGNS.xs, SIGNS.ys.expand(-1, -1, 2))), "one target"),
    (partial(algorithms.in_context_classifier, LABELS, within_class_noise=0.1, burstiness=3), "burstiness must divide"),
    (partial(algorithms.in_context_classifier, LABELS, within_class_noise=0.0), "within_class_noise"),
    (partial(algorithms.in_context_classifier, MANY, within_class_noise=0.1, burstiness=2), "more than 20000 ways"),
    (partial(algorithms.in_weights_classifier, LABELS, **TABLE, within_class_noise=0.1), "means"),
    *((partial(each, TOKENS, d_vocab=2), "d_vocab=2") for each in (algorithms.bigram_bayes, algorithms.uniform_tokens)),
    (partial(algorithms.unigram_bayes, TOKENS, d_vocab=3, concentration=0.0), "concentration"),
    (partial(algorithms.references, RepeatedTokens()), r"a method references\(\)"),
    (partial(gd_plus_plus_filters, EYE[0], [0.1, 0.4], [0.05]), "shorter"),
    (lambda: ResidualDescent(0, step_size=0.1), "steps"),
    *((lambda a=a: ResidualDescent(2, step_size=a), "step_size") for a in ([0.1], nan)),
    (lambda: ResidualDescent(2, step_size=0.1, preconditioner=[EYE]), "preconditioner"),
    (lambda: QueryDescent(2, step_size=0.1).trajectory(REAL, with_weights=True), "no weights"),
    (lambda: NewtonSteps(3, alpha=-1.0), "alpha"),
    (lambda: NewtonSteps(3, answer="never"), "answer"),  # type: ignore[arg-type]
    (lambda: KernelReading(nearest, 0), "steps"),
    *((lambda penalties=penalties: RidgePath(penalties), "penalties") for penalties in ((), (1.0, -1.0))),
    (lambda: MomentsThenRidge(penalty=-0.1), "penalty"),
    (lambda: RidgeByDirections(2).predict(ONES), "3 dimensions"),
    (lambda: OnlineDescent(1).predict(ONES), "have 2"),
    (lambda: OnlineDescent(2, offset=-1.0), "offset"),
    (lambda: RecursiveSteps(1, penalty=1.0).predict(ONES), "have 2"),
    (lambda: RecursiveSteps(2, penalty=0.0), "penalty"),
    (lambda: DiscountedDescent(1, step_size=0.1, discount=1.5), "discount"),
    (lambda: best_match(EYE[None].double(), EYE[None]), "readers are torch.float64 and points torch.float32"),
    *((partial(best_match, EYE[None], EYE[None], sharpness), "sharpness") for sharpness in (-1.0, 1e300)),
    *((partial(Hypothesis, DESCENT, schedule=schedule), "schedule") for schedule in (
        ((1, 0), (3, 3)), ((0, 0), (3, 2)), ((0, 0), (2, 2), (2, 3)), ((0, 0), (1, 2), (2, 1), (3, 3)))),
    (lambda: Hypothesis(DESCENT, subspaces={"x": torch.ones(4, 2)}), "orthonormal"),
    (lambda: Hypothesis(DESCENT, subspaces={"momentum": EYE[:, :1]}), "has the variables"),
    (lambda: Hypothesis(DESCENT, subspaces=OVERLAPPING).rest, "all subspaces together"),
    (lambda: runs().exchange(1, "query", ["y"]), "variables"),
    (lambda: runs().freeze((), "query"), "stops"),
    (lambda: runs().exchange(4, "query"), "steps must be 0 to 3"),
    (lambda: select_interventions([], ["dance"]), "interventions"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "named"), CALLS)
def test_what_is_wrong_is_named(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


# ---- sizes of inputs and targets ----
SCALED: dict[str, Any] = {  # parameters with which predictions of `c x` and `d y` are d times those of x and y
    "ols": lambda c, d: {}, "ridge": lambda c, d: {"penalty": 0.3 * c * c},
    "bayes": lambda c, d: {"noise_std": 0.2 * c},
    "gradient_descent": lambda c, d: {"steps": 7, "step_size": 0.05 / c / c},
    "gd_plus_plus": lambda c, d: {"steps": 3, "step_size": 0.05 / c / c, "gamma": 0.01 / c / c},
    "newton": lambda c, d: {"steps": 5}, "ridge_path": lambda c, d: {"steps": 3},
    "chebyshev": lambda c, d: {"steps": 2},
    "steepest_descent": lambda c, d: {"steps": 3}, "conjugate_gradient": lambda c, d: {"steps": 3},
    "lasso": lambda c, d: {"penalty": 0.05 * c * d}, "greedy_tree": lambda c, d: {"depth": 2},
    "mixture_bayes": lambda c, d: {"noise_stds": (0.2 * d, d), "weight_stds": (d / c,)},
    "dmmse": lambda c, d: {"pool": torch.cat([POOL, -POOL]).double() * d / c, "noise_std": d},
    "nearest_neighbours": lambda c, d: {},
    "recursive_least_squares": lambda c, d: {"penalty": 0.3 * c * c, "discount": 0.9},
    "kernel_smoothing": lambda c, d: {"bandwidth": 0.5 * c},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_sizes_of_inputs_and_targets_change_nothing_or_are_refused(name):
    plain, n_right = getattr(algorithms, name)(PROMPTS, **SCALED[name](1.0, 1.0)).predictions, 0
    sizes = [(c, 1.0) for c in (1e-300, 1e-160, 1e-150, 1e-60, 1e-30, 1e5, 1e20, 1e60, 1e150, 1e160)]
    for c, d in [*sizes, (1.0, 1e-160), (1.0, 1e60), (1.0, 1e160), (1e-60, 1e60), (1e60, 1e-60)]:
        scaled = Prompts(c * PROMPTS.xs, d * PROMPTS.ys)
        if 1e-65 < c < 1e65 and 1e-65 < d < 1e65:
            predictions = getattr(algorithms, name)(scaled, **SCALED[name](c, d)).predictions
            torch.testing.assert_close(predictions / d, plain, rtol=1e-9, atol=1e-9 * plain.abs().max().item())
            n_right += 1
        else:
            with pytest.raises(ValueError, match=rf"{name}\(\): prompts must .* scale them"):
                getattr(algorithms, name)(scaled, **SCALED[name](1.0, 1.0))
    assert n_right == 8
