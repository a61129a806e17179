import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechicl.sweeps.axes import change, combinations, parse_axes, read_axes
from mechicl.tasks import FixedTasks, LinearRegression
from mechicl.training import PRESETS, TrainingConfig


def test_words_of_a_command_line_are_numbers_ranges_names_and_truth_values():
    words = ["model.n_layers=1:4", "a=0:10:4,99", "rate=1e-3,0.5", "model.attention=linear,softmax", "b=true,none"]
    assert parse_axes(words) == {
        "model.n_layers": [1, 2, 3],
        "a": [0, 4, 8, 99],
        "rate": [1e-3, 0.5],
        "model.attention": ["linear", "softmax"],
        "b": [True, None],
    }


@pytest.mark.parametrize("word", ["model.n_layers", "=1", "a="])
def test_a_word_that_is_no_axis_is_refused_with_its_form(word):
    with pytest.raises(ValueError, match="field=value"):
        parse_axes([word])


def test_an_axis_given_twice_is_refused():
    with pytest.raises(ValueError, match="a is given twice"):
        parse_axes(["a=1", "a=2"])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_combinations_are_counted_like_digits(sizes):
    places = combinations({f"a{i}": {label: {} for label in range(size)} for i, size in enumerate(sizes)})
    expected = [()]
    for size in sizes:
        expected = [(*before, digit) for before in expected for digit in range(size)]
    assert [tuple(place.values()) for place in places] == expected


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"steps": ()}, "steps has no values"),
        ({"steps": 3}, r"write \(3,\) for one"),
        ({"model.attention": "linear"}, "sequence of values"),
        ({"steps": (3, 3)}, "steps has a value twice"),
        ({"loss": (1,)}, "table has a column"),
        ({"seeds": (0, 1)}, "'seeds' is no axis: write seed"),
    ],
)
def test_axes_that_make_no_sense_are_refused(over, words):
    with pytest.raises(ValueError, match=words):
        read_axes(over)


def test_equal_values_are_one_and_none_is_a_word():
    for values in ((1, True), (1, 1.0)):
        with pytest.raises(ValueError, match="a has a value twice"):
            read_axes({"a": values})
    assert read_axes({"gradient_clip": (None, 1.0)}) == {
        "gradient_clip": {"none": {"gradient_clip": None}, 1.0: {"gradient_clip": 1.0}}
    }


def test_numbers_of_numpy_are_numbers():
    axis = read_axes({"batch_size": np.arange(1, 3)})["batch_size"]
    assert [(type(label), type(change["batch_size"])) for label, change in axis.items()] == [(int, int)] * 2


def test_fields_change_by_their_path_and_all_at_once():
    config = TrainingConfig()
    changed = change(config, {"task.n_context": 7, "model.n_context": 7, "task.noise_std": 0.5, "steps": 3})
    assert changed == config.replace(
        task=LinearRegression(x_dim=10, n_context=7, noise_std=0.5), model=config.model.replace(n_context=7), steps=3
    )
    fixed = TrainingConfig(task=FixedTasks(LinearRegression(x_dim=10), n_tasks=8))
    noisy = FixedTasks(LinearRegression(x_dim=10, noise_std=0.5), n_tasks=8)
    assert change(fixed, {"task.task.noise_std": 0.5}).task == noisy


def test_fields_that_follow_others_follow_the_change():
    config = PRESETS["gpt2-8l"]
    assert (config.model.d_head, change(config, {"model.n_heads": 2}).model.d_head) == (16, 32)


def test_a_size_changes_task_model_and_curriculum():
    config = change(PRESETS["gpt2-8l"], {"x_dim": 4, "n_context": 12, "model.n_layers": 2})
    assert (config.task.x_dim, config.model.x_dim, config.model.n_context, config.model.n_layers) == (4, 4, 12, 2)
    assert config.curriculum is not None
    assert config.curriculum.dims is not None
    assert config.curriculum.dims.end == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stepz": 3}, "no field 'stepz'; it has .*steps"),
        ({"model.layers": 3}, r"model \(TransformerConfig\) has no field 'layers'"),
        ({"task.n_tasks": 3}, r"task \(LinearRegression\) has no field 'n_tasks'"),
        ({"model.n_layers": -1}, "n_layers"),
        ({"steps": -1}, "steps"),
        ({"task.x_dim": 3}, "they must agree"),
    ],
)
def test_fields_that_are_not_there_or_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        change(TrainingConfig(), changes)
