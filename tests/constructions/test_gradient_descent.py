"""Layers of attention against gradient descent as plain loops, softmax written out, and losses in closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.algorithms import DivergenceWarning
from mechicl.analysis.weights import linear_attention_optimum
from mechicl.learners import Learner, squared_errors
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import descend, precondition, transform
from tests.constructions.reference import assert_same, at_query, cases, largest_eigenvalue, quick, random_prompts

ACTIVATIONS = {
    "relu": lambda h: np.maximum(h, 0), "tanh": np.tanh, "square": np.square, "identity": lambda h: h, "cos": np.cos,
}  # fmt: skip
SIZES = {"x_dim": 3, "y_dim": 2, "n_context": 6}

# ---- gradient descent ----


@quick
@given(cases(), st.floats(-0.01, 0.03), st.booleans())
def test_the_transformer_is_gradient_descent_on_every_prompt_and_prefix(case, step_size, other_weights):
    prompts = case.prompts
    start = case.rng.standard_normal((prompts.x_dim, prompts.y_dim)) if other_weights else None
    model = constructions.gradient_descent(
        **case.sizes,
        step_size=step_size,
        steps=case.steps,
        initial_weights=None if start is None else torch.from_numpy(start),
    )
    predict = descend(case.steps, step_size, start)
    prefixes = model.predict_prefixes(prompts)
    assert_same(model.predict(prompts), at_query(prompts, predict))
    for t in {0, prompts.n_context // 2, prompts.n_context}:
        assert_same(prefixes[:, t], at_query(prompts.prefix(t), predict))


@pytest.mark.parametrize("start", [None, torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]])])
def test_each_layer_is_one_step(start):
    prompts = random_prompts()
    model = constructions.gradient_descent(**SIZES, step_size=0.1, steps=5, initial_weights=start)
    _, cache = model.run_with_cache(model.encode(prompts))
    weights = None if start is None else start.double().numpy()
    for steps in range(6):
        name = f"blocks.{steps - 1}.hook_resid_post" if steps else "blocks.0.hook_resid_pre"
        assert_same(-cache[name][:, -1, 3:], at_query(prompts, descend(steps, 0.1, weights)))


def test_steps_share_the_weights_of_one_layer_in_a_float64_learner():
    one = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1)
    looped = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=12)
    assert not one.cfg.recurrent
    assert looped.cfg.recurrent
    assert sum(p.numel() for p in looped.parameters()) == sum(p.numel() for p in one.parameters())
    assert isinstance(looped, Learner)
    assert not looped.training
    assert {p.dtype for p in looped.parameters()} == {torch.float64}
    assert (looped.cfg.n_heads, looped.cfg.d_model, looped.cfg.n_layers) == (1, 4, 12)


# ---- GD++ ----


@quick
@given(cases(), st.booleans(), st.booleans())
def test_the_transformer_is_gd_plus_plus_on_every_prompt(case, one_step_size, one_gamma):
    step_size = case.rng.uniform(-0.01, 0.03, case.steps).tolist()
    gamma = case.rng.uniform(-0.01, 0.02, case.steps).tolist()
    if one_step_size:
        step_size = [step_size[0]] * case.steps
    if one_gamma:
        gamma = [gamma[0]] * case.steps
    model = constructions.gd_plus_plus(
        **case.sizes,
        step_size=step_size[0] if one_step_size else step_size,
        gamma=gamma[0] if one_gamma else gamma,
        steps=case.steps,
    )
    assert_same(model.predict(case.prompts), at_query(case.prompts, transform(step_size, gamma)))
    assert model.cfg.recurrent == (case.steps > 1 and one_step_size and one_gamma)


def test_every_token_is_transformed_and_not_only_the_query():
    prompts = random_prompts()
    model = constructions.gd_plus_plus(**SIZES, step_size=0.1, gamma=[0.05], steps=1)
    _, cache = model.run_with_cache(model.encode(prompts))
    (xs, ys), stream = prompts.context, cache["blocks.0.hook_resid_post"]
    second, update = xs.mT @ xs, 0.1 * xs.mT @ ys
    assert_same(stream[:, :, :3], (prompts.xs - 0.05 * prompts.xs @ second).numpy())
    assert_same(stream[:, :-1, 3:], (ys - xs @ update).numpy())


# ---- preconditioned gradient descent ----


@quick
@given(cases(), st.booleans())
def test_the_transformer_is_preconditioned_gd_on_every_prompt(case, alike):
    matrices = list(0.3 * case.rng.standard_normal((case.steps, case.prompts.x_dim, case.prompts.x_dim)))
    matrices = matrices[:1] * case.steps if alike else matrices
    each = [torch.from_numpy(matrix) for matrix in matrices]
    model = constructions.preconditioned_gd(**case.sizes, preconditioner=each[0] if alike else each, steps=case.steps)
    assert_same(model.predict(case.prompts), at_query(case.prompts, precondition(matrices)))
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps, 1)
    assert model.cfg.d_model == case.prompts.x_dim + case.prompts.y_dim
    assert model.cfg.recurrent == (case.steps > 1 and alike)


# ---- on features ----


@settings(max_examples=20)
@given(cases(), st.sampled_from(sorted(ACTIVATIONS)), st.integers(1, 20), st.booleans())
def test_the_transformer_is_gradient_descent_on_the_features(case, act_fn, n_features, with_bias):
    weights = case.rng.standard_normal((case.prompts.x_dim, n_features)) / case.prompts.x_dim**0.5
    bias = case.rng.standard_normal(n_features) if with_bias else np.zeros(n_features)
    model = constructions.kernel_gradient_descent(
        weights=torch.from_numpy(weights),
        bias=torch.from_numpy(bias) if with_bias else None,
        n_context=case.n_context,
        y_dim=case.prompts.y_dim,
        step_size=0.01,
        steps=case.steps,
        act_fn=act_fn,
    )

    def features(x):
        return ACTIVATIONS[act_fn](x @ weights + bias)

    plain = descend(case.steps, 0.01)
    assert_same(model.predict(case.prompts), at_query(case.prompts, lambda x, y, q: plain(features(x), y, features(q))))
    assert model.cfg.d_model == case.prompts.x_dim + case.prompts.y_dim + n_features
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps, 1)
    assert model.cfg.recurrent == (case.steps > 1)


# ---- two softmax heads ----


def two_heads(step_size, score_scale, sink, n_context):
    """Write both softmaxes out; the sink is one more key with value 0."""

    def predict(xs, ys, query):
        out = np.zeros(ys.shape[1])
        for sign in (1, -1) if len(xs) or sink else ():
            weights = [math.exp(sign * score_scale * (x @ query)) for x in xs]
            extra = math.exp(sink) if sink else 0.0
            normaliser = extra if sink else n_context
            for weight, y in zip(weights, ys, strict=True):
                out += sign * step_size * normaliser / (2 * score_scale) * weight * y / (sum(weights) + extra)
        return out

    return predict


@quick
@given(cases())
def test_the_layer_is_two_softmax_heads(case):
    assume(case.n_context)
    for sink in (True, False):
        model = constructions.softmax_gradient_descent(**case.sizes, step_size=0.1, score_scale=0.2, sink=sink)
        height = model.cfg.sink_score if sink else 0.0
        expected = at_query(case.prompts, two_heads(0.1, 0.2, height, case.n_context))
        scale = 0.1 * case.prompts.context.ys.abs().sum().item()  # of the terms, which may cancel
        np.testing.assert_allclose(model.predict(case.prompts).detach().numpy(), expected, rtol=0, atol=1e-12 * scale)
        assert (model.cfg.n_layers, model.cfg.n_heads) == (1, 2)


# ---- the best layer of linear attention ----


def preconditioner_of(model) -> np.ndarray:
    """Return A of the layer's prediction `x A Σ_i x_iᵀ y_i / n`."""
    d = model.cfg.x_dim
    moved = model.OV.AB[0, 0].detach().numpy()
    assert not moved[:d].any()
    assert not moved[:, :d].any()
    return -moved[d, d] * model.QK.AB[0, 0].detach().numpy()[:d, :d]


