"""The section on the training draws what other parts measured, and dates each change by a plain loop."""

import json
from dataclasses import replace

import pytest
import torch

from mechicl.analysis.dynamics import OverTraining
from mechicl.checkpoints import Checkpoint, Snapshots, Study, load_checkpoint, stack_models
from mechicl.models import HookedTransformer
from mechicl.reports.history import history, no_history, strategies
from mechicl.reports.tokens import Tokens
from tests.reports import by_quantity, made
from tests.training.runs import READER, WORDS

LOSSES = [[2.0, 1.9], [2.0, 0.8], [0.5, 0.4]]
CURVE = {"eval_step": [0, 10, 20], "eval_loss": LOSSES}


def trained(curve=CURVE, steps=(0, 20)) -> Study:
    """Two seeds with snapshots."""
    models = [HookedTransformer(READER, seed=seed).eval() for seed in range(2)]
    stack = {name: torch.stack([tensor] * len(steps)) for name, tensor in stack_models(models).items()}
    checkpoint = made(WORDS, *models, seeds=[0, 1], **({} if curve is None else {"curve": curve}))
    return Study(Checkpoint(checkpoint.name, models, checkpoint.record, Snapshots(steps, stack)), seed=0)


def half_way(steps, values):
    """The middle of the two steps between which a quantity makes half of its change, if it then keeps it."""
    distances = [abs(value - values[-1]) for value in values]
    last = max(i for i, distance in enumerate(distances) if distance > distances[0] / 2)
    return (steps[last] + steps[last + 1]) / 2


def test_each_change_has_its_step():
    steps, values = (0, 5, 10, 20), torch.tensor([[0.0, 1.0], [0.8, 0.9], [0.2, 0.3], [1.0, 0.0]], dtype=torch.float64)
    traced = {"panel": OverTraining(steps, {"risen_late": values, "constant": torch.ones(4, 2)})}
    rows, (section,), data = history(trained(), traced, loss="loss")
    named = by_quantity(rows)
    expected = [half_way(steps, seed) for seed in values.T.tolist()]
    assert named["step of half the change: risen late"].ends[1] == pytest.approx(sum(expected) / 2)
    assert named["step of half the change: loss"].ends[1] == pytest.approx((15 + 5) / 2)
    assert named["step of half the change: constant"].measured == "no such step"
    assert "0 of 2 seeds" in named["step of half the change: constant"].note
    assert data["history"] == {"transitions": [15.0, 5.0], "panel": {"risen_late": values.tolist(),
                                                                     "constant": [[1.0, 1.0]] * 4}}  # fmt: skip
    assert section.title == "How it came about"


def test_the_report_draws_the_scores_that_it_has_measured(tmp_path):
    kind = Tokens(trained(), n_prompts=16)
    path = kind.write(tmp_path, "report", ["learning", "history"])
    data = json.loads(path.with_suffix(".json").read_text())
    scores = data["history"]["highest score of a head"]
    assert kind.formed is not None
    assert scores == {name: kind.formed.scores[name].tolist() for name in ("previous_token", "induction")}
    assert "How it came about" in path.read_text()


def test_learning_coefficients_of_the_record_share_the_axis():
    study = trained()
    assert study.checkpoint is not None
    saved = {"steps": [0, 10, 20], "coefficients": [[0.0, 1.0], [5.0, 6.0], [6.0, 7.0]]}
    rows, _, data = history(
        replace(study.checkpoint, record={**study.record, "learning_coefficient": saved}), {}, loss="loss"
    )
    assert by_quantity(rows)["step of half the change: coefficient"].ends[1] == pytest.approx(5)
    assert data["history"]["local learning coefficient"] == {"coefficient": saved["coefficients"]}


def test_competing_strategies_are_traced():
    checkpoint = load_checkpoint("markov-2l")
    study = Study(checkpoint)
    (panel,) = strategies(study, study.task.sample(64, seed=0)).values()
    weights = panel.quantities
    assert list(weights) == ["bigram", "unigram", "uniform", "residual"]
    assert weights["uniform"][0].item() > 0.5
    assert weights["bigram"][-1].item() > 0.9
    assert strategies(trained(), WORDS.sample(8, seed=0)) == {}
    linear = load_checkpoint("lsa-1l")
    study = Study(linear)
    assert strategies(study, linear.task.sample(8, seed=0)) == {}


@pytest.mark.parametrize(("checkpoint", "why"), [
    (made(WORDS, HookedTransformer(READER, seed=0)), "no snapshots"),
    (trained(None), "two snapshots"),
    (trained(steps=(0,)), "two snapshots"),
    (trained({"eval_step": [0, 1], "eval_loss": [[1.0, None], [1.0, 1.0]]}), "finite losses"),
    (trained(), ""),
])  # fmt: skip
def test_the_reason_for_a_missing_history_is_given(checkpoint, why):
    assert why in no_history(checkpoint)
    assert bool(why) == bool(no_history(checkpoint))
