"""Learned subspaces: planted variables are found where they lie, absent ones and controls are not."""

from functools import partial
from typing import Any

import pytest
import torch
from scipy.linalg import subspace_angles

from mechicl import wrap
from mechicl.algorithms.stepwise import Hypothesis, NewtonSteps, ResidualDescent, Runs
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.analysis.causes import SubspaceSearch, fit_subspace, interchange, sample_sources
from mechicl.analysis.causes.subspace_search import VariableExchange, find_readers, make_starts, search_columns
from mechicl.constructions import gradient_descent, hide, known_models
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, record_streams
from mechicl.statistics import load_result
from mechicl.tasks import LinearRegression
from tests.analysis.causes.test_interchange import STEP_SIZE, TwoStepsABlock

FEW: dict[str, Any] = {"n_fitting": 32, "n_prompts": 32, "iterations": 15, "progress": False}
HIDDEN = {known.name.removesuffix(", hidden"): known for known in known_models(hidden=True)}
TASK = LinearRegression(x_dim=5, n_context=20)


def degrees(result: SubspaceSearch, layer: int, columns: torch.Tensor) -> float:
    learned = result.subspace(layer, columns.shape[1])
    return float(subspace_angles(learned.numpy(), columns.numpy()).max()) * 180 / torch.pi


@pytest.mark.parametrize(
    ("name", "layer", "variable", "place"),
    [
        ("gradient descent, 2 steps", 1, "residual", "query"),
        ("gradient descent, 4 steps", 2, "residual", "context"),
        ("GD++, 3 steps", 1, "x", "context"),
        ("preconditioned gradient descent, 3 steps", 1, "residual", "context"),
        ("Newton, 3 iterations", 2, "inverse times x", "context"),
        ("copying, then gradient descent, 3 steps", 2, "residual", "context"),  # targets have separate tokens
    ],
)
def test_planted_variables_are_found_where_they_lie(name, layer, variable, place):
    known = HIDDEN[name]
    columns = known.hypothesis.subspaces.get(variable, torch.zeros(0, 1))
    dim = columns.shape[1]
    options: dict[str, Any] = {"place": place, "layers": layer, "dims": dim, "restarts": 0, **FEW}
    result = fit_subspace(known.model, known.hypothesis, variable, known.task, **options)
    assert result.r2(layer, dim).mean > 0.999
    assert result.rest_r2(layer, dim).mean > 0.99
    assert not len(columns) or degrees(result, layer, columns) < 1
    for control in ("random targets", "untrained model"):
        assert result.r2(layer, dim, control).mean < 0.3


def test_random_columns_lead_to_the_same_subspace():
    known = HIDDEN["gradient descent, 2 steps"]
    prompts = known.task.sample(32, seed=0, dtype=torch.float64)
    sources = sample_sources(known.task, prompts, seed=1)
    algorithm = known.hypothesis.algorithm
    runs = Runs(algorithm, algorithm.states(prompts), algorithm.states(sources))
    exchange = VariableExchange(known.hypothesis, ("residual",), "context", prompts, sources, runs)
    parts = exchange.run(ModelAdapter(known.model), 2**30, shuffled=False)(1, 1)
    starts = make_starts(find_readers(parts, exchange, 1), 1, 2, seed=0)[1:]
    fit = search_columns(parts, starts, 60, favoured=False)
    true = known.hypothesis.subspaces["residual"]
    assert abs((fit.basis.T @ true).item()) == pytest.approx(1, abs=1e-4)
    assert fit.loss < 1e-3


@pytest.mark.parametrize(
    ("hypothesis", "variable", "layer", "dim"),
    [
        (Hypothesis(ResidualDescent(3, step_size=STEP_SIZE, momentum=0.5)), "velocity", 1, 1),
        (Hypothesis(NewtonSteps(1), schedule=((0, 0), (1, 1), (2, 2), (3, 3))), "inverse times x", 2, 5),
    ],
)
def test_absent_variables_are_not_found(hypothesis, variable, layer, dim):
    model = hide(gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=3), seed=1).model
    few: dict[str, Any] = FEW | {"n_fitting": 24, "n_prompts": 24, "restarts": 0, "iterations": 8}
    result = fit_subspace(model, hypothesis, variable, TASK, place="context", layers=layer, dims=dim, **few)
    assert min(result.r2(layer, dim).mean, result.rest_r2(layer, dim).mean) < 0.5


