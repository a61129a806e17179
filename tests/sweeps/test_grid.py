import pytest

from mechicl.sweeps import Sweep
from mechicl.tasks import FixedTasks, LinearRegression
from tests.sweeps.runs import BASE, RATES


def test_seeds_train_together_and_other_axes_make_cells():
    sweep = Sweep(BASE, RATES)
    assert len(sweep) == 8
    assert [len(cell.places) for cell in sweep.cells] == [2, 2, 2, 2]
    assert sweep.cells[1].places == (
        {"learning_rate": 1e-3, "model.n_layers": 2, "seed": 0},
        {"learning_rate": 1e-3, "model.n_layers": 2, "seed": 1},
    )
    assert all(cell.config.seeds == (0, 1) for cell in sweep.cells)


def test_tasks_of_one_shape_train_together_as_many_as_may():
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


def test_more_seeds_than_may_train_together_are_shared_out():
    cells = Sweep(BASE, {"seed": range(5)}, together=2).cells
    assert [cell.config.seeds for cell in cells] == [(0, 1), (2, 3), (4,)]


def test_without_an_axis_of_seeds_the_config_s_own_are_one():
    sweep = Sweep(BASE.replace(seeds=(3, 5)), {"steps": (1, 2)})
    assert [place["seed"] for place in sweep.places] == [3, 5, 3, 5]


def test_tasks_of_different_shapes_are_different_cells():
    cells = Sweep(BASE, {"n_context": (4, 6), "seed": (0,)}).cells
    assert [cell.config.task.n_context for cell in cells] == [4, 6]


def test_a_value_may_be_labelled_and_change_several_fields():
    small = {"model.n_layers": 1, "steps": 2}
    sweep = Sweep(BASE, {"size": {"small": small, "large": {"model.n_layers": 3, "steps": 4}}, "seed": (0,)})
    assert [place["size"] for place in sweep.places] == ["small", "large"]
    assert [(cell.config.model.n_layers, cell.config.steps) for cell in sweep.cells] == [(1, 2), (3, 4)]
    tasks = {"plain": LinearRegression(x_dim=3, n_context=4), "pool": FixedTasks(LinearRegression(3, 4), n_tasks=4)}
    assert [place["task"] for place in Sweep(BASE, {"task": tasks, "seed": (0,)}).places] == ["plain", "pool"]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"learning_rate": (1.0, -1.0)}, "learning_rate=-1.0: learning_rate must be positive"),
        ({"model.n_layers": (1, -1)}, "model.n_layers=-1: .*n_layers"),
        ({"seed": (0, -1)}, "seeds must be"),
        ({"steps": (1, 2), "other": {"a": {"steps": 3}}}, "two axes change"),
        ({"size": {"a": {"steps": 3}, "b": {"steps": 3}}}, "size=a and size=b are the same training"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(over, words):
    with pytest.raises(ValueError, match=words):
        Sweep(BASE, over)


def test_presets_go_by_name():
    assert Sweep("lsa-1l", {"seed": (0,)}).base.task.x_dim == 10
    with pytest.raises(ValueError, match="no preset 'lsa-11'"):
        Sweep("lsa-11", {})
    with pytest.raises(ValueError, match="together must be"):
        Sweep(BASE, {}, together=0)
    with pytest.raises(ValueError, match="make an axis of tasks"):
        Sweep(BASE.replace(more_tasks=(BASE.task.replace(noise_std=1.0),)), {})