def gaussian_loss(matrix: np.ndarray, sigma: np.ndarray, n: int, noise_variance: float = 0.0) -> float:
    """Return `E ‖x - x A Ŝ‖²`, with `E ŜŜ = ((n + 1) Σ² + tr(Σ) Σ) / n` for Gaussian inputs, plus noise's ν² Σ / n."""
    second = ((n + 1) * sigma @ sigma + (np.trace(sigma) + noise_variance) * sigma) / n
    loss = np.trace(sigma) - 2 * np.trace(sigma @ matrix @ sigma) + np.trace(matrix.T @ sigma @ matrix @ second)
    return float(loss)


@pytest.mark.parametrize(
    ("eigenvalues", "published", "digits"), [([1.0] * 5, 1.1538, 5e-5), ([10 ** (i / 4) for i in range(5)], 4.58, 5e-3)]
)
def test_the_loss_of_the_linear_optimum_is_the_closed_form(eigenvalues, published, digits):
    n, total = 20, sum(eigenvalues)
    model = constructions.linear_optimum(covariance=torch.tensor(eigenvalues).diag(), n_context=n)
    loss = gaussian_loss(preconditioner_of(model), np.diag(eigenvalues), n)
    assert loss == pytest.approx(published, abs=digits)
    assert loss == pytest.approx(sum(v * (1 - v / ((n + 1) / n * v + total / n)) for v in eigenvalues), rel=1e-6)


