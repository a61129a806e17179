"""Running scripts: the saved command, and the untrained control of every claim."""

import sys
from dataclasses import dataclass

import pytest

from mechicl.checkpoints import are_weights_random, load_checkpoint
from mechicl.reports import Comparison, Row
from support.checks import above, equal, every
from support.claims import Claims, restated
from support.results import Results
from support.script import ScriptArgs, run_script, words_of


@dataclass(frozen=True)
class Args(ScriptArgs):
    """A script."""

    checkpoint: str = "lsa-1l"


def compare(args: Args) -> Comparison:
    checkpoint = load_checkpoint(args.checkpoint)
    largest = max(weight.abs().max().item() for weight in checkpoint.best.parameters())
    rows = [Row("largest weight", None, largest), Row("layers", None, float(checkpoint.best.cfg.n_layers))]
    if not are_weights_random():
        rows.append(Row("only of trained ones", None, 1.0))
    return Comparison("Title", "Lead.", rows, data={"own": 1})


def claims(comparison: Comparison) -> list:
    paper = Claims("fu2024", comparison.rows)
    paper.add("Fig. 1", "grows", "largest weight", check=every(above, 0.2), published="large")
    paper.add("Fig. 2", "layers", "layers", check=every(equal, 1), published="1")
    paper.add("Fig. 3", "only trained", "only of trained ones", check=every(equal, 1), published="1")
    paper.add("Fig. 4", "by hand", "layers", check=every(equal, 1), published="1", trained=False)
    return paper.stated


def run(monkeypatch, tmp_path, *words: str, compare=compare, claims=claims) -> Results:
    monkeypatch.setattr(sys, "argv", ["somewhere/mine.py", "--out", str(tmp_path), *words])
    run_script(Args, compare, "mine", claims)
    return Results.read(tmp_path / "mine_lsa-1l.json")


def test_every_claim_on_trained_models_has_an_untrained_control(monkeypatch, tmp_path, capsys):
    comparison = run(monkeypatch, tmp_path)
    grows, layers, only, by_hand = comparison.claims
    assert [claim.verdict for claim in comparison.claims] == ["agrees"] * 4
    assert grows.control_verdicts == {"untrained": "differs"}
    (row,) = grows.controls["untrained"]
    assert isinstance(row.measured, float)
    assert row.measured < 0.2 < grows.rows[0].ends[1]
    assert grows.lacks == ""
    assert layers.control_verdicts == {"untrained": "agrees"}
    assert (layers.lacks, layers.verdict, layers.standing) == ("", "agrees", "no evidence")
    assert only.controls["untrained"][0].measured == "not measured"  # the row is not there without training
    assert only.control_verdicts == {"untrained": "differs"}
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


def test_random_weights_in_the_place_of_every_checkpoint(monkeypatch, tmp_path):
    comparison = run(monkeypatch, tmp_path, "--random-weights")
    assert [claim.verdict for claim in comparison.claims] == ["differs", "agrees", "differs", "agrees"]
    assert comparison.data["command"] == "python analyses/mine.py"
    assert not are_weights_random()


def test_a_control_that_fails_leaves_the_claims(monkeypatch, tmp_path):
    def fragile(args: Args) -> Comparison:
        if are_weights_random():
            raise ZeroDivisionError("a model that does\nnothing")
        return compare(args)

    comparison = run(monkeypatch, tmp_path, compare=fragile)
    assert comparison.data["untrained"] == "cannot be measured: ZeroDivisionError: a model that does nothing"
    assert [claim.verdict for claim in comparison.claims] == ["agrees"] * 4
    assert comparison.claims[0].lacks == "the untrained control"


def test_claims_that_are_stated_anew_keep_their_control(monkeypatch, tmp_path):
    comparison = run(monkeypatch, tmp_path)

    def stricter(paper: Comparison) -> list:
        stated = Claims("fu2024", paper.rows)
        stated.add("Fig. 1", "grows, in other words", "largest weight", check=every(above, 1e-9), published="large")
        return [*stated.stated, *claims(paper)[1:]]

    same = restated(comparison.claims, claims(comparison))
    assert [each.control_verdicts for each in same] == [each.control_verdicts for each in comparison.claims]
    assert [each.to_json() for each in same] == [each.to_json() for each in comparison.claims]
    anew = restated(comparison.claims, stricter(comparison))
    assert anew[0].control_verdicts == {"untrained": "agrees"}  # by the new check, on the rows that were measured


def test_a_script_may_measure_the_untrained_control_itself(monkeypatch, tmp_path):
    def by_itself(paper: Comparison) -> list:
        stated = Claims("fu2024", paper.rows)
        stated.add("Fig. 1", "grows", "largest weight", check=every(above, 0.2), controls={"untrained": ["layers"]})
        return stated.stated

    comparison = run(monkeypatch, tmp_path, claims=by_itself)
    assert comparison.data["untrained"] == "no claim needs one"
    (claim,) = comparison.claims
    assert [row.quantity for row in claim.controls["untrained"]] == ["layers"]
    assert claim.control_verdicts == {"untrained": "agrees"}  # 1 is more than 0.2
    (again,) = restated([claim], by_itself(comparison))
    assert again.to_json() == claim.to_json()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--out", "x", "--checkpoint", "a"], ["--checkpoint", "a"]),
        (["--checkpoint", "a", "--no-control", "--out=x"], ["--checkpoint", "a"]),
        (["--random-weights", "--quiet"], ["--quiet"]),
        ([], []),
    ],
)
def test_the_saved_command_has_no_output_options(words, kept):
    assert words_of(words) == kept


def test_causes_are_named_by_their_kind():
    paper = Claims("fu2024", [Row("loss", 1.0, 2.0)])
    paper.add("Fig. 1", "loss", "loss", cause="size: an eighth of the width", controls={"wider": ["loss"]})
    assert paper.stated[0].lacks == "the untrained control"
    with pytest.raises(ValueError, match="'bad luck' does not begin with one of erratum"):
        paper.add("Fig. 1", "loss", "loss", cause="bad luck")
