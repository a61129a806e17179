"""Newton's method and ridge regression by attention, against plain loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from tests.algorithms.reference import iterate
from tests.constructions.reference import assert_same, at_query, cases, largest_eigenvalue, quick, random_prompts

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


@pytest.mark.parametrize("attention", ["linear", "relu"])
def test_every_layer_contains_its_iterate_at_every_token(attention):
    prompts = random_prompts()
    model = constructions.newton(x_dim=3, y_dim=2, n_context=6, steps=4, alpha=0.02, attention=attention)
    assert model.stream_labels == ("x1", "x2", "x3", "y1", "y2", "inverse1", "inverse2", "inverse3")
    _, cache = model.run_with_cache(prompts)
    for prompt in range(2):
        xs = prompts.xs[prompt].numpy()
        second = xs[:-1].T @ xs[:-1]
        inverse = 0.02 * second
        for layer in range(5):
            assert_same(cache[f"blocks.{layer}.hook_resid_post"][prompt, :, 5:], xs @ inverse)
            inverse = 2 * inverse - inverse @ second @ inverse


@quick
@given(cases(), attentions, fractions, st.floats(0, 2))
def test_newton_with_pseudo_examples_is_ridge_regression(case, attention, fraction, penalty):
    prompts = case.prompts
    alpha = fraction / (largest_eigenvalue(prompts) + penalty) ** 2
    sizes = {**case.sizes, "n_context": case.n_context + prompts.x_dim}
    model = constructions.newton(**sizes, steps=case.steps, alpha=alpha, attention=attention)
    regularised = constructions.with_pseudo_examples(prompts, penalty=penalty)
    assert_same(model.predict(regularised), at_query(prompts, iterate(case.steps, alpha, penalty)))
