"""Results of sweeps, metrics and corrupted prompts, against formulas."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mechicl.analysis.interventions import (
    InterventionSweep,
    corrupt,
    corrupt_tokens,
    logit_difference,
    next_token_loss,
    patch,
    squared_error,
)
from mechicl.analysis.interventions.metrics import evaluate_metric
from mechicl.statistics import load_result
from mechicl.statistics.intervals import student_t_quantile
from mechicl.tasks import LinearRegression
from tests.analysis.interventions.oracles import model_of, pair

MODEL = model_of("gpt")
CLEAN, CORRUPTED = pair(MODEL, 6)
SWEPT = patch(MODEL, CLEAN, CORRUPTED, metrics={"first": lambda p: p[:, 0], "square": lambda p: p[:, 0] ** 2})


def two_runs(unpatched: list[float], source: list[float], dtype: torch.dtype = torch.float64) -> InterventionSweep:
    """Three cells, which change the metric of every prompt by 0, 1 and 2."""
    before, after = (torch.tensor(metric, dtype=dtype) for metric in (unpatched, source))
    values = before + torch.arange(3, dtype=dtype)[:, None]
    return InterventionSweep(
        "made", ("layer",), ((0, 1, 2),), None, before[:, None], after[:, None], {"m": values}, {"m": before},
        {"m": after},
    )  # fmt: skip


def test_nothing_is_recovered_where_both_runs_agree():
    for unpatched, source in [
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [2.0, 1.0]),  # in the mean
        ([1.0, 2.0], [1.0 + 1e-9, 2.0 - 3e-9]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1e-9, 1e-9], [1e-9, 1e-9 + 1e-20]),
    ]:
        assert two_runs(unpatched, source).recovered().isnan().all()
    assert two_runs([0.1, 0.2], [0.1 + 1e-8, 0.2], torch.float32).recovered().isnan().all()
    assert patch(MODEL, CLEAN, CLEAN).recovered().isnan().all()


@pytest.mark.parametrize(("metric", "level"), [("first", 0.95), ("square", 0.5)])
def test_the_interval_of_a_share_is_that_of_a_ratio_of_means(metric, level):
    whole = SWEPT.source_values[metric] - SWEPT.unpatched_values[metric]
    for layer in range(2):
        for head in range(2):
            effect = SWEPT.effect(metric)[layer, head]
            share = SWEPT.recovered_interval(layer, head, metric=metric, level=level)
            assert share.mean == pytest.approx(SWEPT.recovered(metric)[layer, head].item())
            rest = (effect - share.mean * whole) / whole.mean()
            half = student_t_quantile((1 + level) / 2, 5) * rest.std().item() / math.sqrt(6)
            assert (share.low, share.high) == (pytest.approx(share.mean - half), pytest.approx(share.mean + half))
            assert (share.n, share.level) == (6, level)


def test_tables_intervals_and_the_strongest():
    table = SWEPT.to_dataframe()
    one = table[(table["layer"] == 1) & (table["head"] == 0)].iloc[0]
    assert one["first"] == pytest.approx(SWEPT.values["first"][1, 0].mean().item())
    interval = SWEPT.interval(1, 0)
    assert interval.mean == pytest.approx(SWEPT.effect()[1, 0].mean().item())
    columns = ("first_effect", "first_effect_low", "first_effect_high")
    assert [one[column] for column in columns] == pytest.approx([interval.mean, interval.low, interval.high])
    strongest = SWEPT.strongest(2)["first_effect"].abs().tolist()
    assert strongest == sorted(table["first_effect"].abs(), reverse=True)[:2]
    assert list(SWEPT.to_patching_result("square").to_dataframe().columns) == [
        "metric", "layer", "head", "example", "value",
    ]  # fmt: skip


def test_a_sweep_is_saved_and_loaded(tmp_path):
    loaded = load_result(SWEPT.save(tmp_path / "sweep"))
    assert str(loaded) == str(SWEPT)
    assert loaded.to_dataframe().equals(SWEPT.to_dataframe())


# ---- metrics ----
PAIRS = LinearRegression(x_dim=3, n_context=4, y_dim=2).sample(5, seed=0, dtype=torch.float64)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_squared_errors_of_the_query_and_of_all_points(dtype):
    error = squared_error(PAIRS)
    query, points = draw(5, 2, dtype=dtype), draw(5, 5, 2, dtype=dtype)
    assert error(query).dtype == error(points).dtype == dtype
    for i in range(5):
        one = sum((query[i, y].item() - PAIRS.ys[i, -1, y].item()) ** 2 for y in range(2)) / 2
        every = sum((points[i, t, y].item() - PAIRS.ys[i, t, y].item()) ** 2 for y in range(2) for t in range(5)) / 10
        assert error(query)[i].item() == pytest.approx(one, rel=1e-5)
        assert error(points)[i].item() == pytest.approx(every, rel=1e-5)


def test_differences_of_logits_and_losses():
    logits, right, wrong = draw(5, 7), torch.tensor([0, 1, 2, 6, 6]), torch.tensor([1, 1, 0, 5, 0])
    difference, loss = logit_difference(right, wrong)(logits), next_token_loss(right)(logits)
    for i in range(5):
        assert difference[i].item() == pytest.approx((logits[i, right[i]] - logits[i, wrong[i]]).item())
        total = sum(math.exp(value) for value in logits[i].tolist())
        assert loss[i].item() == pytest.approx(-math.log(math.exp(logits[i, right[i]].item()) / total))
    logits, targets = draw(2, 3, 4), torch.tensor([[1, -100, 3], [-100, -100, 0]])  # positions without target
    nats = -logits.log_softmax(-1)
    assert_close(next_token_loss(targets)(logits), torch.stack([(nats[0, 0, 1] + nats[0, 2, 3]) / 2, nats[1, 2, 0]]))


def test_values_of_a_metric_are_converted_to_floats():
    predictions = draw(3, 2)
    counted = evaluate_metric("sign", lambda p: p[:, 0] > 0, predictions)
    assert_close(counted, (predictions[:, 0] > 0).double())
    assert evaluate_metric("wide", lambda p: p[:, 0].double(), predictions.float()).dtype == torch.float64


# ---- corrupted prompts ----
KINDS = ("task", "labels", "query", "prompt", "noise")


def prompts(n: int = 6, n_context: int = 5, y_dim: int = 2, dtype: torch.dtype = torch.float64):
    return LinearRegression(x_dim=3, n_context=n_context, y_dim=y_dim).sample(n, seed=3, dtype=dtype)


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.integers(2, 5), st.integers(2, 5), st.integers(1, 2), st.integers(0, 99))
def test_what_changes_and_what_does_not(kind, n, n_context, y_dim, seed):
    clean = prompts(n, n_context, y_dim)
    xs, ys = clean.xs.clone(), clean.ys.clone()
    corrupted = corrupt(clean, kind, seed=seed)
    assert torch.equal(clean.xs, xs)
    assert torch.equal(clean.ys, ys)
    assert (corrupted.xs.shape, corrupted.ys.shape) == (xs.shape, ys.shape)
    again = corrupt(clean, kind, seed=seed)
    assert torch.equal(corrupted.xs, again.xs)
    assert torch.equal(corrupted.ys, again.ys)
    assert corrupt(prompts(dtype=torch.float32), kind).ys.dtype == torch.float32
    if kind == "task":
        assert torch.equal(corrupted.xs, xs)
        assert_close(corrupted.ys.square().mean(), ys.square().mean())
        for i in range(n):  # linear in the inputs, by other weights
            weights = torch.linalg.lstsq(xs[i], corrupted.ys[i], driver="gelsd").solution
            assert_close(xs[i] @ weights, corrupted.ys[i], atol=1e-8, rtol=1e-6)
        assert not torch.allclose(corrupted.ys, ys)
    elif kind == "labels":
        assert torch.equal(corrupted.xs, xs)
        assert torch.equal(corrupted.ys[:, -1], ys[:, -1])
        for i in range(n):
            taken = [(ys[i, :-1] == y).all(-1).nonzero().item() for y in corrupted.ys[i, :-1]]
            assert sorted(taken) == list(range(n_context))
            assert all(t != here for here, t in enumerate(taken))
    elif kind == "query":
        assert torch.equal(corrupted.ys[:, :-1], ys[:, :-1])
        assert torch.equal(corrupted.xs[:, :-1], xs[:, :-1])
        taken = [(xs[:, -1] == x).all(-1).nonzero().item() for x in corrupted.xs[:, -1]]
        assert all(t != here for here, t in enumerate(taken))
    elif kind == "prompt":
        taken = [(xs == x).all((1, 2)).nonzero().item() for x in corrupted.xs]
        assert sorted(taken) == list(range(n))
        assert all(t != here for here, t in enumerate(taken))
        assert torch.equal(corrupted.ys, ys[torch.tensor(taken)])
    else:
        assert torch.equal(corrupted.xs, xs)
        assert torch.equal(corrupted.ys[:, -1], ys[:, -1])
        assert not torch.isclose(corrupted.ys[:, :-1], ys[:, :-1]).all()


def test_seeds_differ_and_the_noise_has_its_size():
    clean = prompts(2000, y_dim=1)
    for size in (0.5, 2.0):
        moved = (corrupt(clean, "noise", noise_std=size).ys - clean.ys)[:, :-1]
        assert moved.std().item() == pytest.approx(size * clean.ys.std().item(), rel=0.03)
    for kind in KINDS:
        drawn = [corrupt(clean, kind, seed=seed) for seed in (0, 1)]
        assert not (torch.equal(drawn[0].xs, drawn[1].xs) and torch.equal(drawn[0].ys, drawn[1].ys))


@st.composite
def sequences(draw: st.DrawFn) -> torch.Tensor:
    n, n_pos, d_vocab = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(2, 6))
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))


@settings(max_examples=25)
@given(sequences(), st.one_of(st.none(), st.integers(6, 9)), st.integers(0, 99))
def test_no_earlier_occurrence_of_the_last_token_remains(clean, d_vocab, seed):
    size = d_vocab or int(clean.max()) + 1
    assume(size > 1)
    before = clean.clone()
    corrupted = corrupt_tokens(clean, d_vocab=d_vocab, seed=seed)
    assert torch.equal(clean, before)
    assert (corrupted.shape, corrupted.dtype) == (clean.shape, torch.int64)
    assert torch.equal(corrupted[:, -1], clean[:, -1])
    earlier = clean[:, :-1] == clean[:, -1:]
    assert not (corrupted[:, :-1] == clean[:, -1:]).any()
    assert torch.equal(corrupted[:, :-1][~earlier], clean[:, :-1][~earlier])
    assert ((corrupted >= 0) & (corrupted < size)).all()
    assert torch.equal(corrupted, corrupt_tokens(clean, d_vocab=d_vocab, seed=seed))