@quick
@given(st.integers(1, 20), st.integers(1, 30), st.sampled_from([0.0, 0.25, 9.0]), st.integers(0, 2**20))
def test_every_other_preconditioner_has_a_larger_loss(x_dim, n_context, noise, seed):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((x_dim, x_dim))
    sigma = root @ root.T
    model = constructions.linear_optimum(covariance=torch.from_numpy(sigma), n_context=n_context, noise_variance=noise)
    best = preconditioner_of(model)
    least = gaussian_loss(best, sigma, n_context, noise)
    closed_form = linear_attention_optimum(np.linalg.eigvalsh(sigma).tolist(), n_context, noise)
    assert least == pytest.approx(closed_form, rel=1e-6, abs=1e-9 * np.trace(sigma))
    direction = np.abs(best).max() * rng.standard_normal((x_dim, x_dim))
    up, down = (gaussian_loss(best + sign * 0.1 * direction, sigma, n_context, noise) for sign in (1, -1))
    assert min(up, down) > least
    # the loss is a parabola along any line: it rises equally on both sides of its minimum
    assert up - down == pytest.approx(0, abs=1e-6 * (up + down - 2 * least) + 1e-9 * least)


def test_with_noise_its_loss_on_many_prompts_is_the_closed_form():
    n, noise, eigenvalues = 10, 4.0, (0.5, 1.0, 3.0)
    task = LinearRegression(
        x_dim=3, n_context=n, inputs="gaussian", eigenvalues=eigenvalues, noise_std=noise**0.5, query_noise=False
    )
    prompts = task.sample(30_000, seed=0, dtype=torch.float64)
    sigma = torch.tensor(eigenvalues).diag()
    model = constructions.linear_optimum(covariance=sigma, n_context=n, noise_variance=noise)
    sampled = interval(squared_errors(model, prompts), level=0.999)
    assert linear_attention_optimum(list(eigenvalues), n, noise) in sampled
    assert sampled.half_width < 0.05 * sampled.mean


# ---- the best layer of ReLU attention ----


def relu_loss(scale: float, d: int, n: int) -> float:
    """Return `E ‖x - c/n Σ relu(s_i) x_i‖²`, by the moments of `s_i = <x, x_i>` given x."""
    return d - 2 * scale * d / 2 + scale**2 * ((n - 1) / n * d / 4 + d * (d + 2) / 2 / n)


