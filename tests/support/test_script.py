"""Running scripts: saved commands, untrained controls, rows over seeds of sweeps, learned subspaces."""

import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analyses.support.claims import Paper, state_claim, state_claims
from analyses.support.results import Results
from analyses.support.script import Option, script, words_of
from analyses.support.sweeps import SweepArgs, change, count, coverage_words, over_seeds
from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis.causes import SubspaceFit, fit_hypotheses
from mechicl.checkpoints import are_weights_random, load_checkpoint
from mechicl.constructions import gradient_descent
from mechicl.models import TransformerConfig
from mechicl.reports import Comparison, Row
from mechicl.statistics import Interval
from mechicl.sweeps import SWEEPS
from mechicl.sweeps.presets import SweepPreset
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig
from tests.scripts import ANALYSES, import_script


@script(checkpoint=Option("lsa-1l", "a checkpoint"))
def compare(args: Any) -> Comparison:
    """Measure two weights."""
    checkpoint = load_checkpoint(args.checkpoint)
    largest = max(weight.abs().max().item() for weight in checkpoint.best.parameters())
    rows = [Row("largest weight", None, largest), Row("layers", None, float(checkpoint.best.cfg.n_layers))]
    if not are_weights_random():
        rows.append(Row("only of trained ones", None, 1.0))
    return Comparison("Title", "Lead.", rows, data={"own": 1})


def entry(item: str, what: str, row: str, check: str = "equal 1", **others: Any) -> dict[str, Any]:
    return {"results": "mine_*", "item": item, "what": what, "rows": [row], "check": check, **others}


ENTRIES = (
    entry("Fig. 1", "grows", "largest weight", "above 0.2", published="large"),
    entry("Fig. 2", "layers", "layers", published="1"),
    entry("Fig. 3", "only trained", "only of trained ones", published="1"),
    entry("Fig. 4", "by hand", "layers", published="1", trained=False),
)


def run(monkeypatch, tmp_path, *words: str, compare=compare, entries=ENTRIES) -> Results:
    monkeypatch.setattr(sys, "argv", ["somewhere/mine.py", "--out", str(tmp_path), *words])
    monkeypatch.setattr("analyses.support.claims.read_papers", lambda: [Paper("fu2024", "", entries)])
    compare.run()
    return Results.read(tmp_path / "mine_lsa-1l.json")


def test_every_claim_on_trained_models_has_an_untrained_control(monkeypatch, tmp_path, capsys):
    comparison = run(monkeypatch, tmp_path)
    grows, layers, only, by_hand = comparison.claims
    assert [claim.verdict for claim in comparison.claims] == ["agrees"] * 4
    assert grows.untrained_verdict == "differs"
    (row,) = grows.controls["untrained"]
    assert isinstance(row.measured, float)
    assert row.measured < 0.2 < grows.rows[0].ends[1]
    assert grows.lacks == ""
    assert layers.untrained_verdict == "agrees"
    assert (layers.lacks, layers.verdict, layers.standing) == ("", "agrees", "no evidence")
    assert only.controls["untrained"][0].measured == "not measured"  # the row is not there without training
    assert only.untrained_verdict == "differs"
    assert (by_hand.controls, by_hand.trained, by_hand.lacks) == ({}, False, "")
    assert comparison.data["untrained"] == "1 of 4 claims hold of untrained models too"
    assert comparison.data["command"] == "python analyses/mine.py"
    assert min(comparison.data["wall_time_s"], comparison.data["cpu_time_s"]) >= 0
    assert comparison.data["own"] == 1
    assert "untrained control: 1 of 4 claims" in capsys.readouterr().out
    assert [row.quantity for row in comparison.rows][-1] == "only of trained ones"  # the table is of the trained models


def test_without_the_control_claims_stand_alone(monkeypatch, tmp_path):
    comparison = run(monkeypatch, tmp_path, "--no-control")
    assert [claim.controls for claim in comparison.claims] == [{}] * 4
    assert comparison.claims[0].lacks == "the untrained control"
    assert comparison.data["command"] == "python analyses/mine.py"
    assert "untrained" not in comparison.data