def test_too_few_directions_do_not_carry_it():
    known = HIDDEN["GD++, 2 steps"]
    result = fit_subspace(
        known.model, known.hypothesis, "x", known.task, place="context", dims=(1, 3, 5), restarts=0, **FEW
    )
    one, three, five = (result.r2(1, dim) for dim in result.dims)
    assert one.mean < three.mean < 0.95
    assert three.high < five.low
    assert five.mean > 0.999


def test_distances_are_those_of_exchanges_made_by_hand():
    model = gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=2)
    hypothesis = Hypothesis(ResidualDescent(2, step_size=STEP_SIZE))
    few: dict[str, Any] = FEW | {"iterations": 3}
    result = fit_subspace(model, hypothesis, "residual", TASK, place="context", dims=2, **few)
    basis = result.subspace(1, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2).double())
    prompts = TASK.sample(32, seed=2, dtype=torch.float64)  # those that are held out
    sources = sample_sources(TASK, prompts, seed=3)
    for i in range(4):
        streams, residuals = [], []
        for each in (prompts[i : i + 1], sources[i : i + 1]):
            x, y = each.xs[0], torch.cat([each.ys[0, :-1], torch.zeros(1, 1).double()])
            y = y - STEP_SIZE * x @ x[:-1].T @ y[:-1]
            streams.append(torch.cat([x, y], dim=1))
            residuals.append(y)

        def finish(xs, ys):
            return -(ys - STEP_SIZE * xs @ xs[:-1].T @ ys[:-1])[-1]

        base, other = streams
        unchanged = finish(base[:, :5], base[:, 5:])
        foretold = finish(base[:, :5], torch.cat([residuals[1][:-1], residuals[0][-1:]])) - unchanged
        moved = (other - base) @ basis @ basis.T
        for errors, difference in ((result.errors, moved), (result.rest_errors, other - base - moved)):
            exchanged = torch.cat([(base + difference)[:-1], base[-1:]])
            change = finish(exchanged[:, :5], exchanged[:, 5:]) - unchanged
            if errors is result.errors:
                assert errors[0, 0, 0, i].item() == pytest.approx((change - foretold).square().item(), abs=1e-9)
            else:  # all other variables: the inputs
                by_x = finish(torch.cat([other[:-1, :5], base[-1:, :5]]), base[:, 5:]) - unchanged
                assert errors[0, 0, 0, i].item() == pytest.approx((change - by_x).square().item(), abs=1e-9)
        assert result.changes[0, 0, i].item() == pytest.approx(foretold.square().item(), abs=1e-9)
    r2 = 1 - result.errors[0, 0, 0].mean() / result.changes[0, 0].mean()
    assert result.r2(1, 2).mean == pytest.approx(r2.item())


def small_transformer() -> HookedTransformer:
    config = TransformerConfig(
        x_dim=3, n_context=6, n_layers=3, d_model=12, n_heads=2, d_mlp=24, prompt_format="interleaved", dtype="float64",
        attention="softmax", normalization_type="LN", initializer_range=0.4, read_in="linear",
    )  # fmt: skip
    return HookedTransformer(config, seed=1).eval()


