"""The report on shipped and on hostile checkpoints, read back and opened in a browser."""

import json
import math
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser

from mechicl import constructions
from mechicl.analysis import one_step_optimum
from mechicl.checkpoints import CheckpointError, load_checkpoint, save
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.report import write_report
from mechicl.report.one_layer import exact_optimum, write_one_layer_report
from mechicl.tasks import LinearRegression, SineRegression, task_to_dict


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report("lsa-1l", tmp_path_factory.mktemp("report"), n_prompts=1000, progress=False).parent


def make_checkpoint(folder: Path, models: list[HookedTransformer], task, **record) -> Path:
    curve = {"eval_step": [0, 10], "eval_loss": [[1.0] * len(models), [0.5] * len(models)]}
    seeds = list(range(len(models)))
    return save(folder, models, {"seeds": seeds, "training": {"task": task_to_dict(task)}, "curve": curve, **record})


def test_json_holds_every_number_and_no_nan(report: Path):
    data = json.loads((report / "report.json").read_text(), parse_constant=pytest.fail)
    quantities = {row["quantity"]: row["measured"] for row in data["table"]}
    assert 0.99 < quantities["loss, trained over tuned gradient descent"]["mean"] < 1.01
    assert quantities["sensitivity cosine, trained against gradient descent"]["low"] > 0.999
    assert abs(quantities["η read from the weights over tuned η"]["mean"] - 1) < 0.02
    assert quantities["excess loss at the middle of the rescaled path"]["high"] < 0.005
    assert quantities["the same without rescaling"]["low"] > 0.1
    for part in ("learning_curve", "alignment_over_training", "weights", "interpolation", "out_of_distribution"):
        assert data[part]
    assert len(data["roll_outs"]) == 3
    assert len(data["seeds"]) == 5


def test_numbers_are_those_of_an_independent_computation(report: Path):
    data = json.loads((report / "report.json").read_text())
    prompts = LinearRegression().sample(1000, seed=data["prompt_seed"], dtype=torch.float64)
    xs, ys = prompts.xs, prompts.ys
    losses = []
    for model in load_checkpoint("lsa-1l").models:
        q, k, v, o = (getattr(model, f"W_{name}")[0, 0].detach().double() for name in "QKVO")
        context = torch.cat([xs[:, :-1], ys[:, :-1]], dim=2)
        query = torch.cat([xs[:, -1], torch.zeros(1000, 1, dtype=torch.float64)], dim=1)
        scores = ((query @ q)[:, None] * (context @ k)).sum(-1)
        written = (scores[..., None] * (context @ v)).sum(1) @ o
        losses.append((-(query + written)[:, -1] - ys[:, -1, 0]).square().mean().item())
    measured = {row["quantity"]: row["measured"]["mean"] for row in data["table"]}
    assert measured["half-MSE, trained, mean of the seeds"] == pytest.approx(sum(losses) / 10, rel=1e-5)
    kernel = ((xs[:, -1:] * xs[:, :-1]).sum(-1) * ys[:, :-1, 0]).sum(1)
    gd = (data["tuned_step_size"] * kernel - ys[:, -1, 0]).square().mean().item()
    assert measured["half-MSE, tuned gradient descent"] == pytest.approx(gd / 2, rel=1e-6)


