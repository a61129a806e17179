"""Scripts of `analyses/` against independent computations."""

import copy
import json
import math
from typing import Any

import pandas as pd
import pytest
import torch

from analyses.support.results import Results
from mechicl.algorithms import newton as newton_iterations
from mechicl.algorithms import online_gradient_descent, tuned_step_size
from mechicl.algorithms.stepwise import AfterCopying, ResidualDescent
from mechicl.analysis import Lens
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights import one_step_optimum
from mechicl.analysis.weights.construction_families import family_for, project_weights
from mechicl.checkpoints import Checkpoint, Snapshots, load_checkpoint
from mechicl.constructions import gradient_descent, known_models, softmax_gradient_descent
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, record_streams
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig
from mechicl.training.state import RunState
from tests.analysis.behaviour.test_losses import in_a_plain_loop
from tests.scripts import ANALYSES, import_script


# ---- out of distribution ----
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_descent_as_layers_is_clipped_where_the_model_is(scale):
    checkpoint = load_checkpoint("lsa-3l-looped")
    cfg = checkpoint.models[0].cfg
    learner = tuned_descent(LinearRegression().sample(500, seed=0), cfg.n_layers, gamma=True)
    prompts = LinearRegression(input_scale=scale).sample(5, seed=1, dtype=torch.float64)
    a, gamma = learner.hyperparameters["step_size"], learner.hyperparameters["gamma"]
    expected = in_a_plain_loop(prompts, [a] * 3, [gamma] * 3, 10.0)
    assert (expected.abs() == 10).any() == (scale > 1)
    torch.testing.assert_close(import_script("oswald_shifts").as_layers(learner, cfg).predict(prompts), expected)


def test_two_curves_are_as_far_apart_as_the_largest_gap_over_the_height_of_the_second():
    curve, reference = torch.tensor([1.0, 10.0, 30.0]), torch.tensor([1.0, 10.0, 100.0])
    distance = import_script("oswald_shifts").distance
    assert distance(reference, reference) == 0
    assert distance(curve, reference) == pytest.approx((2 - torch.tensor(30.0).log10().item()) / 2)
    assert distance(curve, reference, torch.tensor([True, True, False])) == 0


# ---- copying ----
@pytest.mark.parametrize(
    ("ratios", "expected"), [([1, 2, 4, 5], 30), ([4, 2, 4, 5], 30), ([4, 4, 4, 4], 10), ([4, 4, 4, 1], None)]
)
def test_a_token_is_read_from_the_snapshot_after_the_last_low_one(ratios, expected):
    last_rise = import_script("oswald_copying_order")._last_rise
    assert last_rise((10, 20, 30, 40), torch.tensor([float(ratio) for ratio in ratios])) == expected


@pytest.mark.parametrize(
    ("reads", "unfallen", "first"),
    [(30, 40, True), (40, 40, True), (50, 40, False), (None, 40, False), (30, None, False)],
)
def test_reading_comes_first_if_the_loss_has_not_fallen_by_then(reads, unfallen, first):
    order = import_script("oswald_copying_order").Order(reads, None, unfallen)
    assert order.first(reads) == first


def test_the_shipped_seeds_read_the_next_token_before_their_loss_falls():
    order = import_script("oswald_copying_order")
    checkpoint = load_checkpoint("copy-2l-dense").select([1])
    assert checkpoint.snapshots is not None
    few = slice(0, 8)  # the fall of this seed, and some steps before
    weights = {name: tensor[few] for name, tensor in checkpoint.snapshots.weights.items()}
    snapshots = Snapshots(checkpoint.snapshots.steps[few], weights)
    short = Checkpoint(checkpoint.name, checkpoint.models, checkpoint.record, snapshots)
    rows, _ = order._order(short, checkpoint.task.sample(2, seed=0))
    assert [str(row.measured) for row in rows[:3]] == ["1 of 1 seeds", "1 of 1 seeds", "0 of 1 seeds"]


