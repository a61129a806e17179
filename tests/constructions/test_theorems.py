"""Models by theorem against plain loops, softmax written out, frequencies, and losses in closed form."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from analyses.support.proofs import with_pseudo_examples
from mechicl import constructions
from mechicl.analysis.weights import linear_attention_optimum
from mechicl.constructions import induction
from mechicl.learners import Learner, squared_errors
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import at_query, descend, iterate, precondition, transform
from tests.constructions.reference import assert_same, cases, largest_eigenvalue, quick, random_prompts

ACTIVATIONS = {
    "relu": lambda h: np.maximum(h, 0), "tanh": np.tanh, "square": np.square, "identity": lambda h: h, "cos": np.cos,
}  # fmt: skip
SIZES = {"x_dim": 3, "y_dim": 2, "n_context": 6}


@quick
@given(cases(), st.floats(-0.01, 0.03), st.booleans())
def test_the_transformer_is_gradient_descent_on_every_prompt_and_prefix(case, step_size, other_weights):
    prompts = case.prompts
    start = case.rng.standard_normal((prompts.x_dim, prompts.y_dim)) if other_weights else None
    initial = None if start is None else torch.from_numpy(start)
    model = constructions.gradient_descent(**case.sizes, step_size=step_size, steps=case.steps, initial_weights=initial)
    predict = descend(case.steps, step_size, start)
    prefixes = model.predict_prefixes(prompts)
    assert_same(model.predict(prompts), at_query(prompts, predict))
    for t in {0, prompts.n_context // 2, prompts.n_context}:
        assert_same(prefixes[:, t], at_query(prompts.prefix(t), predict))


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


@quick
@given(cases(), st.booleans(), st.booleans())
def test_the_transformer_is_gd_plus_plus_on_every_prompt(case, one_step_size, one_gamma):
    step_size = case.rng.uniform(-0.01, 0.03) if one_step_size else case.rng.uniform(-0.01, 0.03, case.steps).tolist()
    gamma = case.rng.uniform(-0.01, 0.02) if one_gamma else case.rng.uniform(-0.01, 0.02, case.steps).tolist()
    model = constructions.gd_plus_plus(**case.sizes, step_size=step_size, gamma=gamma, steps=case.steps)
    each = [[value] * case.steps if isinstance(value, float) else value for value in (step_size, gamma)]
    assert_same(model.predict(case.prompts), at_query(case.prompts, transform(*each)))
    assert model.cfg.recurrent == (case.steps > 1 and one_step_size and one_gamma)


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


@settings(max_examples=20)
@given(cases(), st.sampled_from(sorted(ACTIVATIONS)), st.integers(1, 20), st.booleans())
def test_the_transformer_is_gradient_descent_on_the_features(case, act_fn, n_features, with_bias):
    weights = case.rng.standard_normal((case.prompts.x_dim, n_features)) / case.prompts.x_dim**0.5
    bias = case.rng.standard_normal(n_features) if with_bias else np.zeros(n_features)
    options = {"n_context": case.n_context, "y_dim": case.prompts.y_dim, "steps": case.steps, "act_fn": act_fn}
    biased = {"bias": torch.from_numpy(bias)} if with_bias else {}
    model = constructions.kernel_gradient_descent(
        weights=torch.from_numpy(weights), **biased, step_size=0.01, **options
    )

    def features(x):
        return ACTIVATIONS[act_fn](x @ weights + bias)

    plain = descend(case.steps, 0.01)
    assert_same(model.predict(case.prompts), at_query(case.prompts, lambda x, y, q: plain(features(x), y, features(q))))
    assert model.cfg.d_model == case.prompts.x_dim + case.prompts.y_dim + n_features
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps, 1)
    assert model.cfg.recurrent == (case.steps > 1)


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


attentions = st.sampled_from(["linear", "relu"])
fractions = st.floats(0.05, 1.95)  # of the alpha that solves the top direction at once


@quick
@given(cases(), attentions, fractions)
def test_the_transformer_is_newtons_method_on_every_prompt(case, attention, fraction):
    prompts, steps = case.prompts, case.steps
    alpha = fraction / largest_eigenvalue(prompts) ** 2
    model = constructions.newton(**case.sizes, steps=steps, alpha=alpha, attention=attention)
    assert_same(model.predict(prompts), at_query(prompts, iterate(steps, alpha)))
    shorter = prompts.prefix(prompts.n_context // 2)
    assert_same(model.predict(shorter), at_query(shorter, iterate(steps, alpha)))
    d, m = prompts.x_dim, prompts.y_dim
    assert (model.cfg.n_layers, model.cfg.d_model) == (steps + 2, 2 * d + m)
    assert (model.cfg.n_heads, model.cfg.d_mlp) == ((1, d) if attention == "linear" else (2, 2 * d))
    assert model.cfg.attention == attention


@quick
@given(cases(), attentions, fractions, st.floats(0, 2))
def test_newton_with_pseudo_examples_is_ridge_regression(case, attention, fraction, penalty):
    prompts = case.prompts
    alpha = fraction / (largest_eigenvalue(prompts) + penalty) ** 2
    sizes = {**case.sizes, "n_context": case.n_context + prompts.x_dim}
    model = constructions.newton(**sizes, steps=case.steps, alpha=alpha, attention=attention)
    regularised = with_pseudo_examples(prompts, penalty=penalty)
    assert_same(model.predict(regularised), at_query(prompts, iterate(case.steps, alpha, penalty)))


def after_copying(model, prompts):
    """Return token and y parts of the stream after the first layer, `[prompt pos d]` each."""
    stream = model(prompts, stop_at_layer=1)
    width = model.cfg.d_token
    return stream[..., :width], stream[..., -prompts.y_dim :]


@quick
@given(cases())
def test_every_target_is_copied_to_its_input_and_nowhere_else(case):
    prompts = case.prompts
    model = constructions.copy_targets(**case.sizes)
    token, y = after_copying(model, prompts)
    assert torch.equal(y[:, :-1:2], prompts.context.ys)
    assert torch.equal(token[:, ::2, : prompts.x_dim], prompts.xs)
    assert not token[:, 1::2].any()
    assert not y[:, 1::2].any()
    assert not y[:, -1].any()
    assert not token[:, ::2, prompts.x_dim :].any()
    assert model.cfg.d_model == max(prompts.x_dim, prompts.y_dim) + 2 * case.n_context + 1 + prompts.y_dim
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.prompt_format) == (1, 2, "interleaved")


@pytest.mark.parametrize(("score_scale", "n_context"), [(4.0, 6), (8.0, 1), (16.0, 20), (32.0, 6)])
def test_the_error_of_the_softmax_copy_is_as_stated(score_scale, n_context):
    prompts = random_prompts(n_context=n_context)
    sizes = {"x_dim": 3, "y_dim": 2, "n_context": n_context}
    model = constructions.copy_targets(**sizes, attention="softmax", score_scale=score_scale)
    token, y = after_copying(model, prompts)
    largest = model.encode(prompts).abs().max().item()
    bound = 2 * (n_context + 1) * math.exp(-score_scale / 2) * largest
    assert (y[:, :-1:2] - prompts.context.ys).abs().max().item() < bound
    assert y[:, 1::2].abs().max().item() < bound
    assert token[:, 1::2].abs().max().item() < bound
    assert (token[:, ::2] - model.encode(prompts)[:, ::2]).abs().max().item() < bound


@quick
@given(cases())
def test_copying_then_gradient_descent_is_gradient_descent_on_every_prompt(case):
    prompts = case.prompts
    model = constructions.copy_then_gradient_descent(**case.sizes, step_size=0.03, steps=case.steps)
    assert_same(model.predict(prompts), at_query(prompts, descend(case.steps, 0.03)))
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps + 1, 2)
    assert not model.cfg.recurrent


def sequences(d_vocab: int, n_pos: int, n: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(seed))


def frequencies(ids: Tensor, d_vocab: int) -> Tensor:
    """Count, by loops, the tokens after earlier occurrences of each token, as shares; 0 if there are none."""
    shares = torch.zeros(*ids.shape, d_vocab, dtype=torch.float64)
    for row, tokens in enumerate(ids.tolist()):
        for i, token in enumerate(tokens):
            followers = [tokens[j + 1] for j in range(i) if tokens[j] == token]
            for follower in followers:
                shares[row, i, follower] += 1 / len(followers)
    return shares


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    n_heads = draw(st.integers(1, 4))
    return {
        "d_vocab": draw(st.integers(1, 12)),
        "n_ctx": draw(st.integers(2, 20)),
        "n_heads": n_heads,
        "previous_token_head": draw(st.integers(0, n_heads - 1)),
        "induction_head": draw(st.integers(0, n_heads - 1)),
        "seed": draw(st.sampled_from([None, 0, 1])),
    }


@quick
@given(sizes(), st.integers(0, 5))
def test_the_logits_are_frequencies_of_followers(case, seed):
    model = induction(**case)
    ids = sequences(case["d_vocab"], case["n_ctx"], seed=seed)
    for tokens in (ids, ids[:, : max(1, case["n_ctx"] // 2)]):
        torch.testing.assert_close(model(tokens).detach(), frequencies(tokens, case["d_vocab"]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("score_scale", "n_ctx"), [(8.0, 24), (16.0, 4), (32.0, 24)])
def test_the_error_of_induction_is_as_stated(score_scale, n_ctx):
    ids = sequences(6, n_ctx, n=40)
    logits = induction(d_vocab=6, n_ctx=n_ctx, score_scale=score_scale)(ids)
    error = (logits - frequencies(ids, 6)).abs().max().item()
    assert 0.1 * math.exp(-score_scale / 2) < error < 2 * (n_ctx + 1) * math.exp(-score_scale / 2)


def test_distractors_attend_and_have_no_effect():
    model = induction(d_vocab=10, n_ctx=12, n_heads=4, previous_token_head=3, induction_head=1, seed=0)
    ids = sequences(10, 12)
    logits, cache = model.run_with_cache(ids)
    planted = {0: 3, 1: 1}

    def remove(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, [head for head in range(4) if head != planted[hook.layer()]]] = 0
        return z

    names = [f"blocks.{layer}.attn.hook_z" for layer in (0, 1)]
    assert torch.equal(model.run_with_hooks(ids, fwd_hooks=[(name, remove) for name in names]), logits)
    junk = [i for i, label in enumerate(model.stream_labels or ()) if label.startswith("junk")]
    assert len(junk) == 8
    for layer in (0, 1):
        for head in set(range(4)) - {planted[layer]}:
            assert cache[f"blocks.{layer}.attn.hook_z"][:, :, head].abs().max() > 0.1
            written = model.W_O[layer, head].abs().sum(0)
            assert [i for i in range(model.cfg.d_model) if written[i] > 0] == junk
