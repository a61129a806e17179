"""Exchanged attention patterns: against hand-written hooks, and on models in which their effect is known."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.analysis.causes import exchange_patterns
from mechicl.base.settings import settings
from mechicl.constructions import gradient_descent, known_models
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=5, n_context=20)


def transformer(seed: int = 0, **options) -> HookedTransformer:
    config = TransformerConfig(
        x_dim=5, n_context=20, n_layers=3, d_model=16, n_heads=2, d_mlp=32, prompt_format="interleaved",
        attention="softmax", normalization_type="LN", initializer_range=0.3, read_in="linear", dtype="float64",
        seed=seed, **options,
    )  # fmt: skip
    return HookedTransformer(config).eval()


def prompts_and_others(n: int = 24) -> tuple[Prompts, Prompts]:
    prompts, others = (TASK.sample(n, seed=seed, dtype=torch.float64) for seed in (0, 1))
    return prompts, prompts.with_query(others.query.xs)


def hooked(model: HookedTransformer, prompts: Prompts, hook: str, layers: Iterable[int], function: Any) -> Tensor:
    """Predictions of a run in which torch's hooks apply `function(layer, activation)`."""
    handles = [
        getattr(model.blocks[i].attn, hook).register_forward_hook(lambda module, args, out, i=i: function(i, out))
        for i in layers
    ]
    outputs = model(model.encode(prompts))[:, -1]
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize(("component", "layers"), [("pattern", None), ("pattern", (0, 2)), ("q", (1, 2)), ("q", (1,))])
def test_equals_plain_torch_hooks(component: Any, layers: Any):
    model, (prompts, others) = transformer(), prompts_and_others()
    hook, seen = f"hook_{component}", dict[int, Tensor]()
    of_query = (..., 40, slice(None)) if component == "pattern" else (slice(None), 40)

    def put(i: int, out: Tensor) -> Tensor:
        out = out.clone()
        out[of_query] = seen[i][of_query]
        return out

    expected_others = hooked(model, others, hook, range(3), lambda i, out: seen.update({i: out.clone()}))
    expected = hooked(model, prompts, hook, range(3) if layers is None else layers, put)
    with settings(memory=2**22):
        result = exchange_patterns(model, prompts, others, layers=layers, component=component)
    torch.testing.assert_close(result.predictions.T, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.others.T, expected_others, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.own.T, model.predict(prompts), rtol=0, atol=1e-9)
    ends = (expected_others - result.own.T).square().mean()
    assert result.from_own.mean == pytest.approx(((expected - result.own.T).square().mean() / ends).item())
    assert result.from_other.mean == pytest.approx(((expected - expected_others).square().mean() / ends).item())


def test_models_that_read_x_only_by_patterns_and_one_that_does_not():
    prompts, others = prompts_and_others()
    descent = exchange_patterns(gradient_descent(x_dim=5, n_context=20, step_size=0.1, steps=3), prompts, others)
    assert descent.from_other.mean < 1e-20
    targets = Prompts(prompts.xs, prompts.ys.flip(0))
    unchanged = exchange_patterns(gradient_descent(x_dim=5, n_context=20, step_size=0.1, steps=3), prompts, targets)
    assert unchanged.from_own.mean < 1e-20
    known = next(known for known in known_models() if known.name == "ridge, by Cramer's rule")
    base, source = (known.task.sample(16, seed=seed, dtype=torch.float64) for seed in (0, 1))
    solved = exchange_patterns(known.model, base, base.with_query(source.query.xs))  # an MLP multiplies x and weights
    assert solved.from_own.mean < 1e-6
    assert solved.from_other.mean == pytest.approx(1, abs=1e-3)


def test_prompts_of_equal_predictions_have_no_scale():
    prompts, _ = prompts_and_others()
    with pytest.raises(ValueError, match="predicts the same for all prompts and their sources"):
        exchange_patterns(gradient_descent(x_dim=5, n_context=20, step_size=0.1, steps=3), prompts, prompts)