# ---- clamps ----
@pytest.mark.parametrize(
    ("losses", "step"), [([4, 3, 1, 1], 20), ([4, 1, 3, 1], 30), ([1, 1, 1, 1], 0), ([4, 1, 1, 3], None)]
)
def test_a_loss_has_passed_the_level_where_it_stays_below(losses, step):
    curve = pd.DataFrame({"step": [0, 10, 20, 30], "loss": [float(loss) for loss in losses]})
    found = import_script("clamped_induction").passing_step(curve)
    assert math.isnan(found) if step is None else found == step


# ---- the lecture text ----
def test_the_lectures_first_worked_example_has_its_numbers():
    lecture = import_script("lecture_meta_optimizers")
    rows = {row.quantity: row for row in lecture._worked_examples()}
    for name, row in rows.items():
        assert row.measured == pytest.approx(row.published, abs=1e-9), name


def test_one_root_is_no_learning_rate_and_two_roots_are():
    lecture = import_script("lecture_meta_optimizers")
    rows = lecture._one_step(lecture.compare.options(n_prompts=8))
    rates = [row.measured for row in rows if row.quantity.startswith("learning rate")]
    assert rates == pytest.approx([lecture.RATE**-0.5, lecture.RATE**-0.5, 1.0])


def test_contexts_with_the_same_row_of_products_have_different_rows_of_the_inverse():
    lecture = import_script("lecture_meta_optimizers")
    *_, same, apart = lecture._bayes(lecture.compare.options(n_prompts=16))
    assert same.measured == 0
    assert apart.measured > 0.1


def test_the_power_series_is_gradient_descent_on_the_ridge_loss():
    lecture = import_script("lecture_meta_optimizers")
    rows = {row.quantity: row.measured for row in lecture._power_series(lecture.compare.options(n_prompts=60))}
    (error,) = [value for name, value in rows.items() if "ten steps of gradient descent" in name]
    assert error == 0


# ---- one layer ----
@pytest.fixture(scope="module")
def one_layer() -> Any:
    """Two seeds whose answers are known: the best step in another gauge, and one a tenth longer."""
    task = LinearRegression(x_dim=3, n_context=5)
    models = [
        gradient_descent(x_dim=3, n_context=5, step_size=size * one_step_optimum(task).step_size) for size in (1, 1.1)
    ]
    with torch.no_grad():
        for model in models:
            model.blocks[0].attn.W_Q.mul_(-2)
            model.blocks[0].attn.W_O.div_(-2)
    return import_script("oswald_one_layer").Layers(Checkpoint("known", models), task, 1500)


def test_known_steps_are_found_in_layers(one_layer):
    best = one_step_optimum(one_layer.task).step_size
    assert one_layer.step_size == pytest.approx(best, rel=0.01)
    cosine, *_ = (row.ends[1] for row in one_layer.alignment())
    assert cosine == pytest.approx(1.0)
    eta, over_tuned = (row.ends[1] for row in one_layer.weights())
    assert eta == pytest.approx(1.05 * best * 5)
    assert over_tuned == pytest.approx(1.05, rel=0.01)
    # the middle of the path is flat if rescaled, and bad if raw
    rescaled, raw = (row.ends[1] for row in one_layer.paths())
    assert abs(rescaled) < 0.01
    assert raw > 0.1


def test_a_longer_step_overshoots_if_inputs_are_large(one_layer):
    of_inputs, of_weights, *_ = one_layer.shifts()
    prompts = one_layer.task.replace(input_scale=2.0).sample(1024, seed=1_000_003)
    losses = []
    for size in (1.1 * one_step_optimum(one_layer.task).step_size, one_layer.step_size):
        predicted = size * torch.einsum("px,pnx,pny->py", prompts.query.xs, prompts.context.xs, prompts.context.ys)
        losses.append((predicted - prompts.query.ys).square().mean().item())
    assert losses[0] > 1.1 * losses[1]
    assert of_inputs.ends[1] == pytest.approx((losses[0] / losses[1] - 1) / 2, abs=0.02)  # of two seeds, one exact
    assert of_weights.ends[1] < of_inputs.ends[1]


def test_the_exact_step_repeated_is_gradient_descent(one_layer):
    exact, descent = (one_layer.repeated(model, 0.5) for model in (one_layer.models[0], one_layer.construction))
    assert exact.shape == (51,)
    torch.testing.assert_close(exact, descent, rtol=0.05, atol=1e-4)