@quick
@given(cases(y_dim=1))
def test_the_relu_optimum_is_one_step_with_rectified_scores(case):
    n, d = case.n_context + 1, case.prompts.x_dim
    model = constructions.relu_optimum(x_dim=d, n_context=n)
    scale = 1 / (0.5 * (n - 1) / n + (d + 2) / n)

    def predict(xs, ys, query):
        out = np.zeros(1)
        for x, y in zip(xs, ys, strict=True):
            out += scale * max(x @ query, 0) * y / len(xs)
        return out

    assert_same(model.predict(case.prompts), at_query(case.prompts, predict))
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.attention) == (1, 1, "relu")


def test_the_loss_of_the_relu_optimum_is_the_closed_form_and_no_other_scale_has_less():
    d, n = 5, 20
    model = constructions.relu_optimum(x_dim=d, n_context=n)
    scale = -(model.W_V[0, 0] @ model.W_O[0, 0])[d, d].item()
    least = relu_loss(scale, d, n)
    closed_form = d - (d / 2) ** 2 / (d / 2 * (0.5 * (n - 1) / n + (d + 2) / n))
    assert least == pytest.approx(closed_form, rel=1e-12)
    assert least == pytest.approx(1.970, abs=5e-4)
    assert all(relu_loss(factor * scale, d, n) > least for factor in (-1, 0, 0.9, 0.999, 1.001, 1.1))

    prompts = LinearRegression(x_dim=d, n_context=n, inputs="gaussian").sample(40_000, seed=0, dtype=torch.float64)
    assert least in interval(squared_errors(model, prompts), level=0.999)


PROMPTS = random_prompts(n_context=8)
LARGEST = largest_eigenvalue(PROMPTS)
WIDE = {**SIZES, "n_context": 8}
STEP_BOUND, ALPHA_BOUND = 2 / LARGEST, 2 / LARGEST**2
KERNEL = {"weights": torch.eye(3), "act_fn": "identity", "y_dim": 2, "n_context": 8}
PARAMETERS = {  # by name: the parameter that has a bound, the bound, and the other arguments
    "gradient_descent": ("step_size", STEP_BOUND, WIDE),
    "gd_plus_plus": ("step_size", STEP_BOUND, {**WIDE, "gamma": 0.0}),
    "copy_then_gradient_descent": ("step_size", STEP_BOUND, WIDE),
    "kernel_gradient_descent": ("step_size", STEP_BOUND, KERNEL),
    "newton": ("alpha", ALPHA_BOUND, WIDE),
}


def builder(name):
    """Return the construction, with a share of its bound."""
    parameter, bound, arguments = PARAMETERS[name]
    return lambda share, **more: getattr(constructions, name)(**{parameter: share * bound}, **arguments, **more)


builders = pytest.mark.parametrize(
    ("build", "bound"), [(builder(name), PARAMETERS[name][1]) for name in PARAMETERS], ids=PARAMETERS
)


@builders
def test_above_the_bound_there_is_a_warning_that_names_it(build, bound):
    with pytest.warns(DivergenceWarning) as caught:
        build(1.001, steps=4, largest_eigenvalue=LARGEST)
    (warning,) = caught
    assert f"diverges where λ_max(S) is {LARGEST:.4g}. It converges with" in str(warning.message)
    assert f" = {bound:.4g}" in str(warning.message)


@builders
def test_below_the_bound_for_one_step_or_unknown_prompts_there_is_none(build, bound):
    build(0.999, steps=4, largest_eigenvalue=LARGEST)
    build(5.0, steps=1, largest_eigenvalue=LARGEST)
    build(5.0, steps=4)


def test_gd_plus_plus_is_judged_by_all_of_its_steps():
    with pytest.warns(DivergenceWarning, match="gamma="):
        constructions.gd_plus_plus(
            **WIDE, step_size=0.1 * STEP_BOUND, gamma=1.05 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
        )
    # a gamma that shrinks the inputs allows a larger step size, and later steps may compensate for a large one
    constructions.gd_plus_plus(
        **WIDE, step_size=1.3 * STEP_BOUND, gamma=0.2 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
    )
    constructions.gd_plus_plus(
        **WIDE, step_size=[1.2 * STEP_BOUND, 0.5 * STEP_BOUND], gamma=0.0, steps=2, largest_eigenvalue=LARGEST
    )
