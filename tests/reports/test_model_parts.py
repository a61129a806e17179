"""Parts of reports on components, on interventions and on fine-tuning, against the analyses that they show."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.algorithms.card import step_kind
from mechicl.analysis import (
    FineTuning,
    InterventionSweep,
    Replacement,
    ablate,
    compare_on_prompts,
    corrupt,
    patch,
    score_heads,
)
from mechicl.checkpoints import Checkpoint, load_checkpoint, save
from mechicl.constructions import gd_plus_plus
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.reports import Row, report
from mechicl.reports.causes import STAND, causal_part, interventions_as_text, shuffle_weights
from mechicl.reports.finetuning import N_PROMPTS as N_TUNED
from mechicl.reports.finetuning import finetuning, finetuning_sections, no_finetuning, slow_finetuning
from mechicl.reports.heads import (
    ABLATED,
    HEADS_SEED,
    RESTORED,
    ablate_heads,
    measure_model_parts,
    no_model_parts,
)
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from tests.reports import by_quantity, made
from tests.scripts import import_script

TASK = LinearRegression(x_dim=2, n_context=3)
PAIRED = TransformerConfig(x_dim=2, n_context=3, n_layers=2, n_heads=2, initializer_range=0.5)
INTERLEAVED = PAIRED.replace(prompt_format="interleaved", attention="softmax", keys="causal", d_model=8)
OTHERS = TASK.sample(9, seed=2)


def network(cfg: TransformerConfig, seed: int = 3) -> HookedTransformer:
    return HookedTransformer(cfg, seed=seed).eval()


def same(row: Row, expected: Interval) -> None:
    assert isinstance(row.measured, Interval)
    assert row.measured.n == expected.n
    assert row.ends == pytest.approx((expected.low, expected.mean, expected.high), rel=1e-3)


@pytest.mark.parametrize("cfg", [PAIRED, INTERLEAVED], ids=["paired", "interleaved"])
def test_rows_and_data_are_those_of_the_analyses(cfg):
    model, prompts, others = network(cfg), TASK.sample(20, seed=1), TASK.sample(30, seed=2)
    table, figures, data = measure_model_parts(model, prompts, others, seed=7)
    both = Replacement("mean", Prompts.concatenate([prompts, others]))
    lost, lost_later = (ablate(model, batch, "z", method=both) for batch in (prompts, others))

    def restored(batch: Prompts, component: Any, *axes: Any) -> InterventionSweep:
        return patch(model, batch, corrupt(batch, "labels", seed=7), component, axes)

    recovered = restored(prompts, "z", "layer", "pos", "head").recovered()
    assert_close(torch.tensor(data["mean_ablation_of_heads"]), lost.effect().mean(-1).float())
    assert_close(torch.tensor(data["z_recovered"]), recovered.float())
    stream = restored(prompts, "resid_pre", "layer", "pos").recovered()
    assert_close(torch.tensor(data["resid_pre_recovered"]), stream.float())
    assert (data["n_prompts"], data["n_patched"]) == (20, 20)

    # components that were chosen on the prompts are measured on the others
    rows = by_quantity(table)
    layer, head = divmod(int(lost.effect().mean(-1).abs().argmax()), 2)
    loss = lost_later.unpatched_values["loss"].mean()
    note = f"head {head} of layer {layer}, chosen on other prompts; the loss is {loss:.3g} with all heads"
    assert rows[ABLATED].note == note
    same(rows[ABLATED], interval(lost_later.effect()[layer, head]))
    layer, pos, head = (int(i) for i in (recovered == recovered.max()).nonzero()[0])
    later = restored(others, "z", "layer", "pos", "head")
    same(rows[RESTORED], later.recovered_interval(layer, pos, head))
    label = cfg.format.labels(3)[pos]
    at = "the query" if "query" in label else f"position {label}"
    cost = (later.unpatched_values["loss"] - later.source_values["loss"]).mean()
    assert rows[RESTORED].note == (
        f"head {head} of layer {layer} at {at}, chosen on other prompts; exchanged labels cost {cost:.3g}"
    )
    titles = [section.title for section in figures]
    assert titles[-3:] == ["What is lost without each head", "Where the labels are", "Which heads move them"]
    grids: list[Any] = [section.content for section in figures[-3:]]
    assert torch.tensor(grids[0].data[0].z).tolist() == torch.tensor(data["mean_ablation_of_heads"]).tolist()
    assert list(grids[1].data[0].x) == cfg.format.labels(3)
    assert len(grids[2].data) == 2


def test_heads_of_interleaved_models_are_scored():
    model, prompts = network(INTERLEAVED), TASK.sample(20, seed=1)
    table, figures, data = measure_model_parts(model, prompts, OTHERS)
    scores, rows = score_heads(model, prompts=prompts), by_quantity(table)
    assert set(scores.scores) == {"previous_token", "target_to_input"}
    for name in scores.scores:
        layer, head, score = scores.best(name)
        row = rows[f"{name.replace('_', ' ')} score"]
        assert row.measured == score
        assert row.note.startswith(
            f"head {head} of layer {layer}, the highest on other prompts; {scores.chance[name]:.3f} if"
        )
    assert data["head_scores"] == scores.to_dataframe().to_dict("records")
    assert [len(figures), figures[0].title] == [4, "What the heads attend to"]
    _, figures, data = measure_model_parts(network(PAIRED), prompts, OTHERS)
    assert ("head_scores" in data, len(figures)) == (False, 3)


def test_large_models_are_patched_on_fewer_prompts(monkeypatch):
    model, prompts = network(PAIRED), TASK.sample(40, seed=1)
    monkeypatch.setattr("mechicl.reports.heads.RUNS", 16 * 25)  # 2 layers, 4 positions, 2 heads: 16 places
    _, _, data = measure_model_parts(model, prompts, OTHERS)
    assert (data["n_prompts"], data["n_patched"]) == (40, 25)
    swept = patch(model, prompts[:25], corrupt(prompts[:25], "labels"), "z", ("layer", "pos", "head"))
    assert data["z_recovered"] == swept.recovered().tolist()
    ablated = ablate(model, prompts, "z", method=Replacement("mean", Prompts.concatenate([prompts, OTHERS])))
    assert data["mean_ablation_of_heads"] == ablated.effect().mean(-1).tolist()


def test_a_model_that_ignores_labels_has_no_row_on_them():
    model = network(PAIRED)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    table, figures, _ = measure_model_parts(model, TASK.sample(10, seed=0), OTHERS)
    assert (len(table), len(figures)) == (1, 3)


@pytest.mark.parametrize(("model", "task"), [
    (HookedLSTM(LSTMConfig(x_dim=2, n_context=3, n_layers=1, d_model=4)), TASK),
    (network(PAIRED.replace(n_context=1)), TASK.replace(n_context=1)),
    (network(INTERLEAVED.replace(n_layers=0)), TASK),
], ids=["lstm", "one point", "no layers"])  # fmt: skip
def test_models_without_such_parts_have_a_reason(model, task):
    assert no_model_parts(made(task, model))


def test_copying_models_have_a_report_of_their_parts(tmp_path):
    models = [network(INTERLEAVED.replace(keys="context"), seed) for seed in (0, 1)]
    curve = {"eval_step": [0, 10], "eval_loss": [[2.0, 1.0], [1.0, 0.5]]}
    folder = save(tmp_path / "made", models, made(TASK, seeds=[0, 1], curve=curve).record)
    path = report(folder, None, tmp_path / "out", n_prompts=30, progress=False)
    data = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    prompts = TASK.sample(30, seed=HEADS_SEED)
    opened = load_checkpoint(folder).select([1, 0])  # seed 1 has the lower loss
    for model, mse in zip(opened.models, data["mse"], strict=True):
        assert mse == pytest.approx((model.predict(prompts) - prompts.query.ys).square().mean().item(), rel=1e-5)
    assert [row["quantity"] for row in data["table"][:2]] == [f"squared error (MSE), seed {i}" for i in (1, 0)]
    assert data["table"][0]["measured"]["mean"] == pytest.approx(data["mse"][0])
    assert data["verdict"]["seed"] == 1
    assert {row["quantity"] for row in data["table"]} >= {"input to target score", "target to input score"}
    assert "2 seeds of a transformer with 2 layers, each with 2 softmax heads" in path.read_text()


# ---- the part of a report that tests hypotheses by interventions ----
CAUSES_TASK = LinearRegression(x_dim=3, n_context=10)


@pytest.mark.slow
def test_a_construction_passes_and_its_controls_do_not():
    sizes = {"x_dim": 3, "n_context": 10}
    model = gd_plus_plus(**sizes, steps=2, step_size=(0.2, 0.5), gamma=(0.08, 0.2))  # type: ignore[arg-type]
    checkpoint = Checkpoint("made", [model], {"seeds": [0]}, None)
    rows, sections, data = causal_part(checkpoint, CAUSES_TASK, n_prompts=32, seed=0)
    named = by_quantity(rows)
    assert rows[0].quantity == "effects explained: GD++"
    assert rows[0].ends[1] > 0.99  # its parameters are fitted
    assert named[STAND].note.startswith("GD++, 2 steps")
    for control in ("untrained", "weights shuffled"):
        assert named[f"{control}: largest R² of a hypothesis's weakest counterfactual"].ends[1] < 0.1
    assert named["moved by: context frozen from 1 layer on"].ends[1] == pytest.approx(0.0, abs=1e-9)
    words = interventions_as_text(rows)
    assert "No intervention contradicts GD++, 2 steps, parameters for each" in words
    explained = rows[0].measured
    assert isinstance(explained, Interval)
    assert f"explains {explained.mean:.0%} of" in words
    assert sections[0].title == "Does it run the algorithm?"
    assert data["tests"][0]["hypotheses"][0]["hypothesis"] == "GD++, 2 steps, parameters for each"
    assert interventions_as_text([]) == ""


def test_every_candidate_has_a_family():
    names = {
        "copying, then gradient descent, 14 steps, by the query alone": "gradient descent by the query alone",
        "gradient descent, 2 steps, a step size each, by the query alone": "gradient descent by the query alone",
        "gradient descent, 7 steps, each point from its past": "gradient descent, residuals in the context",
        "gradient descent with momentum 0.2, 5 steps, residuals in the context": "gradient descent with momentum",
        "preconditioned gradient descent, 5 steps, a matrix each": "preconditioned gradient descent",
        "Newton, 9 iterations, running prediction": "Newton",
        "ridge by 5 eigendirections": "ridge by eigendirections",
        "ridge path, 12 penalties": "ridge path",
        "ridge regression in one step": "ridge regression in one step",
    }
    assert {name: step_kind(name) for name in names} == names


def test_shuffling_keeps_every_entry_of_every_weight():
    model = gd_plus_plus(x_dim=3, n_context=10, steps=2, step_size=0.2, gamma=0.05)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    other = dict(shuffle_weights(model, seed=0).named_parameters())
    for name, weight in other.items():
        assert weight.flatten().sort().values.equal(before[name].flatten().sort().values)
    assert not all(weight.equal(before[name]) for name, weight in other.items())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


# ---- the part of reports on fine-tuning: its rows, and the models that have none ----
FINETUNING_TASK = LinearRegression(x_dim=2, n_context=3)


def checkpoint(**fields: Any) -> Checkpoint:
    return made(FINETUNING_TASK, HookedTransformer(TransformerConfig(x_dim=2, n_context=3, **fields), seed=0).eval())


def test_rows_are_means_of_the_comparison():
    model: Any = checkpoint(initializer_range=0.3).models[0]
    comparison = compare_on_prompts(model, FINETUNING_TASK.sample(5, seed=0), FineTuning(0.05, 2))
    rows, figures, data = finetuning_sections({"fine-tuned": comparison}, {"fine-tuned": FineTuning(0.05, 2)})
    named = by_quantity(rows)
    assert named["squared error without the context"].measured == interval(comparison.zero_shot_loss)
    tuned = named["squared error without the context, fine-tuned on it"]
    assert tuned.measured == interval(comparison.finetuned_loss)
    assert tuned.note.endswith("learning rate 0.05, epochs 2")
    assert len(figures) == 2
    assert data["fine-tuned"]["epochs"] == 2


@pytest.mark.parametrize("fields", [{}, {"prompt_format": "interleaved", "d_model": 8, "attention": "softmax"}])
def test_a_transformer_gets_its_sections(fields):
    model = checkpoint(initializer_range=0.3, **fields)
    assert no_finetuning(model) == slow_finetuning(model) == ""
    rows, sections, data = finetuning(model)
    assert data["finetuning"]["n_prompts"] == N_TUNED
    assert {row.measured.n for row in rows if isinstance(row.measured, Interval) and row.over == "prompts"} >= {24}
    assert sections


def test_fixed_attention_has_no_fine_tuning_and_large_models_only_on_request():
    assert no_finetuning(checkpoint(attention_weights="gradient_descent")) == "its attention is fixed, not learned"
    assert slow_finetuning(checkpoint(n_layers=8)).endswith("--sections fine-tuning measures them")


def test_the_script_measures_every_kind_of_fine_tuning(tmp_path):
    model = checkpoint(initializer_range=0.3)
    save(tmp_path / "small", model.models, model.record)
    script: Any = import_script("finetuning_on_contexts")
    args = script.compare.options(
        checkpoint=str(tmp_path / "small"), n_prompts=3, n_held_out=1, learning_rates=(0.01,), epochs=(1,), quiet=True
    )
    comparison = script.compare(args)
    rows = {row.quantity: row.measured for row in comparison.rows}
    assert set(comparison.data) == {"fine-tuned", "linearised", "layer by layer", "seed"}
    prompts = FINETUNING_TASK.sample(4, seed=0)[1:]
    errors = (model.models[0].predict(prompts) - prompts.query.ys).square().sum(-1)
    assert rows["squared error reading the context"].mean == pytest.approx(errors.mean().item(), rel=1e-5)
    assert rows["error of reading attention as a weight update, layer 0"].mean < 1e-4


def test_a_single_head_has_no_map_of_heads():
    model = HookedTransformer(replace(PAIRED, n_layers=1, n_heads=1), seed=0).eval()
    prompts = TASK.sample(4, seed=0)
    without, sections = ablate_heads(model, prompts)
    assert without.effect().shape == (1, 1, 4)
    assert sections == []