def test_losses_of_the_shipped_layer_are_those_of_an_independent_computation():
    checkpoint = load_checkpoint("lsa-1l")
    layers = import_script("oswald_one_layer").Layers(checkpoint, checkpoint.task, 500)
    prompts = LinearRegression().sample(500, seed=1_000_003, dtype=torch.float64)
    xs, ys, losses = prompts.xs, prompts.ys, []
    for model in checkpoint.models:
        q, k, v, o = (getattr(model, f"W_{name}")[0, 0].detach().double() for name in "QKVO")
        context = torch.cat([xs[:, :-1], ys[:, :-1]], dim=2)
        query = torch.cat([xs[:, -1], torch.zeros(500, 1, dtype=torch.float64)], dim=1)
        scores = ((query @ q)[:, None] * (context @ k)).sum(-1)
        written = (scores[..., None] * (context @ v)).sum(1) @ o
        losses.append((-(query + written)[:, -1] - ys[:, -1, 0]).square().mean().item())
    descent, trained, ratio, _ = (row.ends[1] for row in layers.losses())
    assert trained == pytest.approx(sum(losses) / 10, rel=1e-5)
    kernel = ((xs[:, -1:] * xs[:, :-1]).sum(-1) * ys[:, :-1, 0]).sum(1)
    assert descent == pytest.approx((layers.step_size * kernel - ys[:, -1, 0]).square().mean().item() / 2, rel=1e-6)
    assert 0.99 < ratio < 1.01


# ---- sizes ----
def test_the_largest_size_is_as_good_as_gradient_descent():
    layer = import_script("oswald_one_layer")
    rows = layer._size_rows("lsa-1l-d5")
    task = LinearRegression(x_dim=5, n_context=5)
    step = tuned_step_size(task.sample(20_000, seed=3))
    prompts = task.sample(4096, seed=1_000_003, dtype=torch.float64)
    predicted = step * torch.einsum("px,pnx,pny->py", prompts.query.xs, prompts.context.xs, prompts.context.ys)
    expected = (predicted - prompts.query.ys).square().mean() / 2
    assert rows[0].ends[1] == pytest.approx(expected.item(), rel=1e-3)


# ---- scripts on models with known algorithms: right answers, and controls ----
TASK = LinearRegression(x_dim=3, n_context=6)
answers, families = import_script("known_answers"), import_script("known_families")


def test_every_known_model_has_a_right_family():
    assert [each.name for each in known_models() if families.right_family(each.name) is None] == []
    assert families.right_family("gradient descent with momentum, 4 steps") == "gradient descent with momentum"
    assert families.right_family("something else") is None


