"""The transformer of tables: against plain loops, its symmetries, its hooks in the engine, saving and training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf
from torch import Tensor

from mechicl.analysis import ablate, patch
from mechicl.checkpoints import load, save
from mechicl.models import TableConfig, TableTransformer, TransformerConfig, build, config_from_dict
from mechicl.prompts import Prompts, Tables
from mechicl.tasks import LinearRegression, TableClassification, TableRegression
from mechicl.training import PRESETS, TrainingConfig, train

CFG = TableConfig(x_dim=3, n_context=9, n_layers=2, n_heads=2, d_model=12, dtype="float64")
MODEL = TableTransformer(CFG, seed=1).eval()
HALF = TableTransformer(CFG.replace(dtype="float16")).eval()
CLASSES = TableTransformer(CFG.replace(y_dim=3, predicts="classes"), seed=2).eval()
TASK = TableRegression(x_dim=3, n_context=9, n_queries=4, missing=0.3)
TABLES = TASK.sample_tables(3, seed=0).to(torch.float64)
CLASS_TABLES = TableClassification(x_dim=3, n_context=9, n_queries=4).sample_tables(3, seed=0).to(torch.float64)


# ---- one table, one row to predict, in plain numpy loops ----


def norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.w"] + weights[f"{name}.b"]


def attend(reader: np.ndarray, read: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Compute the update of one cell that reads a list of cells."""
    total = np.zeros_like(reader)
    w_q, w_k, w_v, w_o = (weights[f"{name}.W_{part}"] for part in "QKVO")
    for head in range(len(w_q)):
        scores = np.array([reader @ w_q[head] @ (cell @ w_k[head]) for cell in read]) / np.sqrt(w_q.shape[2])
        shares = np.exp(scores) / np.exp(scores).sum()
        total += sum(share * (cell @ w_v[head] @ w_o[head]) for share, cell in zip(shares, read, strict=True))
    return total


def plain_outputs(model: TableTransformer, xs: np.ndarray, ys: np.ndarray, query: np.ndarray) -> np.ndarray:
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    rows, (n, n_columns) = np.vstack([xs, query]), xs.shape
    stream = np.zeros((n + 1, n_columns + 1, model.cfg.d_model))
    for column in range(n_columns):
        seen = np.sort(xs[:, column][~np.isnan(xs[:, column])])
        centre = seen[(len(seen) - 1) // 2] if len(seen) else 0.0
        scale = np.abs(seen - centre).mean() if len(seen) else 1.0
        for row in range(n + 1):
            missing = np.isnan(rows[row, column])
            value = 0.0 if missing else np.arcsinh((rows[row, column] - centre) / (scale if scale > 1e-9 else 1.0))
            stream[row, column] = value * weights["W_cell"][0] + missing * weights["W_cell"][1] + weights["b_cell"]
    for row in range(n + 1):
        label = np.append(ys[row], 0.0) if row < n else np.append(0 * ys[0], 1.0)
        stream[row, -1] = label @ weights["W_label"] + weights["b_label"]
    for layer in range(model.cfg.n_layers):
        at = f"blocks.{layer}"
        normed = norm(stream, weights, f"{at}.ln_col")
        stream = stream + [[attend(cell, row, weights, f"{at}.col_attn") for cell in row] for row in normed]
        normed = norm(stream, weights, f"{at}.ln_row")
        stream = stream + [
            [
                attend(normed[row, column], normed[:n, column], weights, f"{at}.row_attn")
                for column in range(n_columns + 1)
            ]
            for row in range(n + 1)
        ]
        hidden = norm(stream, weights, f"{at}.ln2") @ weights[f"{at}.mlp.W_in"] + weights[f"{at}.mlp.b_in"]
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        stream = stream + hidden @ weights[f"{at}.mlp.W_out"] + weights[f"{at}.mlp.b_out"]
    return norm(stream[-1, -1], weights, "ln_final") @ weights["W_U"] + weights["b_U"]


@pytest.mark.parametrize(("model", "tables"), [(MODEL, TABLES), (CLASSES, CLASS_TABLES)])
def test_outputs_are_those_of_plain_loops(model: TableTransformer, tables: Tables):
    n = tables.n_context
    outputs = model(tables, at="query").detach().numpy()
    for table in range(2):
        xs, ys = tables.xs[table].numpy(), tables.ys[table].numpy()
        for query in range(2):
            expected = plain_outputs(model, xs[:n], ys[:n], xs[n + query])
            np.testing.assert_allclose(outputs[table, query], expected, rtol=0, atol=1e-12)


def test_classes_have_probabilities():
    predicted = CLASSES.predict_tables(CLASS_TABLES)
    torch.testing.assert_close(predicted, CLASSES(CLASS_TABLES, at="query").softmax(-1))
    prompts = CLASS_TABLES.prompts()
    torch.testing.assert_close(CLASSES.predict(prompts).view_as(predicted), predicted, rtol=0, atol=1e-12)


# ---- symmetries ----


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**20), st.integers(1, 5), st.integers(0, 12), st.integers(1, 5), st.sampled_from([MODEL, CLASSES])
)
def test_order_of_columns_rows_and_queries(seed: int, n_columns: int, n: int, n_queries: int, model: TableTransformer):
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(2, n + n_queries, n_columns, generator=generator, dtype=torch.float64)
    xs = xs.masked_fill(torch.rand(xs.shape, generator=generator) < 0.2, torch.nan)
    ys = torch.randn(2, n + n_queries, model.cfg.y_dim, generator=generator, dtype=torch.float64)
    predicted = model.predict_tables(Tables(xs, ys, n))
    columns, rows, queries = (torch.randperm(size, generator=generator) for size in (n_columns, n, n_queries))
    order = torch.cat([rows, n + queries])
    permuted = model.predict_tables(Tables(xs[:, order][..., columns], ys[:, order], n))
    torch.testing.assert_close(permuted, predicted[:, queries], rtol=0, atol=1e-12)
    # each query alone, with another label that must not be seen
    for query in range(n_queries):
        kept = [*range(n), n + query]
        alone = Tables(xs[:, kept], torch.cat([ys[:, :n], ys[:, n + query :][:, :1] + 7], dim=1), n)
        torch.testing.assert_close(model.predict_tables(alone)[:, 0], predicted[:, query], rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.01, 100), st.floats(-50, 50), st.integers(0, 2))
