"""Measures and every field of a comparison against loops over queries, layers, heads and pairs of tokens."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
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
from mechicl.analysis.finetuning.context_comparison import attention_rank_correlation
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from tests.analysis.finetuning.oracles import (
    KINDS,
    Snapshot,
    added,
    cached,
    compared,
    expanded,
    kendall,
    model_on_tokens,
    token_shots,
)
from tests.analysis.interventions.oracles import bounded, model_of
from tests.strategies import random_prompts

TUNINGS = {
    "plain": FineTuning(0.1, epochs=2),
    "linearized": FineTuning(0.05, method="linearized", epochs=2),
    "per_layer": FineTuning(0.1, method="per_layer"),
    "all": FineTuning(0.05, parameters="all"),
}


def assert_fields(comparison, expected, atol=1e-6):
    assert {field.name for field in dataclasses.fields(comparison)} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(comparison, name).numpy(), value, atol=atol, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [*((kind, "plain") for kind in KINDS), ("softmax", "linearized"), ("linear", "linearized"), ("gpt2", "linearized"),
     ("llama", "linearized"), ("softmax", "per_layer"), ("softmax", "all")],
)  # fmt: skip
def test_every_field(kind, tuning):
    model, shots = model_on_tokens(kind), token_shots()
    tuned = fine_tune(model, shots, TUNINGS[tuning])
    comparison = compare_with_finetuning(model, shots, TUNINGS[tuning] if kind == "softmax" else tuned, seed=3)
    after = expanded(model, tuned.changes) if tuning == "linearized" else cached(added(model, tuned.changes))
    assert_fields(comparison, compared(model.cfg.n_layers, shots, cached(model), after, seed=3))


def test_memory_makes_no_difference():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(1, 3, 2, 3, 2, 2, 1))
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    expected = compare_with_finetuning(model, shots, tuned).samples()
    for memory in (1.3e5, 3e5):  # one query, or a few, at a time
        assert_fields(bounded(memory, lambda: compare_with_finetuning(model, shots, tuned)), expected)


def test_tokens_that_examples_share_tie_whatever_the_batches():
    """Demonstrations with a common start, each read alone, have the same query vectors there, up to rounding."""
    model = model_on_tokens("softmax", n_ctx=80)
    shots = token_shots((6, 8, 7, 9, 6, 8), (2, 3), prefix=4)
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    one, several = (bounded(memory, lambda: compare_with_finetuning(model, shots, tuned)) for memory in (1e6, 2**30))
    expected = compared(2, shots, cached(model), cached(added(model, tuned.changes)), seed=0)
    for comparison in (one, several):
        assert_fields(comparison, expected)
        for name in ("rank_correlation", "head_rank_correlation"):
            np.testing.assert_allclose(getattr(comparison, name), expected[name], atol=1e-9, err_msg=name)


def test_undefined_measures_are_nan():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(1, 1, 2))
    still = compare_with_finetuning(model, shots, FineTuning(learning_rate=0.0))
    for name, value in still.samples().items():
        undefined = name in ("update_similarity", "head_update_similarity", "centred_update_similarity")
        if name.startswith("map_similarity"):  # one score has no direction but a sign
            assert value[..., :2].isnan().all()
            assert value[..., 2].isfinite().all()
        else:
            assert value.isnan().all() if undefined else value.isfinite().all(), name
    torch.testing.assert_close(still.zero_shot_loss, still.finetuned_loss)
    torch.testing.assert_close(still.map_similarity_before[..., 2], still.map_similarity_after[..., 2])
    torch.testing.assert_close(still.rank_correlation, still.rank_correlation_before)
    assert np.isnan(still.recall().mean)
    with torch.no_grad():  # flat attention: no scores
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.zero_()
    flat = compare_with_finetuning(model, shots, TUNINGS["plain"])
    for name in ("rank_correlation", "head_rank_correlation", "random_rank_correlation", "map_similarity_before"):
        assert getattr(flat, name).isnan().all()
    assert flat.update_similarity.isfinite().all()
    one_token = compare_with_finetuning(model_on_tokens("softmax"), token_shots((1,), (1, 2)), FineTuning(0.1))
    assert one_token.rank_correlation.isnan().all()
    assert one_token.update_similarity.isfinite().all()


def test_comparisons_are_joined():
    # seeds with queries that fine-tuning improves, of which the recall is a share
    model = model_on_tokens("softmax")
    parts = [compare_with_finetuning(model, token_shots(seed=seed), FineTuning(0.3)) for seed in (3, 5)]
    both = FineTuningComparison.concatenate(parts)
    for name, value in both.samples().items():
        assert_close(value, torch.cat([getattr(part, name) for part in parts], -1), equal_nan=True)
    better = [i for i in range(10) if both.finetuned_score[i] > both.zero_shot_score[i]]
    too = [i for i in better if both.in_context_score[i] > both.zero_shot_score[i]]
    assert both.recall().mean == pytest.approx(len(too) / len(better))
    intervals = both.intervals()
    assert 0 <= intervals["in_context_score"].low < intervals["in_context_score"].high <= 1  # shares


# ---- measures ----
def close(measured, expected):
    assert_close(measured, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_correlation(n, dtype):
    generator = torch.Generator().manual_seed(n)
    numbers = torch.randn(2, 2, 3, n, generator=generator)
    ties = torch.randint(4, (2, 2, 3, n), generator=generator)  # of few values: many ties, and some rows are flat
    for a, b in (numbers.to(dtype), ties.to(dtype)):
        correlation = attention_rank_correlation(a, b)
        for place in itertools.product(range(2), range(3)):
            close(correlation[place], kendall(a[place].double(), b[place].double()))
    flat, rising = torch.full((5,), 0.2), torch.arange(5.0)
    assert attention_rank_correlation(flat, rising).isnan()
    close(attention_rank_correlation(torch.stack([rising, flat]), -torch.stack([rising, rising])), [-1.0, math.nan])


def scored(*scores):
    """A comparison with these scores: without demonstrations, after them, and after fine-tuning."""
    per_query = [torch.zeros_like(scores[0])] * 4
    per_layer = {each.name: torch.zeros(1, len(scores[0])) for each in dataclasses.fields(FineTuningComparison)[7:]}
    per_head = {name: value[None] for name, value in per_layer.items() if name.startswith(("head", "map"))}
    return FineTuningComparison(*scores, *per_query, **(per_layer | per_head))


def test_recall_by_counting_and_the_coverage_of_its_interval():
    every = list(itertools.product([0.0, 1.0, -2.5], repeat=3))
    recall = scored(*(torch.tensor(column) for column in zip(*every, strict=True))).recall()
    gained = [row for row in every if row[2] > row[0]]
    assert recall.mean == pytest.approx(sum(row[1] > row[0] for row in gained) / len(gained))
    assert recall.n == len(gained)
    none = scored(*torch.ones(3, 3)).recall()
    assert (math.isnan(none.mean), math.isnan(none.low), math.isnan(none.high), none.n) == (True, True, True, 0)
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        gained = torch.rand(80, generator=generator) < 0.5
        both = gained & (torch.rand(80, generator=generator) < 0.7)
        inside += 0.7 in scored(torch.zeros(80), both.float(), gained.float()).recall()
    assert 0.9 < inside / 300 <= 0.99


def test_recall_where_gains_are_independent():
    """Demonstrations correct 70% of the wrong answers, whatever fine-tuning does: Rec2FTP is 70% too."""
    generator = torch.Generator().manual_seed(0)
    wrong, reads, tuned = (torch.rand(200_000, generator=generator) < share for share in (0.6, 0.7, 0.4))
    zero_shot, in_context, finetuned = (~wrong).double(), reads.double(), tuned.double()
    comparison = scored(zero_shot, in_context, finetuned)
    baseline = comparison.recall_if_independent()
    assert (baseline.n, baseline.mean) == (int(wrong.sum()), pytest.approx(reads[wrong].double().mean().item()))
    assert comparison.recall().mean == pytest.approx(baseline.mean, abs=0.01)
    losses = -torch.rand(3, 50, generator=generator, dtype=torch.float64)  # of a regression every query can improve
    better = (losses[1] > losses[0]).double().mean().item()
    assert scored(*losses).recall_if_independent().mean == pytest.approx(better)


# ---- prompts of points ----
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


@pytest.mark.parametrize("kind", ["gpt", "linear"])
def test_shots_of_a_prompt(kind):
    model = model_of(kind, n_context=3, y_dim=2)
    if kind == "linear":
        with torch.no_grad():
            model.initial_weights.copy_(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
    prompt, n = random_prompts(model.cfg, 1, seed=4), 3
    shots = prompt_shots(model, prompt)
    xs, ys = prompt.xs[0].tolist(), prompt.ys[0].tolist()
    bare = [(x, [0.0] * prompt.y_dim) for x in xs[:n]] if kind == "linear" else []
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


@pytest.mark.parametrize(
    ("kind", "method"), [("gpt", "plain"), ("linear", "plain"), ("linear", "linearized"), ("full", "per_layer")]
)
def test_prompt_by_prompt(kind, method):
    model = model_of(kind, n_context=3)
    prompts = random_prompts(model.cfg, 2, seed=1)
    before, tuning = Snapshot(model), FineTuning(2e-5, epochs=2, method=method)
    comparison = compare_on_prompts(model, prompts, tuning, seed=7)
    before.check()
    parts = []
    for i in range(2):
        shots = prompt_shots(model, prompts[i : i + 1])
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
