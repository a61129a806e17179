"""The reports on models of texts and on language models, and the script on the same, on small untrained ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mechicl import reports
from mechicl.interop import LanguageModel
from mechicl.reports import report, texts
from mechicl.reports.language import _chosen_on_half, report_language
from mechicl.statistics import interval
from mechicl.text import TEXT_TASKS
from tests.analysis.language.conftest import hf_model, language  # noqa: F401  fixtures
from tests.scripts import import_script
from tests.text.models import saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    curve = {"eval_step": [0, 10], "eval_loss": [[2.0, 1.9], [1.0, 1.2]]}
    return saved(tmp_path_factory.mktemp("checkpoints") / "reader", curve=curve)


@pytest.fixture(scope="module")
def script() -> Any:
    return import_script("icl_against_finetuning")


def test_the_report_has_numbers_and_pictures(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LEARNING_RATES", (0.1,))
    monkeypatch.setattr(texts, "EPOCHS", (1,))
    path = report(folder, None, tmp_path, n_prompts=6, progress=False)
    page, data = path.read_text(), json.loads((tmp_path / "report.json").read_text())
    rows = {row["quantity"]: row["measured"] for row in data["table"]}
    alone, after = rows["accuracy without demonstrations"], rows["accuracy after demonstrations"]
    assert alone["n"] == after["n"] == 4 * 6
    assert rows["accuracy gained by demonstrations"]["mean"] == pytest.approx(after["mean"] - alone["mean"])
    assert rows["accuracy gained by demonstrations, all seeds"]["n"] == 2
    by_shots = data["accuracy_by_demonstrations"]
    assert set(by_shots) == {"farm", "town", "home", "leisure"}
    assert sum(accuracies[0] for accuracies in by_shots.values()) / 4 == pytest.approx(alone["mean"])
    assert sum(accuracies[8] for accuracies in by_shots.values()) / 4 == pytest.approx(after["mean"])
    for words in ("SimAOU, fine-tuned", "SimAM after, linearised", "Rec2FTP, layer by layer"):
        assert words in rows
    verdict = data["verdict"]
    guess = sum(1 / TEXT_TASKS[name].n_classes for name in by_shots) / 4
    share = f"share of wrong answers after demonstrations is {(1 - after['mean']) / (1 - guess):.0%} "
    assert share in verdict["sentences"]["Has it learned the task?"]
    assert verdict["headline"].startswith("Not learned: ")
    for title in ("Learning", "Three settings", "Do they change the same?", "Head by head"):
        assert title in page


def args(script: Any, folder: Path, out: Path, **fields: Any) -> Any:
    options = {
        "tasks": ("farm", "home"), "seeds": (0, 1), "n_queries": 4, "n_held_out": 3, "n_demonstrations": 3,
        "learning_rates": (0.1,), "epochs": (1,), "quiet": True,
    }  # fmt: skip
    return script.compare.options(model=str(folder), out=out, **(options | fields))


def test_the_script_resumes_where_it_was_stopped(script, folder, tmp_path, monkeypatch):
    first = script.compare(args(script, folder, tmp_path, seeds=(0,)))
    studied = []
    real = script.study_task
    monkeypatch.setattr(script, "study_task", lambda *a, **k: studied.append(k["seed"]) or real(*a, **k))
    both = script.compare(args(script, folder, tmp_path))
    assert studied == [1] * 2  # two tasks of the second seed only
    studied.clear()
    again = script.compare(args(script, folder, tmp_path))
    assert studied == []
    assert again.rows == both.rows
    script.compare(args(script, folder, tmp_path, seeds=(0,), n_queries=5))  # other settings are measured anew
    assert studied == [0] * 2
    trial = first.data["trials"]["home"][0]
    assert both.data["trials"]["home"][0] == trial


def test_the_script_compares_published_with_measured(script, folder, tmp_path):
    comparison = script.compare(args(script, folder, tmp_path))
    rows = {row.quantity: row for row in comparison.rows}
    paper = [0.1091, 0.113, 0.219, 0.193, 0.3053, 0.2013]  # Table 2a, SimAOU FT
    assert rows["SimAOU, fine-tuned, average"].published == pytest.approx(sum(paper) / 6, abs=1e-4)
    assert rows["SimAOU, linearised, average"].published == pytest.approx(
        (0.122 + 0.0789 + 0.171 + 0.148) / 4, abs=1e-4
    )
    assert rows["SimAOU, fine-tuned, farm"].published is None
    trials = comparison.data["trials"]
    values = [
        torch.tensor(task[seed]["comparisons"]["plain"]["update_similarity"]).double().mean()
        for task in trials.values() for seed in (0, 1)
    ]  # fmt: skip
    average = rows["SimAOU, fine-tuned, average"].measured
    assert average.n == 2
    assert average.mean == pytest.approx(torch.stack(values).mean().item())
    assert len(comparison.sections) == 3


# ---- the report on a language model, on one with random weights ----
def test_the_page_and_its_numbers(language, tmp_path):  # noqa: F811
    language = replace(language, dequantized_from="tiny.Q4_1.gguf")
    path = report_language(language, tmp_path, tasks=["antonyms", "plural"], quick=True)
    page, saved = path.read_text(encoding="utf-8"), json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "does not learn in context beyond what shuffled labels give, on any of 2 tasks" in page
    assert page.count("<dt>") == 3
    assert "Jaccard index" in page
    assert "The weights were dequantized from tiny.Q4_1.gguf" in page
    assert len(saved["few_shot"]["plural"]["shuffled"]) == 4
    assert len(saved["function_vector_heads"]) == 3
    opening = page[page.index('id="opening"') :][:6000]
    heads = ", ".join(f"{layer}.{head}" for layer, head in saved["function_vector_heads"])
    assert f"strongest first: {heads} (layer.head, counted from 0)" in opening
    assert "3 heads with the largest effects on answers of the task" in opening  # random weights carry nothing
    assert "not above 0, so this does not show that they carry the task" in opening
    for words in (
        "two lists of 3 heads",
        "Without these 3 function-vector heads",
        "3 random heads",
        "these 3 have the",
    ):
        assert words in opening


def test_unknown_tasks(language, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="antonym"):
        report_language(language, tmp_path, tasks=["antonym"])


@pytest.mark.parametrize("kind", ["model", "bridge", "folder"])
def test_report_takes_every_kind_of_language_model(kind, language, tmp_path, monkeypatch):  # noqa: F811
    calls = []
    monkeypatch.setattr(reports, "report_language", lambda *args, **options: calls.append((args, options)) or args[1])
    monkeypatch.setattr(reports, "load_language_model", lambda name: language)
    monkeypatch.setattr(type(language.model), "tokenizer", language.tokenizer)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    model = {"model": language, "bridge": language.model, "folder": str(tmp_path / "llama")}[kind]
    assert report(model, "antonyms", tmp_path / "a.html" if kind == "model" else tmp_path) == tmp_path
    ((opened, folder), options) = calls[0]
    assert isinstance(opened, LanguageModel)
    assert opened.model is language.model
    assert (folder, options["tasks"], options["name"]) == (
        tmp_path,
        ("antonyms",),
        "a" if kind == "model" else "report",
    )
    with pytest.raises(ValueError, match="language model takes task, path and progress, got sections, n_prompts"):
        report(model, None, tmp_path, sections=["loss"], n_prompts=8)


def test_the_best_layer_and_its_effect_come_from_different_prompts():
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(200, 40, generator=generator)  # no layer is better than another
    values, layer = _chosen_on_half(noise)
    assert layer == noise[:, ::2].mean(1).argmax()
    assert torch.equal(values, noise[layer, 1::2])
    chosen = torch.stack([_chosen_on_half(torch.rand(200, 40, generator=generator))[0].mean() for _ in range(50)])
    assert 0.5 in interval(chosen)  # and not above it, as the largest of 200 means is
