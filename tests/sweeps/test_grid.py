"""Axes, the cells of a grid, ready-made sweeps, and thresholds."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyses.support.sweeps import SweepArgs
from mechicl.models import TransformerConfig
from mechicl.sweeps import SWEEPS, Sweep
from mechicl.sweeps.grid import combinations, parse_axes, read_axes
from mechicl.sweeps.measuring import read_measures
from mechicl.sweeps.presets import SweepPreset
from mechicl.sweeps.thresholds import find_threshold, passed
from mechicl.tasks import FixedTasks, LinearRegression
from mechicl.training import PRESETS, TrainingConfig
from mechicl.training.config import change
from tests.sweeps.runs import BASE, RATES


# ---- axes ----
def test_axes_are_numbers_ranges_names_and_truth_values_of_a_command_line_or_of_numpy():
    axis = read_axes({"batch_size": np.arange(1, 3)})["batch_size"]
    assert [(type(label), type(change["batch_size"])) for label, change in axis.items()] == [(int, int)] * 2
    words = ["model.n_layers=1:4", "a=0:10:4,99", "rate=1e-3,0.5", "model.attention=linear,softmax", "b=true,none"]
    assert parse_axes(words) == {
        "model.n_layers": [1, 2, 3],
        "a": [0, 4, 8, 99],
        "rate": [1e-3, 0.5],
        "model.attention": ["linear", "softmax"],
        "b": [True, None],
    }


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_combinations_are_counted_like_digits(sizes):
    places = combinations({f"a{i}": {label: {} for label in range(size)} for i, size in enumerate(sizes)})
    expected = [()]
    for size in sizes:
        expected = [(*before, digit) for before in expected for digit in range(size)]
    assert [tuple(place.values()) for place in places] == expected


def test_fields_change_by_their_path_and_all_at_once():
    config = TrainingConfig()
    changed = change(config, {"task.n_context": 7, "model.n_context": 7, "task.noise_std": 0.5, "steps": 3})
    assert changed == config.replace(
        task=LinearRegression(x_dim=10, n_context=7, noise_std=0.5), model=config.model.replace(n_context=7), steps=3
    )
    fixed = TrainingConfig(task=FixedTasks(LinearRegression(x_dim=10), n_tasks=8))
    noisy = FixedTasks(LinearRegression(x_dim=10, noise_std=0.5), n_tasks=8)
    assert change(fixed, {"task.task.noise_std": 0.5}).task == noisy


def test_computed_fields_and_sizes_of_task_model_and_curriculum_change_too():
    assert (PRESETS["gpt2-8l"].model.d_head, change(PRESETS["gpt2-8l"], {"model.n_heads": 2}).model.d_head) == (16, 32)
    config = change(PRESETS["gpt2-8l"], {"x_dim": 4, "n_context": 12, "model.n_layers": 2})
    assert (config.task.x_dim, config.model.x_dim, config.model.n_context, config.model.n_layers) == (4, 4, 12, 2)
    assert config.curriculum is not None
    assert config.curriculum.dims is not None
    assert config.curriculum.dims.end == 4


# ---- cells ----
def test_seeds_train_together_and_other_axes_make_cells():
    sweep = Sweep(BASE, RATES)
    assert len(sweep) == 8
    assert [len(cell.places) for cell in sweep.cells] == [2, 2, 2, 2]
    assert sweep.cells[1].places == (
        {"learning_rate": 1e-3, "model.n_layers": 2, "seed": 0},
        {"learning_rate": 1e-3, "model.n_layers": 2, "seed": 1},
    )
    assert all(cell.config.seeds == (0, 1) for cell in sweep.cells)


def test_tasks_of_one_shape_train_together_up_to_the_limit():
    over = {"task.noise_std": (0.0, 0.1, 0.2), "model.n_layers": (1, 2), "seed": (0, 1)}
    sweep = Sweep(BASE, over, together=4)
    shapes = [(len(cell.config.tasks), cell.config.model.n_layers) for cell in sweep.cells]
    assert sorted(shapes) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for cell in sweep.cells:
        noises = [cell.config.tasks[task].noise_std for task, _ in cell.config.members]
        assert [place["task.noise_std"] for place in cell.places] == noises
        assert [place["seed"] for place in cell.places] == [seed for _, seed in cell.config.members]
    places = [tuple(place.values()) for cell in sweep.cells for place in cell.places]
    assert sorted(places) == sorted(tuple(place.values()) for place in sweep.places)


def test_seeds_beyond_the_limit_and_tasks_of_other_shapes_make_other_cells_and_a_config_s_seeds_are_an_axis():
    assert [cell.config.seeds for cell in Sweep(BASE, {"seed": range(5)}, together=2).cells] == [(0, 1), (2, 3), (4,)]
    assert [cell.config.task.n_context for cell in Sweep(BASE, {"n_context": (4, 6), "seed": (0,)}).cells] == [4, 6]
    sweep = Sweep(BASE.replace(seeds=(3, 5)), {"steps": (1, 2)})
    assert [place["seed"] for place in sweep.places] == [3, 5, 3, 5]


def test_a_value_may_be_labelled_and_change_several_fields():
    small = {"model.n_layers": 1, "steps": 2}
    sweep = Sweep(BASE, {"size": {"small": small, "large": {"model.n_layers": 3, "steps": 4}}, "seed": (0,)})
    assert [place["size"] for place in sweep.places] == ["small", "large"]
    assert [(cell.config.model.n_layers, cell.config.steps) for cell in sweep.cells] == [(1, 2), (3, 4)]
    tasks = {"plain": LinearRegression(x_dim=3, n_context=4), "pool": FixedTasks(LinearRegression(3, 4), n_tasks=4)}
    assert [place["task"] for place in Sweep(BASE, {"task": tasks, "seed": (0,)}).places] == ["plain", "pool"]


def test_none_is_the_value_of_a_field_that_has_it():
    preset, name = PRESETS["gpt2-4l"].replace(steps=0, curriculum=None), "model.positional_embedding_type"
    axes = parse_axes([f"{name}=none,rotary"])
    kinds = [cell.config.model.positional_embedding_type for cell in Sweep(preset, axes | {"seed": (0,)}).cells]
    assert kinds == ["none", "rotary"]
    assert change(preset, {"curriculum": None}).curriculum is None


# ---- ready-made sweeps ----
@pytest.mark.parametrize("name", sorted(SWEEPS))
def test_every_combination_is_a_training(name):
    preset = SWEEPS[name]
    sweep = preset.sweep()
    assert sum(len(cell.places) for cell in sweep.cells) == len(sweep)
    assert read_measures(preset.measure)
    assert preset.summary
    if "markov" in ([preset.measure] if isinstance(preset.measure, str) else preset.measure):
        assert all(cell.config.snapshot_steps for cell in sweep.cells)  # which this measure needs


def final_loss(checkpoint) -> dict[str, float]:
    return {"final": checkpoint.final_losses[0], "third": 1 / 3}


def test_a_table_is_trained_kept_and_read(tmp_path, monkeypatch):
    config = TrainingConfig(
        task=LinearRegression(x_dim=2, n_context=3), model=TransformerConfig(x_dim=2, n_context=3), steps=2,
        batch_size=8, eval_every=2, eval_prompts=20,
    )  # fmt: skip
    over = {"sink": {"none": {"learning_rate": 1e-3}, "more": {"learning_rate": 1e-2}}, "seed": (0, 1)}
    monkeypatch.setitem(SWEEPS, "tiny", SweepPreset("a test", config, over, final_loss))
    monkeypatch.setattr("analyses.support.sweeps.RESULTS", tmp_path / "results")
    with pytest.raises(FileNotFoundError, match="does not exist: train the sweep 'tiny'"):
        SweepArgs().table("tiny")
    trained = SweepArgs(out=tmp_path / "results", folder=tmp_path).table("tiny")
    again = SweepArgs().table("tiny")
    pd.testing.assert_frame_equal(trained.frame, again.frame)
    assert again.axes == ("sink", "seed")
    assert again.frame["sink"].tolist() == [
        "none",
        "none",
        "more",
        "more",
    ]  # not missing
    assert again.frame["third"].tolist() == [0.333333] * 4
    assert again.frame["diverged_at"].isna().all()


# ---- errors ----
@pytest.mark.parametrize(("call", "named"), [
    *((lambda word=word: parse_axes([word]), "field=value") for word in ("model.n_layers", "=1", "a=")),
    (lambda: parse_axes(["a=1", "a=2"]), "a is given twice"),
    *((lambda word=word: parse_axes([word]), f"{word}.*each part.*none in {part!r}") for word, part in (
        ("task.n_tasks=1,5:3", "5:3"), ("a=1,,2", ""), ("a=1,", ""), ("a=0:0", "0:0"))),
    *((lambda over=over: read_axes(over), named) for over, named in [
        ({"steps": ()}, "steps has no values"), ({"steps": 3}, r"write \(3,\) for one"),
        ({"model.attention": "linear"}, "sequence of values"), ({"steps": (3, 3)}, "steps has a value twice"),
        ({"a": (1, True)}, "a has a value twice"), ({"a": (1, 1.0)}, "a has a value twice"),
        ({"loss": (1,)}, "table has a column"), ({"seeds": (0, 1)}, "'seeds' cannot be an axis: write seed"),
    ]),
    *((lambda changes=changes: change(TrainingConfig(), changes), named) for changes, named in [
        ({"stepz": 3}, "no field 'stepz'; it has .*steps"),
        ({"model.layers": 3}, r"model \(TransformerConfig\) has no field 'layers'"),
        ({"task.n_tasks": 3}, r"task \(LinearRegression\) has no field 'n_tasks'"),
        ({"model.n_layers": -1}, "n_layers"), ({"steps": -1}, "steps"), ({"task.x_dim": 3}, "they must agree"),
    ]),
    *((lambda over=over: Sweep(BASE, over), named) for over, named in [
        ({"seed": {1: {"learning_rate": 5.0}}}, r"can change nothing else, got \['learning_rate'\]"),
        ({"seed": {7: 3}}, r"the axis of seeds takes no labels, got \{7: 3\}"),
        ({"learning_rate": (1.0, -1.0)}, "learning_rate=-1.0: .*learning_rate must be"),
        ({"model.n_layers": (1, -1)}, "model.n_layers=-1: .*n_layers"), ({"seed": (0, -1)}, "seeds must be"),
        ({"steps": (1, 2), "other": {"a": {"steps": 3}}}, "two axes change"),
        ({"size": {"a": {"steps": 3}, "b": {"steps": 3}}}, "size=a and size=b are the same training"),
    ]),
    (lambda: Sweep("lsa-11", {}), "no preset 'lsa-11'"),
    (lambda: Sweep(BASE, {}, together=0), "together must be"),
    (lambda: Sweep(BASE.replace(more_tasks=(BASE.task.replace(noise_std=1.0),)), {}), "make an axis of tasks"),
    (lambda: SweepArgs().table("dept"), r"no ready-made sweep 'dept': there are \[.*'depth', 'diversity'"),
])  # fmt: skip
def test_errors_name_the_axis_or_the_combination(call, named):
    with pytest.raises((ValueError, KeyError, FileNotFoundError), match=named):
        call()


# ---- thresholds of sweeps, against crossings by hand ----
def frame(by_seed: dict[int, list[float]], places=(2, 8, 32)) -> pd.DataFrame:
    rows = [
        {"n": x, "seed": seed, "ratio": value}
        for seed, values in by_seed.items()
        for x, value in zip(places, values, strict=True)
    ]
    return pd.DataFrame(rows)


def test_it_is_where_the_mean_over_seeds_passes_the_level():
    threshold = find_threshold(frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}), "n", "ratio")
    assert threshold.mean == pytest.approx(4)  # halfway between 2 and 8, on a logarithmic axis
    assert threshold.n == 2
    assert find_threshold(frame({0: [0, 1.5, 3]}), "n", "ratio", level=1).mean == pytest.approx(2 * 4 ** (2 / 3))


def test_its_interval_is_a_jackknife_over_seeds():
    threshold = find_threshold(frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}), "n", "ratio")
    assert (threshold.low, threshold.high) == (0, math.inf)  # Student's t of two seeds is 12.7: beyond the axis
    three = find_threshold(frame({0: [-1, 0.8, 2], 1: [-1, 1.0, 2], 2: [-1, 1.2, 2]}), "n", "ratio")
    logs = [math.log(2) + math.log(4) / (1 + mean) for mean in (1.1, 1.0, 0.9)]  # without the first, second, third
    half = 4.302652729911275 * math.sqrt(2) * np.std(logs)  # Student's t, two degrees of freedom
    assert (three.low, three.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)))
    assert np.isnan([find_threshold(frame({0: [-1, 0.5, 2]}), "n", "ratio").low]).all()


@pytest.mark.parametrize("n_seeds", [3, 5])
def test_its_interval_holds_its_level_for_few_seeds(n_seeds):
    rng = np.random.default_rng(n_seeds)
    truth, inside, sweeps = np.array([-1.0, 0.25, 1.0]), 0, 400
    where = passed(np.array([2.0, 8.0, 32.0]), truth)
    for _ in range(sweeps):
        values = truth + 0.1 * rng.standard_normal((n_seeds, 3))
        threshold = find_threshold(frame({seed: list(row) for seed, row in enumerate(values)}), "n", "ratio")
        inside += threshold.low <= where <= threshold.high
    assert 0.92 <= inside / sweeps <= 0.98


def test_the_last_crossing_counts_and_beyond_the_axis_it_is_0_or_infinite():
    alike = find_threshold(frame({0: [1, -1, 1], 1: [1, -1, 1]}), "n", "ratio")
    assert alike.low == alike.mean == alike.high == pytest.approx(16)
    assert find_threshold(frame({0: [1, 2, 3]}), "n", "ratio").mean == 0
    assert find_threshold(frame({0: [-3, 2, -1]}), "n", "ratio").mean == math.inf
    some = find_threshold(frame({0: [-3, -2, -1], 1: [-3, -2, 2]}), "n", "ratio")
    assert math.isfinite(some.mean)
    assert some.high == math.inf


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_the_line_between_points_is_0_there(values):
    places = 2.0 ** np.arange(len(values))
    at = passed(places, np.array(values))
    if 0 < at < math.inf:
        assert np.interp(math.log(at), np.log(places), values) == pytest.approx(0, abs=1e-6)
        assert all(v > 0 for p, v in zip(places, values, strict=True) if p > at * (1 + 1e-12))
    else:
        assert values[-1] <= 0 if at else min(values) > 0


def test_tables_without_a_threshold_are_refused():
    with pytest.raises(KeyError, match="no column 'loss'; it has n, seed, ratio"):
        find_threshold(frame({0: [1, 2, 3]}), "n", "loss")
    with pytest.raises(ValueError, match="needs positive values of 'n'"):
        find_threshold(frame({0: [1, 2]}, (0, 1)), "n", "ratio")
    with pytest.raises(ValueError, match="'ratio' has infinite values"):
        find_threshold(frame({0: [-1, math.inf, math.inf]}), "n", "ratio")
    with pytest.raises(ValueError, match="no seed has 'ratio' at all 3 values of 'n'"):
        find_threshold(frame({0: [1, math.nan, 3]}), "n", "ratio")


def test_numbers_given_as_text_are_in_the_order_of_numbers():
    numbers = frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}, places=(2, 16, 128))
    text = numbers.assign(n=numbers["n"].map({2: "2", 16: "16", 128: "1.28e2"}))
    assert find_threshold(text, "n", "ratio") == find_threshold(numbers, "n", "ratio")
    with pytest.raises(ValueError, match="needs positive values of 'n'"):
        find_threshold(numbers.assign(n="many"), "n", "ratio")


def test_values_that_fall_and_rows_that_are_mixtures():
    frame = pd.DataFrame({"n": [2, 8, 32] * 2, "seed": [0] * 3 + [1] * 3, "loss": [1.0, -1, -2, 1, -1, -3]})
    assert find_threshold(frame, "n", "loss", rising=False).mean == pytest.approx(4.0)
    assert math.isinf(find_threshold(frame, "n", "loss").mean)
    with pytest.raises(ValueError, match="several rows have the same seed and 'n'"):
        find_threshold(pd.concat([frame, frame]), "n", "loss")