def test_exchanges_and_their_derivatives_are_those_of_whole_passes():
    model, task = small_transformer(), LinearRegression(x_dim=3, n_context=6)
    prompts = task.sample(5, seed=0, dtype=torch.float64)
    adapter = ModelAdapter(model)
    tokens = [adapter.encode(each) for each in (prompts, sample_sources(task, prompts, seed=1))]
    base, source = (record_streams(adapter, each) for each in tokens)
    runs = StreamRuns(adapter, tokens[0], base, source)
    basis = torch.linalg.qr(torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    places: tuple[Place, ...] = ("query", "context")
    for layer in (0, 2, 3):
        for place in places:
            for rest in (False, True):
                leaf = basis.clone().requires_grad_()
                predicted = runs.exchange(layer, place, leaf, rest=rest)
                assert predicted.requires_grad
                torch.autograd.gradcheck(partial(runs.exchange, layer, place, rest=rest), leaf, fast_mode=True)
                where = slice(-1, None) if place == "query" else slice(0, -1)
                streams = base[layer].clone()
                moved = (source[layer] - streams)[:, where]
                inside = moved @ basis @ basis.T
                streams[:, where] += moved - inside if rest else inside
                whole = model(streams, start_at_layer=layer)
                torch.testing.assert_close(predicted.detach(), model.decode(whole)[:, -1])
    assert not runs.exchange(1, "query", basis).requires_grad


def test_the_whole_stream_is_the_exchange_of_everything():
    model, task = small_transformer(), LinearRegression(x_dim=3, n_context=6)
    hypothesis = Hypothesis(ResidualDescent(3, step_size=0.1))
    result = fit_subspace(model, hypothesis, "residual", task, layers=(1, 3), dims=12, **FEW)
    prompts = task.sample(32, seed=2, dtype=torch.float64)
    sources = sample_sources(task, prompts, seed=3)
    asked = interchange(model, hypothesis, prompts, sources, interventions=["query exchanged"], progress=False)
    moved, foretold = asked.predictions - asked.base, asked.expected - asked.expected_base
    torch.testing.assert_close(result.errors[0, 0, 0], (moved - foretold)[0].square().mean(0))
    torch.testing.assert_close(result.rest_errors[0, 0, 0], torch.zeros(32).double())
    assert result.searches == ("model", "random targets", "untrained model")


def test_wrapped_models_are_searched_through_their_hooks():
    model = wrap(TwoStepsABlock().eval(), encode="paired", decode=lambda out: out, layers="blocks.{}")
    hypothesis = Hypothesis(ResidualDescent(4, step_size=STEP_SIZE), schedule=((0, 0), (1, 2), (2, 4)))
    result = fit_subspace(model, hypothesis, "residual", TASK, place="context", dims=1, restarts=0, **FEW)
    assert result.searches == ("model", "random targets")
    assert result.steps == (2,)
    assert result.r2(1, 1).mean > 0.999
    assert abs(result.subspace(1, 1)[-1].item()) == pytest.approx(1, abs=1e-4)


def test_variables_are_read_off_each_token_of_a_point_alone_too():
    known = HIDDEN["previous token, then induction"]  # whose second tokens hold copies of the first ones
    few: dict[str, Any] = FEW | {"n_fitting": 48, "iterations": 1, "restarts": 0}
    result = fit_subspace(
        known.model, known.hypothesis, "x, target", known.task, place="context", layers=1, dims=5, **few
    )
    assert result.variables == ("x", "target")
    assert result.r2(1, 5).mean > 0.8
    assert result.rest_r2(1, 5).mean > 0.8


def test_batches_do_not_change_what_is_measured():
    known = HIDDEN["gradient descent, 2 steps"]
    few: dict[str, Any] = FEW | {"iterations": 2, "restarts": 0}
    whole = fit_subspace(known.model, known.hypothesis, "residual", known.task, dims=1, **few)
    parts = fit_subspace(known.model, known.hypothesis, "residual", known.task, dims=1, memory=1_200_000, **few)
    torch.testing.assert_close(whole.errors, parts.errors, rtol=1e-3, atol=1e-6)
    assert whole.changes.equal(parts.changes)


def test_the_table_and_the_saved_result(tmp_path):
    known = HIDDEN["gradient descent, 2 steps"]
    few: dict[str, Any] = FEW | {"iterations": 2, "restarts": 0}
    result = fit_subspace(known.model, known.hypothesis, "residual", known.task, dims=(1, 10), **few)
    again = load_result(result.save(tmp_path / "search"))
    assert again.r2(1, 10) == result.r2(1, 10)
    torch.testing.assert_close(again.subspace(1, 10).T @ again.subspace(1, 10), torch.eye(10).double())
    table = again.to_dataframe()
    row = table[(table["search"] == "untrained model") & (table["dim"] == 1)].iloc[0]
    assert row["rest_r2"] == result.rest_r2(1, 1, "untrained model").mean
    assert row["low"] < row["r2"] < row["high"]
    assert "query's residual" in str(result)
    assert "random targets, after 1 layer " in str(result)
    assert 1 - result.intervals()["errors"].mean == pytest.approx(table["r2"].mean())