@pytest.mark.parametrize("i", range(11))
def test_variations_are_reproducible(i):
    varied, again = families.varied_model(i), families.varied_model(i)
    assert varied.name.startswith(families.KINDS[i])
    prompts = varied.task.sample(4, seed=0, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(varied.model.predict(prompts), again.model.predict(prompts))


def test_a_case_is_right_by_its_family_whatever_the_steps():
    assert families.Case("m", "Newton", "Newton, 6 iterations", 0.9, 0.1, 64).is_right
    assert not families.Case("m", "Newton", "gradient descent, 6 steps", 0.9, 0.1, 64).is_right
    assert families.Case("m", families.NONE, "none of these", 0.9, 0.1, 64).is_right


def test_controls_have_the_shape_and_not_the_weights():
    model = gradient_descent(x_dim=3, n_context=6, step_size=0.2, steps=2)
    prompts = TASK.sample(8, seed=0, dtype=torch.float64)
    for made in (answers.untrained(model, 0), answers.shuffled(model, 0)):
        assert made.cfg == model.cfg
        with torch.no_grad():
            assert not torch.allclose(made.predict(prompts), model.predict(prompts))
    before, after = (each.blocks[0].attn.W_Q.flatten().sort().values for each in (model, answers.shuffled(model, 0)))
    torch.testing.assert_close(before.double(), after)


# ---- forgetting ----
def test_online_gradient_descent_forgets_all_but_the_last_point():
    prompts = LinearRegression(x_dim=4, n_context=6, noise_std=0.2).sample(3, seed=0, dtype=torch.float64)
    errors = import_script("fu_lstm").errors_asked_again(AlgorithmLearner(online_gradient_descent), prompts)
    assert errors[-1].max() < 1e-20  # fitted exactly as it passes
    for p in range(3):
        w = torch.zeros(4, dtype=torch.float64)
        for x, y in zip(prompts.xs[p, :-1], prompts.ys[p, :-1, 0], strict=True):
            w = w - x * (x @ w - y) / (x @ x)
        expected = (prompts.xs[p, :-1] @ w - prompts.ys[p, :-1, 0]).square()
        torch.testing.assert_close(errors[:, p], expected, rtol=0, atol=1e-12)


# ---- induced weights ----
def test_weights_of_newton_stay_in_the_span_and_those_of_a_random_model_do_not():
    cfg = TransformerConfig(x_dim=4, n_context=6, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12,
                            attention="softmax", initializer_range=0.4, dtype="float64")  # fmt: skip
    prompts = LinearRegression(x_dim=4, n_context=6, inputs="gaussian").sample(30, seed=0, dtype=torch.float64)
    prompts.xs[:15, 1] = prompts.xs[:15, 0]  # these two span no more than one
    shares_outside = import_script("fu_weights").shares_outside_span
    newton = newton_iterations(prompts, steps=[1, 6], with_weights=True)
    assert shares_outside(newton, prompts)[:, 1:].max() < 1e-18
    assert shares_outside(newton, prompts)[:, 0].isnan().all()  # no points, no weights
    random = Lens(HookedTransformer(cfg, seed=5).eval()).trajectory(prompts, with_weights=True)
    shares = shares_outside(random, prompts)[-1]
    torch.testing.assert_close(shares[0], torch.ones(30, dtype=torch.float64))
    assert random.weights is not None
    for prompt in (0, 20):
        weights, xs = random.weights[-1, prompt, 2, :, 0], prompts.xs[prompt, :2]
        outside = weights - xs.mT @ torch.linalg.lstsq(xs.mT, weights[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(shares[2, prompt], outside.square().sum() / weights.square().sum())


def test_slopes_of_a_trajectory_are_the_weights_of_descent():
    """After one step of gradient descent from 0 the query is multiplied by `a Xᵀ Y`."""
    prompts = TASK.sample(5, seed=0, dtype=torch.float64)
    steps = answers._trajectory(ResidualDescent(2, step_size=0.1), prompts)
    expected = 0.1 * torch.einsum("pni,pny->piy", prompts.context.xs, prompts.context.ys)
    torch.testing.assert_close(steps.weights[1, :, 0], expected)
    torch.testing.assert_close(steps.predictions[2, :, 0], ResidualDescent(2, step_size=0.1).predict(prompts))


def test_an_algorithm_is_adapted_to_prompts_of_the_other_kind():
    inner = ResidualDescent(1, step_size=0.1)
    assert answers._for_prompts_of(AfterCopying(inner), inner) is inner
    assert isinstance(answers._for_prompts_of(inner, AfterCopying(inner)), AfterCopying)
    induction = next(each for each in known_models() if "induction" in each.name).hypothesis.algorithm
    assert answers._for_prompts_of(induction, inner) is None


def test_matched_layers_and_readouts_of_a_hidden_model():
    known = known_models(hidden=True)[1]
    args = answers.compare.options(n_prompts=16, n_fitting=64)
    assert answers._matched_steps(known, args) == {
        "layers": [1, 2], "expected": [1, 2], "matched": [1, 2], "right": [True, True],
    }  # fmt: skip
    read = answers._read_variables(known, args)
    assert min(read["planted"].values()) > 0.999
    assert max(read["control"].values()) < 0.1
    assert math.isfinite(sum(read["untrained"].values()))


# ---- trained descent, against a plain loop of the same training and against a search ----
trained_descent = import_script("oswald_descent").trained_descent
TRAINED_DESCENT_TASK = LinearRegression(x_dim=3, n_context=5)
TRAINING = TrainingConfig(
    task=TRAINED_DESCENT_TASK, model=TransformerConfig(x_dim=3, n_context=5, n_layers=1), steps=12, batch_size=40,
    learning_rate=0.05, schedule="cosine", warmup_steps=3, gradient_clip=0.1,
)  # fmt: skip


def test_it_is_adam_on_the_step_size():
    """One step of descent: Adam with warm-up, cosine and clip in a plain loop; one batch is the whole pool."""
    pool = TRAINED_DESCENT_TASK.sample(40, seed=0, dtype=torch.float64)
    context, query = pool.context, pool.query
    slopes = (query.xs[:, None] @ context.xs.mT @ context.ys)[:, 0, 0].tolist()  # a step size of 1 predicts these
    targets = query.ys[:, 0].tolist()
    a, first, second = 0.0, 0.0, 0.0
    for step in range(12):
        gradient = sum(2 * (a * p - y) * p for p, y in zip(slopes, targets, strict=True)) / 40
        gradient *= min(1.0, 0.1 / (abs(gradient) + 1e-6))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        rate = 0.05 * ((step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 9)))
        mean, root = first / (1 - 0.9 ** (step + 1)), math.sqrt(second / (1 - 0.999 ** (step + 1)))
        a -= rate * mean / (root + 1e-8)
    learner = trained_descent(pool, 1, TRAINING)
    assert learner.hyperparameters == {"step_size": pytest.approx(a, rel=1e-6)}
    assert learner.name == "gradient descent, 1 step, trained"


def test_long_training_reaches_the_result_of_a_search():
    pool = TRAINED_DESCENT_TASK.sample(400, seed=1, dtype=torch.float64)
    training = TRAINING.replace(steps=600, batch_size=400, gradient_clip=None, learning_rate=0.1)
    best = squared_errors(tuned_descent(pool, 2, gamma=True), pool).mean()
    trained = trained_descent(pool, 2, training, gamma=True)
    assert set(trained.hyperparameters) == {"step_size", "gamma"}
    assert best * 0.999 <= squared_errors(trained, pool).mean() <= best * 1.1


def test_parameters_for_each_step_are_named_and_the_last_gamma_is_0():
    pool = TRAINED_DESCENT_TASK.sample(80, seed=2, dtype=torch.float64)
    learner = trained_descent(pool, 3, TRAINING, gamma=True, per_step=True)
    assert list(learner.hyperparameters) == [*(f"step_size_{i}" for i in (1, 2, 3)), "gamma_1", "gamma_2"]
    first, again = (trained_descent(pool, 3, TRAINING, gamma=True, per_step=True, seed=1) for _ in range(2))
    assert first.hyperparameters == again.hyperparameters != learner.hyperparameters


@pytest.mark.parametrize(("n", "steps", "gamma"), [(39, 2, False), (40, 0, False), (40, 1, True)])
def test_invalid_settings_are_refused(n, steps, gamma):
    with pytest.raises(ValueError, match=r"batch|step"):
        trained_descent(TRAINED_DESCENT_TASK.sample(n, seed=0), steps, TRAINING, gamma=gamma)


# ---- `make gpu` without a gpu: its message, and a dry run ----
@pytest.fixture(scope="module")
def script() -> Any:
    return import_script("on_a_gpu")


def test_without_a_gpu_it_says_so(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.run(["--minutes", "1"]) == 1
    assert "no GPU: torch" in capsys.readouterr().err


def test_a_dry_run_times_steps_and_trains(script, tmp_path, capsys):
    words = ["--dry", "--minutes", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert script.run([*words, "--presets", "gpt2-12l", "--timed", "gpt2-12l-1h", "gpt2-8l-d10", "lsa-1l"]) == 0
    speeds = json.loads((tmp_path / "gpu_speed.json").read_text())["speeds"]
    assert list(speeds["gpt2-12l"]) == list(script.TRAINED)
    assert list(speeds["gpt2-12l-1h"]) == list(script.SPEEDS)
    for kind in ("fp32", "fp32, fused"):
        assert speeds["gpt2-12l-1h"][kind]["steps_per_second"] > 0
    assert speeds["gpt2-12l-1h"]["tf32"] == {"reason": "left out in a dry run", "seconds": 0.0}
    assert "fp32, fused" not in speeds["gpt2-8l-d10"]  # three seeds at once
    assert "held-out loss" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "runs" / "gpt2-12l-gpu" / "checkpoint").record["steps_done"] == 4


def test_a_training_has_the_steps_that_fit_into_the_time(script, tmp_path, monkeypatch, capsys):
    words = ["--dry", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--presets", "gpt2-12l", "--timed"]
    monkeypatch.setattr(script, "TRAINED", ("fp32",))
    monkeypatch.setattr(script, "steps_per_second", lambda *_: {"steps_per_second": 2.0})
    assert script.run([*words, "--minutes", "0.1", "--fit", "20"]) == 1
    assert "10 steps fit, fewer than 20: not trained" in capsys.readouterr().out
    assert script.run([*words, "--minutes", "0.1", "--fit", "10"]) == 0
    record = load_checkpoint(tmp_path / "runs" / "gpt2-12l-gpu" / "checkpoint").record
    assert record["training"]["steps"] == record["steps_done"] == 10


def test_slow_compilation_leaves_time_for_the_other_kinds(script, tmp_path, monkeypatch):
    args = script.Args(runs=tmp_path)
    clock = iter([0.0, 50.0, 50.0, 53.0, 53.0, 53.0])  # begin and end of each kind
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(script, "steps_per_second", lambda *_: {"steps_per_second": 1.0})
    config, kinds = script.PRESETS["gpt2-8l-d10"], ("tf32, compiled", "tf32", "fp32, compiled")
    assert dict(script.timings(config, kinds, args, deadline=100.0)) == {
        "tf32, compiled": {"steps_per_second": 1.0, "seconds": 50.0},
        "tf32": {"steps_per_second": 1.0, "seconds": 3.0},
        "fp32, compiled": {"reason": "no time left", "seconds": 0.0},
    }


def test_a_training_stops_in_time_and_resumes(script, tmp_path, capsys):
    config, folder = script.config_of("gpt2-12l-1h", True), tmp_path / "gpt2-12l-1h-gpu"
    script.go_on(config, {"fused_attention": True}, folder, deadline=0.0)
    assert "saved at step 2 of 4" in capsys.readouterr().out
    script.go_on(config, {}, folder, deadline=float("inf"))  # with its first settings, whatever is fastest now
    assert RunState.load(folder, config.replace(fused_attention=True)).step == 4


def test_a_setting_that_does_not_run_gives_the_reason(script, tmp_path):
    config = script.config_of("gpt2-12l", True).replace(tf32=True)
    reason = script.steps_per_second(config, 4, tmp_path / "speed")["reason"]
    assert reason.startswith("does not run: tf32=True needs")


# ---- scripts of sweeps reproduce their results files from the saved tables ----
NAMES = sorted(path.stem for path in ANALYSES.glob("sweep_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_kept_tables(name):
    script = import_script(name)
    comparison = script.compare()
    saved = Results.read(ANALYSES / "results" / f"{name}.json")
    assert [(row.quantity, str(row), row.note) for row in comparison.rows] == [
        (row.quantity, str(row), row.note) for row in saved.rows
    ]
    assert comparison.title == saved.title


@pytest.mark.parametrize("path", sorted((ANALYSES / "results").glob("sweep_*.csv")), ids=lambda path: path.stem)
def test_kept_tables_are_small(path):
    assert path.stat().st_size <= 30_000


# ---- the query's side ----
def small_transformer(**options: Any) -> HookedTransformer:
    config = TransformerConfig(
        x_dim=3, n_context=6, n_layers=4, d_model=16, n_heads=2, prompt_format="interleaved", attention="softmax",
        normalization_type="LN", initializer_range=0.3, read_in="linear", act_fn="gelu_new", seed=0, **options,
    )  # fmt: skip
    return HookedTransformer(config).eval()


def test_points_that_are_cut_off_predict_as_each_isolated_prefix():
    script, model = import_script("isolated_points"), small_transformer(d_mlp=32, dtype="float64")
    prompts = TASK.sample(8, seed=0, dtype=torch.float64)
    with torch.no_grad():
        connected, cut = (script.predict_prefixes(model, prompts, cut=cut) for cut in (False, True))
    torch.testing.assert_close(connected, model.predict_prefixes(prompts))
    adapter = ModelAdapter(model)
    for n in (2, 6):
        tokens = model.encode(Prompts(prompts.xs[:, : n + 1], prompts.ys[:, : n + 1]))
        streams = record_streams(adapter, tokens)
        expected = StreamRuns(adapter, tokens, streams, streams).isolate(range(4))
        torch.testing.assert_close(cut[:, n], expected)
    assert (cut - connected)[:, 2:].abs().max() > 1e-3


def test_scores_of_a_model_without_mlps_are_those_of_start_and_reads():
    script, model, prompts = import_script("query_side"), small_transformer(d_mlp=32), TASK.sample(64, seed=0)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mlp.W_out)
    scores, true, _ = script.rebuild_scores(model, prompts, 16)
    torch.testing.assert_close(scores["start and reads; start and reads"], true, rtol=1e-3, atol=1e-4)
    assert (scores["start and reads; start"] - true).abs().max() > 1e-2
    held_out = prompts[48:]
    rows = {2 + i: pattern for i, pattern in enumerate(true.softmax(-1))}
    rebuilt = script.run_patterns(model, model.encode(held_out), rows)
    torch.testing.assert_close(rebuilt, model.predict(held_out), rtol=1e-3, atol=1e-4)


# ---- trained further ----
@pytest.mark.parametrize("sink", [True, False])
def test_the_closed_form_of_two_softmax_heads_is_the_constructions(sink):
    script, prompts = import_script("loose_ends"), TASK.sample(16, seed=0, dtype=torch.float64)
    sizes = {"x_dim": prompts.x_dim, "n_context": prompts.n_context, "step_size": 0.1}
    made = softmax_gradient_descent(**sizes, score_scale=0.7, sink=sink).predict(prompts)[:, 0]
    total = script.softmax_sum(prompts, 0.7, math.inf if sink else None)
    factor = made @ total / (total @ total)
    torch.testing.assert_close(total * factor, made, rtol=1e-6, atol=1e-9)
    one = torch.stack([  # a plain loop, for a sink of finite weight
        sum(math.exp(0.7 * float(x @ xs[-1])) * float(y) for x, y in zip(xs[:-1], ys[:-1], strict=True))
        / (math.exp(2.0) + sum(math.exp(0.7 * float(x @ xs[-1])) for x in xs[:-1]))
        * torch.ones((), dtype=torch.float64)
        for xs, ys in zip(prompts.xs, prompts.ys, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(script.softmax_sum(prompts, 0.7, 2.0, heads=1), one)


def test_tied_weights_have_their_scale_and_steps_do_not_depend_on_it():
    script, prompts = import_script("loose_ends"), TASK.sample(16, seed=0, dtype=torch.float64)
    cfg = TransformerConfig(
        x_dim=prompts.x_dim, n_context=prompts.n_context, n_heads=2, attention="softmax", sink="learned",
        initializer_range=0.5, d_head=4, dtype="float64",
    )  # fmt: skip
    model = HookedTransformer(cfg.replace(seed=0))
    raw = {name.rsplit(".", 1)[1]: weight for name, weight in script.stacked([model]).items()}
    raw["W_Q"][0, 1], raw["W_V"][0, 1] = -raw["W_Q"][0, 0], -raw["W_V"][0, 0]  # opposite heads: a step of descent
    raw["W_K"][0, 1], raw["W_O"][0, 1] = raw["W_K"][0, 0], raw["W_O"][0, 0]

    def predicted(scale: float, sink: float) -> torch.Tensor:
        fixed = {"log_scale": torch.tensor([[math.log(scale)]]), "sink": torch.tensor([[sink]])}
        weights = script.tied(raw | {name: value.double() for name, value in fixed.items()}, cfg)
        (made,) = script.unstacked(model, weights)
        for head in range(2):
            product = made.W_Q[0, head] @ made.W_K[0, head].mT * cfg.score_scale
            assert product.norm().item() == pytest.approx(scale * math.sqrt(prompts.x_dim))
        return made.predict(prompts)

    attention = model.blocks[0].attn
    edited = script.with_sink(model, 3.0, 0.5)
    expected = script.with_sink(model, None, 0.5)
    with torch.no_grad():
        expected.blocks[0].attn.sink.fill_(3.0)
        grown = (6 + math.exp(3.0)) / (6 + attention.sink.exp())
        for head in range(2):  # the same by rescaling what each head writes
            expected.blocks[0].attn.W_O[head] *= grown[head]
        torch.testing.assert_close(edited.predict(prompts), expected.predict(prompts))
        torch.testing.assert_close(predicted(1e-3, 15.0), predicted(1e-4, 16.0), rtol=1e-4, atol=1e-7)
        assert (predicted(1.0, 0.0) - predicted(1e-4, 16.0)).abs().max() > 1e-3


@pytest.mark.parametrize("kept", [(0.0, 1.0), (0.75, 1.0)])
def test_a_step_follows_the_gradient_of_the_kept_errors(kept):
    script = import_script("loose_ends")
    models = [HookedTransformer(TransformerConfig(x_dim=3, n_context=6, n_layers=2, seed=s)) for s in range(2)]
    start = script.stacked(models)
    moved = script.train_weights(
        models[0], start, TASK, steps=1, rate=0.05, batch_size=8, kept=kept, optimizer="adam"
    )  # fmt: skip
    prompts = TASK.sample(16, seed=2**33)
    for seed, model in enumerate(models):
        part = prompts[8 * seed : 8 * seed + 8]
        errors = (model(model.encode(part))[:, -1, 0] - part.ys[:, -1, 0]).square()
        errors.sort().values[int(8 * kept[0]) :].mean().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            expected = weight.detach() - 0.001 * weight.grad.sign()  # Adam's first step; 1/50 of the rate
            moving = weight.grad.abs() > 1e-5
            torch.testing.assert_close(moved[name][seed][moving], expected[moving], rtol=1e-3, atol=1e-5)


def test_a_searched_member_is_at_least_as_good_as_its_start_and_balanced_weights_predict_alike():
    script, (model, *_) = import_script("loose_ends"), load_checkpoint("lsa-5l").models
    family = family_for("gd++ per layer", model.cfg)
    start = project_weights(family, copy.deepcopy(model).double()).parameters.clamp(min=0)
    prompts = LinearRegression().sample(256, seed=0, dtype=torch.float64)
    found = script.tuned_member(family, start, prompts, iterations=5)
    before, after = (squared_errors(family.member(values), prompts).mean().item() for values in (start, found))
    assert after < before
    assert ((found == 0) == (start == 0)).all()
    balanced = script.balanced(model, family, found)
    with torch.no_grad():
        torch.testing.assert_close(
            balanced.predict(prompts.to(torch.float32)).double(), family.member(found).predict(prompts),
            rtol=1e-2, atol=1e-3,
        )  # fmt: skip
    norms = [getattr(balanced.blocks[1].attn, name).norm().item() for name in ("W_Q", "W_K", "W_V", "W_O")]
    assert norms == pytest.approx([norms[0]] * 2 + [norms[2]] * 2, rel=1e-4)


# ---- preconditioned gradient descent ----
def test_the_best_preconditioned_step_has_its_loss_on_sampled_prompts():
    eigenvalues = [1.0, 4.0, 16.0]
    task = LinearRegression(
        x_dim=3, n_context=8, inputs="gaussian", eigenvalues=(1.0, 4.0, 16.0), noise_std=2.0, query_noise=False
    )
    best_eta, best_mse = import_script("nertinger_table").best_preconditioned_step(eigenvalues, 8, noise_variance=4.0)
    prompts = task.sample(200_000, seed=0, dtype=torch.float64)
    xs, ys = prompts.context
    for eta in (best_eta, 0.9 * best_eta, 1.1 * best_eta):
        weights = eta * (xs * ys).mean(1) / torch.tensor(eigenvalues, dtype=torch.float64)
        errors = ((weights * prompts.query.xs).sum(1) - prompts.query.ys[:, 0]).square()
        spread = 4 * errors.std().item() / len(prompts) ** 0.5
        if eta == best_eta:
            assert errors.mean().item() == pytest.approx(best_mse, abs=spread)
        else:  # on common prompts the best one is best
            weights = best_eta / eta * weights
            best_errors = ((weights * prompts.query.xs).sum(1) - prompts.query.ys[:, 0]).square()
            assert errors.mean() > best_errors.mean()
