"""The report on one layer of linear attention: known answers, a shipped checkpoint, hostile ones, and a browser."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

from mechicl import constructions
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import CheckpointError, load_checkpoint, save
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.reports import Comparison, report
from mechicl.reports.one_layer import OneLayer
from mechicl.tasks import LinearRegression, SineRegression, task_to_dict
from tests.pictures import drawn
from tests.reports import by_quantity, made

TASK = LinearRegression(x_dim=3, n_context=5)


def construction(step_size: float, scale: float = 1.0, **options: Any) -> HookedTransformer:
    """Gradient descent as a layer, in another gauge."""
    model = constructions.gradient_descent(**{"x_dim": 3, "n_context": 5, "step_size": step_size, **options})
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(scale)
        model.blocks[0].attn.W_O.div_(scale)
    return model


@pytest.fixture(scope="module")
def known() -> Comparison:
    """Two seeds whose answers are known: the best step, and one a tenth longer."""
    best = one_step_optimum(TASK).step_size
    checkpoint = made(TASK, construction(best, -2.0), construction(1.1 * best, -2.0), seeds=[4, 7])
    return OneLayer(checkpoint, n_prompts=1500, progress=False).measure(OneLayer.compared)


def test_known_answers_are_found(known):
    best, rows = one_step_optimum(TASK).step_size, by_quantity(known.rows)
    assert known.data["tuned_step_size"] == pytest.approx(best, rel=0.01)
    for weights, factor in zip(known.data["weights"], (1.0, 1.1), strict=True):
        assert weights["step_size"] == [pytest.approx(factor * best)]
        assert weights["beta"] == [[pytest.approx(-2.0)]]
        assert torch.tensor(weights["distance_KQ"]).max() < 1e-12
    assert rows["sensitivity cosine, trained against gradient descent"].ends[1] == pytest.approx(1.0)
    assert rows["η read from the weights"].ends[1] == pytest.approx(1.05 * best * 5)
    assert known.data["seeds"] == (4, 7)
    assert known.data["alignment_over_training"] is None
    assert "Learning" not in [section.title for section in known.sections]  # there is no curve
    # the middle of the path is flat if rescaled, and bad if raw
    assert abs(rows["excess loss at the middle of the rescaled path"].ends[1]) < 0.01
    assert rows["excess loss at the middle of the path without rescaling"].ends[1] > 0.1


def test_a_longer_step_overshoots_if_inputs_are_large(known):
    losses = known.data["out_of_distribution"]["input scale"]
    descent, short, long = (torch.tensor(losses["mse"][i]) for i in range(3))
    assert losses["learners"][:3] == ("gradient descent", "trained 4", "trained 7")
    assert long[-1] > 1.1 * descent[-1]
    assert short[-1] == pytest.approx(descent[-1].item(), rel=0.02)
    largest = known.data["largest_difference"]["input scale"]
    assert largest[1] == pytest.approx((long[1:] / descent[1:] - 1).abs().max().item())


def test_the_exact_step_repeated_is_gradient_descent(known):
    for roll_out in known.data["roll_outs"]:
        trained, whole = torch.tensor(roll_out["trained"]), torch.tensor(roll_out["whole_layer"])
        torch.testing.assert_close(trained[:, 0], whole[:, 0])
        assert trained.shape == (51, 2)
    damped = next(each for each in known.data["roll_outs"] if each["damping"] == 0.5)
    descent = torch.tensor(damped["gradient_descent"])
    torch.testing.assert_close(torch.tensor(damped["trained"])[:, 0], descent, rtol=0.05, atol=1e-4)


def test_numbers_of_the_shipped_layer_are_those_of_an_independent_computation():
    checkpoint = load_checkpoint("lsa-1l")
    comparison = OneLayer(checkpoint, n_prompts=500, progress=False).measure(["loss", "alignment"])
    data, rows = comparison.data, by_quantity(comparison.rows)
    prompts = LinearRegression().sample(500, seed=data["prompt_seed"], dtype=torch.float64)
    xs, ys = prompts.xs, prompts.ys
    losses = []
    for model in checkpoint.models:
        q, k, v, o = (getattr(model, f"W_{name}")[0, 0].detach().double() for name in "QKVO")
        context = torch.cat([xs[:, :-1], ys[:, :-1]], dim=2)
        query = torch.cat([xs[:, -1], torch.zeros(500, 1, dtype=torch.float64)], dim=1)
        scores = ((query @ q)[:, None] * (context @ k)).sum(-1)
        written = (scores[..., None] * (context @ v)).sum(1) @ o
        losses.append((-(query + written)[:, -1] - ys[:, -1, 0]).square().mean().item())
    measured = {quantity: row.ends[1] for quantity, row in rows.items()}
    assert measured["half-MSE, trained, mean of the seeds"] == pytest.approx(sum(losses) / 10, rel=1e-5)
    kernel = ((xs[:, -1:] * xs[:, :-1]).sum(-1) * ys[:, :-1, 0]).sum(1)
    descent = (data["tuned_step_size"] * kernel - ys[:, -1, 0]).square().mean().item()
    assert measured["half-MSE, tuned gradient descent"] == pytest.approx(descent / 2, rel=1e-6)
    assert 0.99 < measured["loss, trained over tuned gradient descent"] < 1.01
    assert data["learning_curve"]["eval_step"][0] == 0
    assert len(data["alignment_over_training"]["sensitivity_cosine"][0]) == len(data["seeds"]) == 5


def test_text_from_files_is_escaped_and_two_targets_and_one_seed_are_measured(tmp_path: Path, browser: Browser):
    task = LinearRegression(x_dim=3, n_context=4, y_dim=2)
    best = one_step_optimum(task)
    attack = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
    fields = {"command": attack, "hardware": attack, "versions": {attack: attack}, "steps_done": attack}
    record = {"training": {"task": task_to_dict(task)}, "seeds": [0], **fields}
    folder = save(tmp_path / "a<b>&'\"", construction(best.step_size, y_dim=2, n_context=4), record)
    html = report(folder, None, tmp_path / "out", n_prompts=1000, sections=["loss", "paths"], progress=False)
    assert attack not in html.read_text()
    page = browser.new_page()
    page.goto(html.as_uri())
    assert drawn(page) > 0
    assert page.title() == "One layer and one step of gradient descent (a<b>&'\")"
    assert page.locator("img[src=x]").count() == 0
    page.close()
    table = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)["table"]
    measured = {row["quantity"]: row["measured"] for row in table}
    loss = measured["half-MSE, trained, mean of the seeds"]
    assert loss["low"] < best.mse / 2 < loss["high"]
    ratio = measured["loss, trained over tuned gradient descent"]
    assert ratio["n"] == 1  # of one seed: the interval is over prompts
    assert ratio["low"] < ratio["mean"] < ratio["high"]


def test_other_kinds_of_models_are_refused(tmp_path: Path):
    deep = construction(0.5, steps=2)
    with pytest.raises(CheckpointError, match="2 layers"):
        OneLayer(made(TASK, deep))
    with pytest.raises(CheckpointError, match="SineRegression"):
        OneLayer(made(SineRegression(), HookedTransformer(TransformerConfig(x_dim=1, n_context=10))))
    with pytest.raises(CheckpointError, match="no usable task"):
        report(save(tmp_path / "bare", [deep], {}), None, tmp_path / "out")
