"""Prompts of points as demonstrations, encoded by hand, and comparisons prompt by prompt."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    FineTuning,
    FineTuningComparison,
    compare_on_prompts,
    compare_with_finetuning,
    fine_tune,
    search_on_prompts,
    search_tuning,
)
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from tests.analysis.finetuning.oracles import Snapshot, added, cached, compared
from tests.analysis.interventions.oracles import model_of
from tests.strategies import random_prompts


def tokens_of_points(model, points):
    """Rows of tokens, by hand: points are (x, y), a query is (x, None)."""
    cfg, rows = model.cfg, []
    for x, y in points:
        if cfg.prompt_format == "paired":
            weights = model.initial_weights.T.tolist()
            start = [-sum(a * w for a, w in zip(x, column, strict=True)) for column in weights]
            rows.append([*x, *(start if y is None else y)])
        else:
            rows.append(x + [0.0] * (cfg.d_token - len(x)))
            rows += [] if y is None else [y + [0.0] * (cfg.d_token - len(y))]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("form", ["query", "unlabelled"])
@pytest.mark.parametrize("kind", ["gpt", "linear"])
def test_shots_of_a_prompt(kind, form):
    model = model_of(kind, n_context=3, y_dim=2)
    if kind == "linear":
        with torch.no_grad():
            model.initial_weights.copy_(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
    prompt, n = random_prompts(model.cfg, 1, seed=4), 3
    shots = prompt_shots(model, prompt, form)
    xs, ys = prompt.xs[0].tolist(), prompt.ys[0].tolist()
    bare = [(x, [0.0] * prompt.y_dim) for x in xs[:n]] if form == "unlabelled" else []
    shown = list(zip(xs[:n], ys[:n], strict=True))
    assert_close(shots.zero_shot, (tokens_of_points(model, [*bare, (xs[n], None)]),))
    assert_close(shots.in_context, (tokens_of_points(model, [*shown, (xs[n], None)]),))
    assert_close(shots.examples, tuple(tokens_of_points(model, [*bare, (x, None)]) for x in xs[:n]))
    assert shots.targets.tolist() == [ys[n]]
    assert shots.example_targets.tolist() == ys[:n]
    assert shots.choices is None
    assert shots.query_lengths == (len(shots.zero_shot[0]),)
    for (first, number), x in zip(shots.example_spans, xs[:n], strict=True):
        assert number == 1
        assert shots.in_context[0][first, : prompt.x_dim].tolist() == x
    default = "unlabelled" if kind == "linear" else "query"
    assert len(prompt_shots(model, prompt).zero_shot[0]) == len(prompt_shots(model, prompt, default).zero_shot[0])


@pytest.mark.parametrize(
    ("kind", "form", "method"),
    [("gpt", "query", "plain"), ("linear", "unlabelled", "plain"), ("linear", "unlabelled", "linearized"),
     ("full", "query", "per_layer")],
)  # fmt: skip
def test_prompt_by_prompt(kind, form, method):
    model = model_of(kind, n_context=3)
    prompts = random_prompts(model.cfg, 2, seed=1)
    before, tuning = Snapshot(model), FineTuning(2e-5, epochs=2, method=method)
    comparison = compare_on_prompts(model, prompts, tuning, zero_shot=form, seed=7)
    before.check()
    parts = []
    for i in range(2):
        shots = prompt_shots(model, prompts[i : i + 1], form)
        tuned = fine_tune(model, shots, tuning)
        parts.append(compare_with_finetuning(model, shots, tuned, seed=7 + 2 * i))
        if method == "plain":
            after = cached(added(model, tuned.changes))
            expected = compared(2, shots, cached(model), after, seed=7 + 2 * i)
            for name, value in expected.items():
                measured = getattr(comparison, name)[..., i : i + 1]
                assert_close(measured, torch.tensor(value), atol=1e-6, rtol=1e-6, equal_nan=True, msg=name)
    # vectorised passes round differently, and the cosines are of changes of 1e-5
    for name, value in FineTuningComparison.concatenate(parts).samples().items():
        assert_close(getattr(comparison, name), value, equal_nan=True, atol=1e-9, rtol=1e-12)
    in_context = (model.predict(prompts) - prompts.query.ys).square().sum(-1)
    assert_close(comparison.in_context_loss, in_context.detach())


def test_a_search_on_prompts_is_one_on_each():
    model = model_of("gpt")
    prompts = random_prompts(model.cfg, 2)
    options: Any = {"learning_rates": (0.01, 0.02), "epochs": (1, 2)}
    search = search_on_prompts(model, prompts, FineTuning(examples_per_step=2), **options)
    parts = [search_tuning(model, prompt_shots(model, part), search.tuning, **options) for part in prompts.split(1)]
    assert_close(search.score, torch.cat([part.score for part in parts], -1))
    assert_close(search.loss, torch.cat([part.loss for part in parts], -1))
    assert search.tuning.examples_per_step == 2


@pytest.mark.parametrize("method", ["plain", "linearized", "per_layer"])
def test_prompts_of_another_dtype(method):
    model = model_of("gpt", dtype="float32")
    prompts = random_prompts(model_of("gpt").cfg, 1)
    comparison = compare_on_prompts(model, prompts, FineTuning(0.01, method=method))
    assert comparison.finetuned_loss.dtype == torch.float64
    assert comparison.finetuned_loss.isfinite().all()