def test_a_control_that_fails_leaves_the_claims(monkeypatch, tmp_path):
    @script(checkpoint=Option("lsa-1l", "a checkpoint"))
    def fragile(args: Any) -> Comparison:
        if are_weights_random():
            raise ZeroDivisionError("a model that does\nnothing")
        return compare(args)

    comparison = run(monkeypatch, tmp_path, compare=fragile)
    assert comparison.data["untrained"] == "cannot be measured: ZeroDivisionError: a model that does nothing"
    assert [claim.verdict for claim in comparison.claims] == ["agrees"] * 4
    assert comparison.claims[0].lacks == "the untrained control"


def test_a_changed_check_applies_to_the_saved_rows(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path)
    other = [entry("Fig. 1", "grows, in other words", "largest weight", "above 1e-9")]
    monkeypatch.setattr("analyses.support.claims.read_papers", lambda: [Paper("fu2024", "", other)])
    (claim,) = Results.read(tmp_path / "mine_lsa-1l.json").claims
    assert (claim.verdict, claim.untrained_verdict) == ("agrees", "agrees")


def test_a_script_may_measure_the_untrained_control_itself(monkeypatch, tmp_path):
    itself = [entry("Fig. 1", "grows", "largest weight", "above 0.2", controls={"untrained": ["layers"]})]
    comparison = run(monkeypatch, tmp_path, entries=itself)
    assert comparison.data["untrained"] == "no claim needs one"
    (claim,) = comparison.claims
    assert [row.quantity for row in claim.controls["untrained"]] == ["layers"]
    assert claim.untrained_verdict == "agrees"  # 1 is more than 0.2


@pytest.mark.parametrize(("words", "kept"), [
    (["--out", "x", "--checkpoint", "a"], ["--checkpoint", "a"]),
    (["--checkpoint", "a", "--no-control", "--out=x"], ["--checkpoint", "a"]),
    (["--control", "--quiet"], ["--quiet"]),
    ([], []),
])  # fmt: skip
def test_the_saved_command_has_no_output_options(words, kept):
    assert words_of(words) == kept


def test_causes_are_named_by_their_kind():
    rows = [Row("loss", 1.0, 2.0)]
    explained = entry("Fig. 1", "loss", "loss", cause="size: an eighth of the width", controls={"wider": ["loss"]})
    assert state_claim("fu2024", explained, rows).lacks == "the untrained control"
    with pytest.raises(ValueError, match="'bad luck' does not begin with one of erratum"):
        state_claim("fu2024", {**explained, "cause": "bad luck"}, rows)


def test_an_optional_claim_is_left_out_without_its_rows(monkeypatch):
    entries = [entry("Fig. 1", "gain", "gain", optional=True), entry("Fig. 2", "loss", "loss")]
    monkeypatch.setattr("analyses.support.claims.read_papers", lambda: [Paper("fu2024", "", entries)])
    assert [claim.what for claim in state_claims("mine_lsa-1l", [Row("loss", None, 1.0)])] == ["loss"]


def test_options_have_help_and_types(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["somewhere/mine.py", "--help"])
    with pytest.raises(SystemExit):
        compare.run()
    words = " ".join(capsys.readouterr().out.split())
    assert all(text in words for text in ("Measure two weights.", "--checkpoint STR", "a checkpoint", "--out PATH"))
    assert compare(out=Path("elsewhere")).title == "Title"