def test_units_of_a_column_do_not_matter(scale: float, shift: float, column: int):
    xs = TABLES.xs.clone()
    xs[..., column] = scale * xs[..., column] + shift
    changed = MODEL.predict_tables(dataclasses.replace(TABLES, xs=xs))
    torch.testing.assert_close(changed, MODEL.predict_tables(TABLES), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1e7), (1.0, 1.7e9), (1e-9, 0.0), (1e-300, 0.0), (1e39, 0.0)])
def test_units_that_the_models_dtype_cannot_hold(scale: float, shift: float):
    model, xs = TableTransformer(CFG.replace(dtype="float32"), seed=1), (TABLES.xs * 1024).round() / 1024
    tables = [Tables(each, TABLES.ys, TABLES.n_context) for each in (xs, scale * xs + shift)]
    expected, changed = (model.predict_tables(each) for each in tables)
    assert changed.dtype == torch.float32
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-6)


# ---- hooks and the engine ----


def test_hooks_see_every_part_and_change_no_prediction():
    plain = MODEL(TABLES, at="query")
    outputs, cache = MODEL.run_with_cache(MODEL.encode(TABLES), at="query")
    torch.testing.assert_close(outputs, plain, rtol=0, atol=1e-12)
    n, rows, columns = 9, 13, 4
    assert cache["blocks.0.col_attn.hook_pattern"].shape == (3, rows, 2, columns, columns)
    assert cache["blocks.1.row_attn.hook_pattern"].shape == (3, columns, 2, rows, n)
    assert cache["blocks.1.row_attn.hook_z"].shape == (3, rows, columns, 2, 6)
    torch.testing.assert_close(
        cache["blocks.1.row_attn.hook_pattern"].sum(-1), torch.ones(3, columns, 2, rows, dtype=torch.float64)
    )


CLEAN = TASK.sample(5, seed=1, dtype=torch.float64)
CORRUPTED = Prompts(CLEAN.xs, CLEAN.ys.roll(1, 0))


def patched_by_hand(name: str, index: tuple[Any, ...], model: TableTransformer = MODEL) -> Tensor:
    """The prediction of the corrupted prompts with part of an activation from the clean ones, from a whole run."""
    with torch.no_grad():
        _, cache = model.run_with_cache(model.encode(CLEAN))

        def replace(activation: Tensor, hook: object) -> Tensor:
            changed = activation.clone()
            changed[index] = cache[name][index]
            return changed

        return model.run_with_hooks(model.encode(CORRUPTED), fwd_hooks=[(name, replace)])[:, -1]


EVERY = slice(None)
PATCHES: list[tuple[str, dict[str, int], str, tuple[object, ...]]] = [
    ("row_z", {"layer": 1, "pos": 9, "column": 3, "head": 0}, "blocks.1.row_attn.hook_z", (EVERY, 9, 3, 0)),
    ("row_z", {"layer": 0, "head": 1}, "blocks.0.row_attn.hook_z", (EVERY, EVERY, EVERY, 1)),
    ("col_z", {"layer": 0, "pos": 2, "head": 1}, "blocks.0.col_attn.hook_z", (EVERY, 2, EVERY, 1)),
    ("row_pattern", {"layer": 1, "column": 3, "query": 9}, "blocks.1.row_attn.hook_pattern", (EVERY, 3, EVERY, 9)),
    ("col_attn_out", {"layer": 0, "column": 3}, "blocks.0.hook_col_attn_out", (EVERY, EVERY, 3)),
    ("cell_pre", {"layer": 1, "pos": 4, "column": 3}, "blocks.1.hook_resid_pre", (EVERY, 4, 3)),
    ("resid_post", {"layer": 0, "pos": 9}, "blocks.0.hook_resid_post", (EVERY, 9)),
]


