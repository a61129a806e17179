"""The report against gradient descent, on constructions whose algorithm is known, and the kinds of reports."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser
from torch import Tensor

from mechicl import constructions
from mechicl.analysis import Replacement, ablate, fit_construction
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import Checkpoint, CheckpointError, load_checkpoint, save
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, report
from mechicl.reports.algorithm import AlgorithmQuestion
from mechicl.reports.descent import TRIMMED, Descent, fit_rows, left_the_plateau
from mechicl.reports.heads import ABLATED
from mechicl.tasks import FixedTasks, LinearRegression, SineRegression, task_to_dict
from tests.pictures import drawn
from tests.reports import by_quantity, made

TASK = LinearRegression(x_dim=2, n_context=4)
SIZES: Any = {"x_dim": 2, "n_context": 4}
SEED, N = 5, 200
LOOPED = ((0.8, 0.3), (1.6, 0.1))  # (a, γ) of two seeds
LAYERS = ((0.6, 1.4), (0.3, 0.0))  # a, then γ, of two layers
INTERLEAVED: Any = {"prompt_format": "interleaved", "d_model": 8}


def network(**config: Any) -> HookedTransformer:
    return HookedTransformer(TransformerConfig(**{**SIZES, "initializer_range": 0.5, **config}), seed=1)


def descended(prompts: Prompts, steps: list[tuple[float, float]]) -> Tensor:
    """Squared errors of GD++ with these (a, γ), point by point as in A.10."""
    xs, residuals = prompts.xs.double(), prompts.ys.double().clone()
    residuals[:, -1] = 0
    for a, gamma in steps:
        keys, values = xs[:, :-1], residuals[:, :-1]
        scores = xs @ keys.mT
        xs, residuals = xs - gamma * scores @ keys, residuals - a * scores @ values
    return (-residuals[:, -1] - prompts.ys[:, -1].double()).square().mean(-1)


def compare(checkpoint: Checkpoint, n_prompts: int = N, seed: int | None = None) -> Comparison:
    kind = Descent(checkpoint, n_prompts=n_prompts, seed=seed)
    kind.question = AlgorithmQuestion(kind.study, min(n_prompts, 100), seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechicl.reports.descent.N_SHIFTED", 512)
        return kind.measure(["loss", "algorithm", "weights", "shifts"])


def held_out() -> Prompts:
    return TASK.sample(N, seed=SEED, dtype=torch.float64)


def loss_of(steps: list[tuple[float, float]]) -> float:
    return descended(held_out(), steps).mean().item()


@cache
def looped() -> Comparison:
    models = [constructions.gd_plus_plus(**SIZES, steps=2, step_size=a, gamma=g) for a, g in LOOPED]
    curve = {"eval_step": [0, 10], "eval_loss": [[1.0, 1.0], [0.5, 0.4]]}
    return compare(made(TASK, *models, seeds=[7, 8], curve=curve), seed=SEED)


@cache
def layered() -> Comparison:
    model = constructions.gd_plus_plus(**SIZES, steps=2, step_size=LAYERS[0], gamma=LAYERS[1])
    return compare(made(TASK, model), seed=SEED)


def mean(result: Comparison, quantity: str) -> float:
    return by_quantity(result.rows)[quantity].ends[1]


def settings(result: Comparison, name: str) -> dict[str, float]:
    """Tuned hyperparameters, as the table prints them."""
    note = by_quantity(result.rows)[f"squared error (MSE), {name}, tuned"].note
    parts = (part.rpartition(" ") for part in note.split(", "))
    return {name.replace(" ", "_"): float(value) for name, _, value in parts}


def traces(result: Comparison, title: str) -> list[Any]:
    (content,) = [section.content for section in result.sections if section.title == title]
    return list(content.data)  # type: ignore[union-attr]


def test_losses_are_those_of_the_formula():
    truth = [loss_of([step, step]) for step in LOOPED]
    assert looped().data["mse"] == pytest.approx(truth, rel=1e-9)
    assert mean(looped(), "squared error (MSE), trained, mean of the seeds") == pytest.approx(sum(truth) / 2, rel=1e-9)
    assert layered().data["mse"] == [pytest.approx(loss_of(list(zip(*LAYERS, strict=True))), rel=1e-9)]
    shifted = traces(looped(), "Losses out of distribution")
    trained = [trace for trace in shifted if trace.name == "trained"]
    assert {trace.name for trace in shifted} == {"trained", "gradient descent", "GD++"}
    assert len(trained) == 3
    prompts = TASK.replace(input_scale=trained[0].x[1]).sample(512, seed=SEED)
    assert trained[0].y[1] == pytest.approx(descended(prompts, [LOOPED[0]] * 2).mean().item(), rel=1e-5)


def test_references_are_tuned_and_losses_are_relative_to_theirs():
    name, each = "gradient descent, 2 steps", "GD++, 2 steps, each its own"
    tuning = TASK.sample(8192, seed=2**31 + 1, dtype=torch.float64)
    a = settings(looped(), name)["step_size"]
    around = [descended(tuning, [(factor * a, 0.0)] * 2).mean() for factor in (0.97, 1.0, 1.03)]
    assert around[1] < min(around[0], around[2])
    assert looped().data["references"][name] == pytest.approx(loss_of([(a, 0.0)] * 2), rel=0.01)
    for result, over in ((looped(), "seeds and 200 prompts"), (layered(), "prompts")):
        losses = result.data["mse"]
        expected = sum(losses) / len(losses) / result.data["references"][name]
        assert mean(result, f"loss, trained over {name}") == pytest.approx(expected)
        assert by_quantity(result.rows)[f"loss, trained over {name}"].over == over
    # parameters for each step are tuned only if the layers of the model can differ
    assert list(looped().data["references"]) == [name, "GD++, 2 steps"]
    assert list(layered().data["references"]) == [name, "GD++, 2 steps", each]
    tuned = settings(layered(), each)
    assert set(tuned) == {"step_size_1", "step_size_2", "gamma_1"}
    steps = [(tuned["step_size_1"], tuned["gamma_1"]), (tuned["step_size_2"], 0.0)]
    assert layered().data["references"][each] == pytest.approx(loss_of(steps), rel=0.02)


def test_parameters_are_read_off_the_weights():
    for kind in ("in the weights", "layer by layer", "matched to predictions"):
        assert mean(looped(), f"step size a, {kind}") == pytest.approx(1.2, abs=1e-6)
        assert mean(looped(), f"γ, {kind}") == pytest.approx(0.2, abs=1e-6)
        assert by_quantity(looped().rows)[f"γ, {kind}"].published is None  # another task than the paper's
    assert torch.tensor(looped().data["parameters"]["gamma"]).allclose(torch.tensor([[0.3], [0.1]]), atol=1e-6)
    for kind in ("in the weights", "layer by layer"):
        for layer, (a, gamma) in enumerate(zip(*LAYERS, strict=True)):
            assert mean(layered(), f"step size a, layer {layer}, {kind}") == pytest.approx(a, abs=1e-6)
            assert mean(layered(), f"γ, layer {layer}, {kind}") == pytest.approx(gamma, abs=1e-6)
    assert torch.tensor(layered().data["parameters"]["step_size"]).allclose(torch.tensor([LAYERS[0]]), atol=1e-6)


@pytest.mark.parametrize("result", [looped, layered])
def test_a_construction_is_its_own_nearest_member_without_a_barrier(result):
    for kind in ("projected", "layerwise", "matched"):
        assert mean(result(), f"loss, {kind} member over trained") == pytest.approx(1, abs=1e-6)
        distance = f"squared distance of predictions, {kind} member, over squared predictions"
        assert mean(result(), distance) < 1e-12
    for product in ("KQ", "PV"):
        label = f"relative distance of W_{product} from the projected member, mean of the layers"
        assert mean(result(), label) < 1e-12
    name = "GD++, 2 steps" + (", parameters for each step" if result is layered else "")
    assert mean(result(), f"distance from {name}, fitted to the model") < 1e-10
    assert next(row["name"] for row in result().data["families"] if row["kind"] == "family") == name
    barriers = result().data["barriers"]
    assert len(barriers) == 9
    for path, of_seeds in barriers.items():
        assert len(of_seeds) == len(result().data["mse"])
        assert path.startswith("tuned") or max(of_seeds) < 1e-9
    assert by_quantity(result().rows)["barrier to the tuned member, rescaled"].published == "none (Fig. 3)"


def test_the_path_runs_through_parameters_between_both_ends():
    tuned = settings(looped(), "GD++, 2 steps")
    ends = torch.tensor([LOOPED[0], (tuned["step_size"], tuned["gamma"])], dtype=torch.float64)
    (line,) = [t for t in traces(looped(), "From the trained weights to GD++") if t.name == "tuned member, rescaled"]
    for alpha, loss in zip(line.x, line.y, strict=True):
        a, gamma = ((1 - alpha) * ends[0] + alpha * ends[1]).tolist()
        assert loss == pytest.approx(loss_of([(a, gamma)] * 2), rel=0.02)


@pytest.mark.parametrize(
    ("n_context", "shown", "task"),
    [(10, True, {}), (25, True, {}), (10, False, {}), (10, True, {"inputs": "gaussian"})],
)
def test_the_published_gamma_is_for_the_papers_models(n_context, shown, task):
    task = LinearRegression(n_context=n_context, **task)
    model = constructions.gd_plus_plus(x_dim=10, n_context=n_context, steps=2, step_size=0.5, gamma=0.1)
    fit = fit_construction(model, "gd++", task, refine=False, n_prompts=50)
    published = {row.quantity: row.published for row in fit_rows(fit, task, looped=shown)}
    expected = {10: 0.179, 25: 0.099}.get(n_context) if shown and task.inputs == "uniform" else None
    assert published.pop("γ, in the weights") == expected
    assert not any(published.values())


def test_a_model_of_one_layer_has_one_reference_in_its_own_architecture():
    model = network(n_heads=2, normalize_by_context=True)
    result = compare(made(TASK, model), n_prompts=40)
    assert list(result.data["references"]) == ["gradient descent, 1 step"]
    ratio, trimmed = (
        by_quantity(result.rows)[f"loss, trained over gradient descent, 1 step{of}"] for of in ("", f", {TRIMMED}")
    )
    assert ratio.published == "1 (Fig. 2)"
    assert ratio.cells()[3] == trimmed.cells()[3] == "95%, 40 prompts"
    assert set(result.data["parameters"]) == {"step_size"}
    assert "1 layer, each with 2 linear heads" in result.lead
    (line,) = [
        t for t in traces(result, "From the trained weights to gradient descent") if t.name == "tuned member, raw"
    ]
    assert line.y[-1] == pytest.approx(result.data["references"]["gradient descent, 1 step"], rel=1e-9)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}  # the checkpoint is not changed


def test_models_without_a_construction_are_compared_too():
    model = constructions.softmax_gradient_descent(**SIZES, step_size=0.7, score_scale=0.01)
    result = compare(made(TASK, model), seed=SEED)
    assert "'attention': 'linear'" in result.data["no_fit"]
    assert not {"parameters", "barriers"} & set(result.data)
    assert result.data["mse"][0] == pytest.approx(loss_of([(0.7, 0.0)]), rel=1e-2)
    rows = by_quantity(result.rows)
    assert not any("in the weights" in quantity for quantity in rows)
    ratio = rows["loss, trained over gradient descent, 1 step"]
    assert ratio.published == "above 1; less with two heads (Fig. 12)"
    assert [section.title for section in result.sections][:1] == ["Which algorithm is it?"]  # there is no curve
    assert len(result.sections) == 3


@pytest.mark.parametrize(("model", "task", "message"), [
    (network(attention="softmax", **INTERLEAVED), TASK, "interleaved prompts"),
    (network(x_dim=1), SineRegression(n_context=4), "SineRegression"),
    (network(), FixedTasks(TASK, 8), "FixedTasks"),
])  # fmt: skip
def test_other_models_and_tasks_are_refused(model, task, message):
    with pytest.raises(CheckpointError, match=message):
        compare(made(task, model), n_prompts=20)


@pytest.mark.parametrize(("config", "title"), [
    ({"attention": "softmax", **INTERLEAVED}, "Which iteration does each layer"),
    ({"keys": "context", **INTERLEAVED}, "Loss and heads (made)"),
    ({}, "Against gradient descent (made)"),
    ({"d_mlp": 4}, "Against gradient descent (made)"),
])  # fmt: skip
def test_every_kind_of_model_gets_its_report(tmp_path: Path, config, title):
    folder = save(tmp_path / "made", network(**config), made(TASK, seeds=[0]).record)
    path = report(folder, None, tmp_path / "out", n_prompts=20, sections=["heads"], progress=False)
    assert path == tmp_path / "out" / "report.html"
    assert title in path.read_text().split("</title>")[0]
    data = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    model = load_checkpoint(folder).models[0]
    prompts = TASK.sample(64 + 256, seed=data["model_parts"]["seed"])
    swept = ablate(model, prompts[:64], "z", method=Replacement("mean", prompts))
    assert data["model_parts"]["mean_ablation_of_heads"] == swept.effect().mean(-1).tolist()
    (row,) = [row for row in data["table"] if row["quantity"] == ABLATED]
    again = ablate(
        model, prompts[64:], "z", method=Replacement("mean", prompts)
    )  # on other prompts than those it was chosen on
    assert row["measured"]["mean"] == pytest.approx(again.effect().mean(-1).item())


def test_a_seed_that_predicts_next_to_nothing_is_still_on_the_plateau():
    prompts = LinearRegression(x_dim=2, n_context=3).sample(50, seed=0, dtype=torch.float64)
    squares = prompts.query.ys[:, 0].square()
    assert left_the_plateau(torch.stack([0.95 * squares, 0.5 * squares]), prompts).tolist() == [False, True]


def test_text_from_files_is_escaped_and_two_targets_and_one_seed_are_measured(tmp_path: Path, browser: Browser):
    task = LinearRegression(x_dim=3, n_context=4, y_dim=2)
    best = one_step_optimum(task)
    attack = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
    fields = {"command": attack, "hardware": attack, "versions": {attack: attack}, "steps_done": attack}
    record = {"training": {"task": task_to_dict(task)}, "seeds": [0], **fields}
    model = constructions.gradient_descent(x_dim=3, n_context=4, y_dim=2, step_size=best.step_size)
    folder = save(tmp_path / "a<b>&'\"", model, record)
    html = report(folder, None, tmp_path / "out", n_prompts=1000, sections=["loss", "weights"], progress=False)
    assert attack not in html.read_text()
    page = browser.new_page()
    page.goto(html.as_uri())
    assert drawn(page) > 0
    assert page.title() == "Against gradient descent (a<b>&'\")"
    assert page.locator("img[src=x]").count() == 0
    page.close()
    table = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)["table"]
    measured = {row["quantity"]: row["measured"] for row in table}
    loss = measured["squared error (MSE), trained, mean of the seeds"]
    assert loss["low"] < best.mse < loss["high"]
    assert measured["step size a, in the weights"]["mean"] == pytest.approx(best.step_size)


def test_a_checkpoint_without_a_task_has_no_report(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no usable task"):
        report(save(tmp_path / "bare", [network()], {}), None, tmp_path / "out")


@pytest.mark.parametrize("setting", [{"condition_number": 4.0}, {"eigenvalues": (4.0, 1.0)}, {"noise_std": 0.5}])
def test_other_tasks_than_the_papers_have_shifts_and_no_published_values(setting: dict[str, Any]):
    task = LinearRegression(x_dim=2, n_context=4, inputs="gaussian", **setting)
    kind = Descent(made(task, network(n_layers=1)), n_prompts=N)
    comparison = kind.measure(["loss", "weights", "shifts"])
    assert [section.title for section in comparison.sections][-1] == "Losses out of distribution"
    assert [row.quantity for row in comparison.rows if row.published is not None] == []
    of_paper = Descent(made(TASK, network(n_layers=1)), n_prompts=N).measure(["loss"])
    assert [row.published for row in of_paper.rows if row.published is not None] == ["1 (Fig. 2)"]