# ---- the scripts on ready-made sweeps: tables, and rows over seeds ----
def test_a_table_is_read_beside_the_script_and_trained_into_the_results(tmp_path, monkeypatch):
    config = TrainingConfig(
        task=LinearRegression(x_dim=2, n_context=3), model=TransformerConfig(x_dim=2, n_context=3), steps=2,
        batch_size=8, eval_every=2, eval_prompts=20,
    )  # fmt: skip
    monkeypatch.setitem(SWEEPS, "tiny", SweepPreset("a test", config, {"seed": (0, 1)}, None))
    with pytest.raises(FileNotFoundError) as error:
        SweepArgs().table("tiny")
    assert str(ANALYSES / "results" / "sweep_tiny.csv") in str(error.value)
    table = SweepArgs(out=tmp_path / "out", folder=tmp_path / "runs").table("tiny")
    assert len(table.frame) == 2
    assert (tmp_path / "out" / "sweep_tiny.csv").is_file()
    assert (tmp_path / "runs" / "tiny" / "sweep.json").is_file()


def test_rows_leave_out_missing_measurements():
    row = over_seeds("loss", pd.Series([3.0, math.nan, 1.0, 2.0]), "one diverged")
    assert row.measured == Interval(2.0, 1.0, 3.0, 3, 0.75, "median")
    assert (row.quantity, row.note, row.over) == ("loss", "one diverged", "seeds")


def test_a_difference_is_established_only_beyond_its_interval_and_the_grid():
    first, second = pd.Series([100.0, 110, 120]), pd.Series([150.0, 160, 170])
    # 50 with the standard error sqrt(200 / 3) and 4 degrees of freedom: 27.3 to 72.7
    assert change("later", first, second).note == "established"
    assert change("later", first, second, 25).note == "established"
    assert change("later", first, second, 30).note == "not established"
    assert change("earlier", second, first, 25).note == "established"
    measured = change("later", first, second, 30).measured
    assert isinstance(measured, Interval)
    assert measured.half_width == pytest.approx(2.7764451 * math.sqrt(100 / 3 + 100 / 3), rel=1e-4)


def test_words():
    assert [count(1, "head"), count(3, "head")] == ["1 head", "3 heads"]
    assert "75%" in coverage_words(3)
    assert "94%" in coverage_words(5)


@pytest.mark.parametrize("n", [3, 5])
def test_the_level_of_few_seeds_is_how_often_their_range_holds_the_median(n):
    rng = torch.Generator().manual_seed(n)
    draws = torch.randn(4000, n, generator=rng).exp() - 1  # skewed; the median is 0
    inside = ((draws.amin(1) <= 0) & (draws.amax(1) >= 0)).double().mean().item()
    few = over_seeds("x", pd.Series(draws[0].tolist())).measured
    assert isinstance(few, Interval)
    assert (few.low, few.high) == pytest.approx((draws[0].min().item(), draws[0].max().item()))
    assert few.level == pytest.approx(inside, abs=0.02)
    many = over_seeds("x", pd.Series(range(40))).measured
    assert isinstance(many, Interval)
    assert many.level == 0.95


# ---- learned subspaces in a report: a row for each layer and number of dimensions, and its controls ----
def test_rows_say_what_the_searches_are_beside_their_controls():
    task = LinearRegression(x_dim=2, n_context=5)
    model = gradient_descent(x_dim=2, n_context=5, step_size=0.4, steps=3)
    (hypothesis,) = fit_hypotheses(model, task, {"three steps": ResidualDescent(3, step_size=0.4)}, progress=False)
    assert tuple(hypothesis.schedule) == ((0, 0), (1, 1), (2, 2), (3, 3))
    script = import_script("learned_subspaces")
    (search,) = script.search_subspaces(
        model, [hypothesis], "residual", task, (1, 7), dims=(1, 3), fit=SubspaceFit(16, 16, 5, 0), progress=False
    )
    rows = script.rows_of(search)
    assert [row.quantity[:25] for row in rows] == ["residual in 1 dimensions ", "residual in 3 dimensions "]
    first: Row = rows[0]
    assert isinstance(first.measured, Interval)
    assert first.measured.mean > 0.99
    assert "three steps; of the rest 1.0000" in first.note
    assert "random targets" in first.note
    assert "untrained model" in first.note
    numbers = search.to_dataframe().to_dict("records")
    assert len(numbers) == 6
    assert numbers[0]["r2"] == pytest.approx(first.measured.mean)
