"""Prompts of points as demonstrations, encoded by hand, and comparisons prompt by prompt."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    FineTuning,
    FineTuningComparison,
    compare_on_prompts,
    compare_with_finetuning,
    fine_tune,
    prompt_shots,
)
from mechicl.analysis.finetuning.predictions import check_lengths
from tests.analysis.finetuning.oracles import Snapshot, added, cached, compared
from tests.analysis.interventions.oracles import model_of
from tests.strategies import configs, random_model, random_prompts

quick = settings(max_examples=25, deadline=None)


def tokens_of_points(cfg, points, weights):
    """Rows of tokens, by hand: points are (x, y), a query is (x, None)."""
    rows = []
    for x, y in points:
        if cfg.prompt_format == "paired":
            start = [-sum(a * w for a, w in zip(x, column, strict=True)) for column in weights.T.tolist()]
            rows.append([*x, *(start if y is None else y)])
        else:
            rows.append(x + [0.0] * (cfg.d_token - len(x)))
            rows += [] if y is None else [y + [0.0] * (cfg.d_token - len(y))]
    return torch.tensor(rows, dtype=torch.float64)


@quick
@given(
    configs(formats=("paired", "interleaved"), dtype="float64", n_layers=1), st.sampled_from(["query", "unlabelled"])
)
def test_shots_of_a_prompt(cfg, form):
    if cfg.n_context == 0:
        return
    model = random_model(cfg)
    prompt = random_prompts(cfg, 1, seed=4)
    shots = prompt_shots(model, prompt, form)
    weights = model.initial_weights if cfg.prompt_format == "paired" else None
    xs, ys = prompt.xs[0].tolist(), prompt.ys[0].tolist()
    n = cfg.n_context
    bare = [(x, [0.0] * cfg.y_dim) for x in xs[:n]] if form == "unlabelled" else []
    shown = list(zip(xs[:n], ys[:n], strict=True))
    assert len(shots) == 1
    assert_close(shots.zero_shot[0], tokens_of_points(cfg, [*bare, (xs[n], None)], weights))
    assert_close(shots.in_context[0], tokens_of_points(cfg, [*shown, (xs[n], None)], weights))
    assert len(shots.examples) == n
    for example, x in zip(shots.examples, xs, strict=False):
        assert_close(example, tokens_of_points(cfg, [*bare, (x, None)], weights))
    assert shots.targets.tolist() == [ys[n]]
    assert shots.example_targets.tolist() == ys[:n]
    assert shots.choices is None
    assert shots.query_lengths == (len(shots.zero_shot[0]),)
    for example, (first, number), x in zip(shots.examples, shots.example_spans, xs, strict=False):
        assert number == 1
        inputs = slice(0, cfg.x_dim)
        assert shots.in_context[0][first, inputs].tolist() == x
        assert example[-1, inputs].tolist() == x
    check_lengths(model, (*shots.zero_shot, *shots.examples, *shots.in_context))


@pytest.mark.parametrize(
    ("kind", "form", "method"),
    [("gpt", "query", "plain"), ("gpt", "unlabelled", "plain"), ("linear", "unlabelled", "plain"),
     ("full", "query", "plain"), ("linear", "unlabelled", "linearized"), ("full", "query", "per_layer")],
)  # fmt: skip
def test_prompt_by_prompt(kind, form, method):
    model = model_of(kind, n_context=3)
    prompts = random_prompts(model.cfg, 3, seed=1)
    before, tuning = Snapshot(model), FineTuning(2e-4, epochs=2, method=method)
    found = compare_on_prompts(model, prompts, tuning, zero_shot=form, seed=7)
    before.check()
    parts = []
    for i in range(3):
        shots = prompt_shots(model, prompts[i : i + 1], form)
        tuned = fine_tune(model, shots, tuning)
        parts.append(compare_with_finetuning(model, shots, tuned, seed=7 + 2 * i))
        if method == "plain":
            after = cached(added(model, tuned.changes))
            expected = compared(2, shots, cached(model), after, seed=7 + 2 * i)
            for name, value in expected.items():
                assert_close(
                    getattr(found, name)[..., i : i + 1], torch.tensor(value), atol=1e-6, rtol=1e-6, equal_nan=True,
                    msg=name,
                )  # fmt: skip
    for name, of in FineTuningComparison.concatenate(parts).samples().items():
        assert_close(getattr(found, name), of, equal_nan=True, atol=0, rtol=0)
    assert len(found.to_dataframe()) == 3
    assert found.intervals()["prediction_distance"].n == 3
    gained = [i for i in range(3) if found.finetuned_loss[i] < found.zero_shot_loss[i]]
    too = [i for i in gained if found.in_context_loss[i] < found.zero_shot_loss[i]]
    assert found.recall().mean == pytest.approx(len(too) / len(gained)) if gained else math.isnan(found.recall().mean)
    in_context = (model.predict(prompts) - prompts.query.ys).square().sum(-1)
    assert_close(found.in_context_loss, in_context.detach())


def test_a_query_alone_that_sees_nothing_but_the_context():
    """It is predicted as it stands, and there is nothing to learn from it."""
    model = model_of("linear")
    found = compare_on_prompts(model, random_prompts(model.cfg, 2), FineTuning(0.01), zero_shot="query")
    assert torch.equal(found.zero_shot_loss, found.finetuned_loss)
    assert found.update_similarity.isnan().all()
    assert found.in_context_loss.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_prompts_of_another_dtype(dtype):
    model = model_of("gpt", dtype=dtype)
    prompts = random_prompts(model_of("gpt").cfg, 2)
    for method in ("plain", "linearized", "per_layer"):
        found = compare_on_prompts(model, prompts, FineTuning(0.01, method=method))
        assert found.finetuned_loss.dtype == torch.float64
        assert found.finetuned_loss.isfinite().all()


def test_prompts_that_are_refused():
    model = model_of("gpt")
    with pytest.raises(ValueError, match="one prompt with context points needed"):
        prompt_shots(model, random_prompts(model.cfg, 2))
    with pytest.raises(ValueError, match="one prompt with context points needed"):
        prompt_shots(model, random_prompts(model.cfg, 1).prefix(0))
    with pytest.raises(ValueError, match="the model takes x_dim=2"):
        prompt_shots(model, random_prompts(dataclasses.replace(model.cfg, x_dim=3), 1))
    long = random_prompts(dataclasses.replace(model.cfg, n_context=4, n_ctx=None), 1)
    with pytest.raises(ValueError, match=r"a prompt of 9 tokens is longer than the model's context of n_ctx=5"):
        compare_on_prompts(model, long, FineTuning(0.01))