@pytest.mark.parametrize(("component", "cell", "name", "index"), PATCHES)
def test_patching_is_a_whole_run_with_a_hook(
    component: str, cell: dict[str, int], name: str, index: tuple[object, ...]
):
    swept = patch(MODEL, CLEAN, CORRUPTED, component, cell)
    assert swept.predictions is not None
    expected = patched_by_hand(name, index)
    torch.testing.assert_close(swept.predictions.flatten(0, -3), expected[None], rtol=0, atol=1e-12)
    assert (expected - MODEL.predict(CORRUPTED)).abs().max() > 1e-6  # it has an effect


def test_edits_of_a_classifier_give_probabilities():
    prompts = CLASS_TABLES.prompts()
    swept = ablate(CLASSES, prompts, "cell_mlp_out", {"layer": [0]}, method="zero")
    assert swept.predictions is not None
    torch.testing.assert_close(swept.predictions.sum(-1), torch.ones(1, len(prompts), dtype=torch.float64))


def test_streams_are_those_of_the_labels_column_and_lead_to_the_prediction():
    streams = list(MODEL.layer_streams(CLEAN, at="query"))
    assert [each.shape for each in streams] == [(5, 1, 12)] * 3
    torch.testing.assert_close(MODEL.read_out(streams[-1])[:, 0], MODEL.predict(CLEAN))
    queries = torch.randn(5, 10, 2, 3, dtype=torch.float64)
    *_, last = MODEL.query_streams(CLEAN, queries)
    for point in (0, 4, 9):
        expected = MODEL.predict(CLEAN.prefix(point).with_query(queries[:, point, 1]))
        torch.testing.assert_close(MODEL.read_out(last[:, point, 1]), expected, rtol=0, atol=1e-12)


def test_gradients_reach_the_query():
    xs = CLEAN.xs.clone().requires_grad_()
    MODEL.predict(Prompts(xs, CLEAN.ys)).sum().backward()
    assert xs.grad is not None
    assert (xs.grad[:, -1] != 0).all()


# ---- errors, saving, training ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MODEL(torch.zeros(2, 5, 4, 3, dtype=torch.float64)), "tokens must be"),
        (lambda: MODEL(CLEAN, start_at_layer=1), "with start_at_layer the input is"),
        (lambda: MODEL(CLEAN, return_type="loss"), "is not one of"),
        (lambda: MODEL.predict(LinearRegression(y_dim=2).sample(1, seed=0)), "the model takes y_dim=1"),
        (lambda: MODEL.predict_tables(Tables(TABLES.xs.sign() * 1.7e308, TABLES.ys, 9)), "of a column's cells float64"),
        (lambda: HALF.predict_tables(dataclasses.replace(TABLES, ys=TABLES.ys * 1e9)), "labels must fit float16"),
        (lambda: CFG.replace(n_heads=5), "n_heads must divide d_model"),
        (lambda: CFG.replace(predicts="classes"), "needs y_dim"),
        (lambda: config_from_dict({**CFG.to_dict(), "d_mlpp": 3}), "has no field"),
        (lambda: patch(MODEL, CLEAN, CORRUPTED, "row_z", {"layer": [0], "key": [1]}), "has the axes"),
    ],
)
def test_errors(call: Callable[[], object], message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_saved_model_is_the_same(tmp_path):
    save(tmp_path / "m", [CLASSES], {"training": {"task": {"type": "TableClassification"}}})
    read = load(tmp_path / "m")
    assert read.cfg == CLASSES.cfg
    assert torch.equal(read.predict_tables(CLASS_TABLES), CLASSES.predict_tables(CLASS_TABLES))


@pytest.mark.parametrize("name", ["table-regression", "table-classification"])
def test_training_learns_from_all_rows_to_predict(name: str, tmp_path):
    preset = PRESETS[name]
    small = preset.model.replace(n_layers=1, d_model=16, x_dim=2, n_context=12)
    task: Any = preset.task.replace(x_dim=2, n_context=12, n_queries=8)
    config: TrainingConfig = preset.replace(
        model=small, task=task, steps=40, batch_size=16, warmup_steps=5, eval_every=20, eval_prompts=50, save_every=20
    )
    result = train(config, tmp_path / "run", progress=False)
    losses = [line[0] for line in result.record["curve"]["eval_loss"]]
    assert losses[-1] < losses[0]
    tables = task.replace(varied=False).sample_tables(50, seed=config.eval_seed)
    predicted, targets = result.models[0].predict_tables(tables), tables.targets
    by_hand = (
        (predicted - targets).square().mean() if "regression" in name else -(targets * predicted.log()).sum(-1).mean()
    )
    assert losses[-1] == pytest.approx(by_hand.item(), rel=1e-5)
    assert build(small).cfg == result.models[0].cfg


@pytest.mark.parametrize("component", ["cell_pre", "row_z", "col_pattern"])
def test_other_models_have_no_parts_of_tables(component: str):
    task = LinearRegression(x_dim=2, n_context=3)
    model = build(TransformerConfig(x_dim=2, n_context=3, n_layers=1, n_heads=2, d_model=8, attention="softmax"))
    with pytest.raises(ValueError, match="the model has no hook"):
        patch(model, task.sample(2, seed=0), task.sample(2, seed=1), component, progress=False)
