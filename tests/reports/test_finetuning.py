"""The part of reports on fine-tuning: its rows, and the models that have none."""

from typing import Any

import pytest

from mechicl.analysis import FineTuning, compare_on_prompts
from mechicl.checkpoints import Checkpoint, save
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.reports.finetuning import N_PROMPTS, finetuning, finetuning_sections, no_finetuning, slow_finetuning
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from tests.reports import by_quantity, made
from tests.scripts import import_script

TASK = LinearRegression(x_dim=2, n_context=3)


def checkpoint(**fields: Any) -> Checkpoint:
    return made(TASK, HookedTransformer(TransformerConfig(x_dim=2, n_context=3, **fields), seed=0).eval())


def test_rows_are_means_of_the_comparison():
    model: Any = checkpoint(initializer_range=0.3).models[0]
    comparison = compare_on_prompts(model, TASK.sample(5, seed=0), FineTuning(0.05, 2))
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
    rows, sections, data = finetuning(model, progress=False)
    assert data["finetuning"]["n_prompts"] == N_PROMPTS
    assert {row.measured.n for row in rows if isinstance(row.measured, Interval) and row.over == "prompts"} >= {24}
    assert sections


def test_fixed_attention_has_no_fine_tuning_and_large_models_only_on_request():
    assert no_finetuning(checkpoint(attention_weights="gradient_descent")) == "its attention is fixed, not learned"
    assert slow_finetuning(checkpoint(n_layers=8)).endswith("--sections fine-tuning measures them")


def test_the_script_measures_every_kind_of_fine_tuning(tmp_path):
    model = checkpoint(initializer_range=0.3)
    save(tmp_path / "small", model.models, model.record)
    script: Any = import_script("finetuning_on_contexts")
    args = script.Args(
        checkpoint=str(tmp_path / "small"), n_prompts=3, n_held_out=1, learning_rates=(0.01,), epochs=(1,), quiet=True
    )
    comparison = script.compare(args)
    rows = {row.quantity: row.measured for row in comparison.rows}
    assert set(comparison.data) == {"fine-tuned", "linearised", "layer by layer", "seed"}
    prompts = TASK.sample(4, seed=0)[1:]
    errors = (model.models[0].predict(prompts) - prompts.query.ys).square().sum(-1)
    assert rows["squared error reading the context"].mean == pytest.approx(errors.mean().item(), rel=1e-5)
    assert rows["error of reading attention as a weight update, layer 0"].mean < 1e-4