def test_page_works_offline_and_shows_every_section(report: Path, browser: Browser):
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto((report / "report.html").as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert errors == []
    titles = page.locator("h2").all_inner_texts()
    assert titles[0] == "Published and measured"
    assert {"Learning", "Weights", "Interpolation", "Out of distribution", "Roll-out"} <= set(titles)
    assert titles[-7:-2] == [
        "What is lost without each head", "Where the labels are", "Which heads move them",
        "Fine-tuning changes what reading changes?", "Attention after fine-tuning",
    ]  # fmt: skip
    assert page.locator(".js-plotly-plot .main-svg:first-child").count() == 6 + 3 + 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert page.locator("iframe").count() == 0
    attention = page.locator("section", has=page.locator("h2", has_text="Attention of one prompt"))
    canvas = attention.locator("canvas").last
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 50
    painted = canvas.evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert painted > 5  # shades of red and blue
    assert "head 0" in attention.inner_text()
    assert "Negative attention, down to -0." in attention.locator("figcaption").inner_text()
    context.close()


def test_text_from_files_is_escaped(tmp_path: Path, browser: Browser):
    model = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    attack = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
    versions = {attack: attack}
    folder = make_checkpoint(
        tmp_path / "a<b>&'\"", [model], LinearRegression(x_dim=3, n_context=4), command=attack, hardware=attack,
        versions=versions, wall_time_s=attack, steps_done=attack,
    )  # fmt: skip
    html = write_report(folder, tmp_path / "out", n_prompts=50, progress=False)
    assert attack not in html.read_text()
    page = browser.new_page()
    page.goto(html.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert page.title() == "mechicl report: a<b>&'\""
    assert page.locator("img[src=x]").count() == 0
    page.close()


def test_a_checkpoint_without_snapshots_with_one_seed_and_two_targets(tmp_path: Path):
    task = LinearRegression(x_dim=3, n_context=4, y_dim=2)
    model = constructions.gradient_descent(x_dim=3, y_dim=2, n_context=4, step_size=1.0)
    folder = make_checkpoint(tmp_path / "gd", [model], task)
    write_report(folder, tmp_path / "out", n_prompts=100, progress=False)
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["alignment_over_training"] is None
    ratio = next(row["measured"] for row in data["table"] if row["quantity"].startswith("loss, trained"))
    assert ratio["n"] == 1
    assert ratio["low"] is None  # one seed has no interval


def test_other_kinds_of_models_are_refused(tmp_path: Path):
    task = LinearRegression(x_dim=3, n_context=4)
    deep = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5, steps=2)
    checkpoint = load_checkpoint(make_checkpoint(tmp_path / "deep", [deep], task))
    with pytest.raises(CheckpointError, match="2 layers"):
        write_one_layer_report(checkpoint, tmp_path / "out", n_prompts=50, progress=False)
    sine = HookedTransformer(TransformerConfig(x_dim=1, n_context=10))
    with pytest.raises(CheckpointError, match="SineRegression"):
        write_report(make_checkpoint(tmp_path / "sine", [sine], SineRegression()), tmp_path / "out")
    with pytest.raises(CheckpointError, match="no usable task"):
        write_report(save(tmp_path / "bare", [deep], {}), tmp_path / "out")


def test_exact_optimum_only_where_there_is_one():
    assert exact_optimum(LinearRegression(x_dim=5, n_context=20, inputs="gaussian")) == pytest.approx(
        1.153846, abs=1e-6
    )
    assert math.isclose(exact_optimum(LinearRegression()) or 0, 0.4124579, abs_tol=1e-6)
    assert exact_optimum(LinearRegression(noise_std=0.1)) is None
    assert exact_optimum(LinearRegression(inputs="gaussian", condition_number=10.0)) is None


def test_several_targets_and_shaped_inputs_are_measured_against_their_own_optimum(tmp_path: Path):
    two = LinearRegression(x_dim=3, n_context=4, y_dim=2)
    best = one_step_optimum(two)
    model = constructions.gradient_descent(x_dim=3, y_dim=2, n_context=4, step_size=best.step_size)
    write_report(make_checkpoint(tmp_path / "two", [model], two), tmp_path / "out", n_prompts=4000, progress=False)
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["table"]
    measured = next(row["measured"] for row in rows if row["quantity"] == "half-MSE, trained, mean of the seeds")
    assert measured["low"] < best.mse / 2 < measured["high"]
    shaped = LinearRegression(x_dim=3, n_context=4, inputs="gaussian", condition_number=10.0)
    model = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.02)
    assert write_report(make_checkpoint(tmp_path / "c", [model], shaped), tmp_path / "o", n_prompts=50, progress=False)


def test_a_record_without_a_curve_is_refused_before_any_work(tmp_path: Path):
    task = LinearRegression(x_dim=3, n_context=4)
    model = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    folder = save(tmp_path / "bare", [model], {"training": {"task": task_to_dict(task)}})
    with pytest.raises(CheckpointError, match="no curve"):
        write_report(folder, tmp_path / "out")
