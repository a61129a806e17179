"""The model that a report opens: its seed, its task, the user's own models, and the options of the command line."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mechicl
from mechicl import algorithms, constructions
from mechicl.checkpoints import Checkpoint, CheckpointError, UnknownSeedError, load_checkpoint, save
from mechicl.cli import main
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.reports.study import study, task_as_text
from mechicl.tasks import LinearRegression, MarkovChains, task_to_dict

TASK = LinearRegression(x_dim=2, n_context=4)


def checkpoint(losses: Sequence[float | None], **training: Any) -> Checkpoint:
    models = [constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1 * (i + 1)) for i in range(len(losses))]
    record = {
        "seeds": [10 + i for i in range(len(losses))],
        "training": {"task": task_to_dict(TASK), **training},
        "curve": {"eval_step": [0, 9], "eval_loss": [[1.0] * len(losses), losses]},
    }
    return Checkpoint("made", list(models), record)


@pytest.mark.parametrize(
    ("losses", "opened"),
    [([0.3, 9.0, 0.1], 12), ([0.3, math.nan, 0.4], 10), ([5.0, 0.4, 0.4], 11), ([None, 2.0], 11), ([1.0], 10)],
)
def test_the_seed_that_load_returns_is_opened(losses, opened):
    made = checkpoint(losses)
    result = study(made)
    assert result.seeds[0] == opened
    assert result.model is made.models[opened - 10] is made.best
    assert sorted(result.seeds) == made.record["seeds"]
    assert result.record["curve"]["eval_loss"][-1][0] == losses[opened - 10]
    assert len(losses) == 1 or f"The opened model is seed {opened}, which has the least held-out" in result.chosen


def test_a_seed_can_be_requested():
    assert study(checkpoint([0.3, 9.0, 0.1]), seed=11).seeds == [11, 10, 12]
    with pytest.raises(UnknownSeedError, match="has no seed 3; it has 10, 11, 12"):
        study(checkpoint([0.3, 9.0, 0.1]), seed=3)


def test_the_shipped_copying_model_is_opened_at_a_seed_that_copies():
    result = study(load_checkpoint("copy-2l"))
    assert result.seeds[0] not in (0, 7)  # these copy late or never
    assert min(result.record["curve"]["eval_loss"][-1]) == result.record["curve"]["eval_loss"][-1][0]


def test_own_models_are_compared_on_prompts_if_there_is_no_curve():
    sizes = (0.0, 0.9, 0.4)
    models = [AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": size}) for size in sizes]
    prompts = TASK.sample(512, seed=4_000_003)
    errors = [(model.predict(prompts) - prompts.query.ys).square().mean().item() for model in models]
    assert study(models, TASK).model is models[min(range(3), key=errors.__getitem__)]


def test_of_several_tasks_the_first_is_opened_or_the_requested_one():
    made = checkpoint([1.0, 2.0, 3.0, 4.0], more_tasks=[task_to_dict(TASK.replace(weight_scale=3.0))], seeds=[0, 1])
    made = Checkpoint(made.name, made.models, {**made.record, "seeds": [0, 1, 0, 1]})
    assert study(made).task == TASK
    assert "Trained on 2 tasks" in study(made).chosen
    second = study(made, task_index=1)
    assert (second.task.weight_scale, second.model) == (3.0, made.models[2])
    with pytest.raises(CheckpointError, match="task index is 0 to 1: got 2"):
        study(made, task_index=2)


def test_tasks_are_described_with_distributions_and_noise():
    words = task_as_text(TASK.replace(noise_std=0.1, inputs="gaussian", weight_scale=2.0))
    for part in ("4 context points", "inputs standard normal", "standard deviation 0.1", "weight scale 2.0"):
        assert part in words
    assert "no noise" in task_as_text(TASK)
    assert task_as_text(MarkovChains()) == repr(MarkovChains())


def test_objects_that_do_not_predict_and_models_without_a_task_are_refused():
    with pytest.raises(TypeError, match="predict"):
        study(torch.nn.Linear(2, 1), TASK)
    with pytest.raises(CheckpointError, match="no usable task"):
        mechicl.report(AlgorithmLearner(algorithms.ols), None, "never")


@dataclass(frozen=True)
class Flipped:
    """A user's own task: regression whose targets have the opposite sign."""

    x_dim: int = 2
    y_dim: int = 1
    n_context: int = 4

    def sample(self, n_prompts: int, **options: Any) -> Prompts:
        prompts = LinearRegression(x_dim=2, n_context=4).sample(n_prompts, **options)
        return Prompts(prompts.xs, -prompts.ys)

    def replace(self, **changes: Any) -> "Flipped":
        return Flipped(**changes)


class Wrapped(torch.nn.Module):
    """A user's own network on paired prompts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)

    def forward(self, tokens):
        return self.last(self.first(tokens).relu())[:, -1]


def read(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_any_learner_on_any_task_has_a_report(tmp_path: Path):
    step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.5})
    rule = AlgorithmLearner(algorithms.nearest_neighbours, {"n_neighbours": 1})
    path = mechicl.report(step, Flipped(), tmp_path / "own.html", compare={"my rule": rule}, n_prompts=64,
                          sections=["loss", "algorithm"], progress=False)  # fmt: skip
    data = read(tmp_path / "own.json")
    assert path == tmp_path / "own.html"
    assert data["verdict"]["algorithm"] == "gradient descent, 1 step"
    rows = {row["quantity"]: row["measured"]["mean"] for row in data["table"]}
    prompts = Flipped().sample(64, seed=6_000_003)
    expected = (rule.predict(prompts) - prompts.query.ys).square().mean().item()
    assert rows["squared error (MSE) of the query, my rule"] == pytest.approx(expected, rel=1e-5)
    assert "distance from my rule" in rows
    page = path.read_text()
    for words in ("Flipped has no field input_scale", "only predicts", "It behaves like one step of gradient descent"):
        assert words in page
    assert "published" not in data["verdict"]["sentences"]["Do weights, causal tests and papers agree?"]


def test_a_wrapped_module_is_opened_as_far_as_it_goes(tmp_path: Path):
    model = mechicl.wrap(Wrapped().eval(), encode="paired", layers=["first"])
    mechicl.report(model, TASK, tmp_path, sections=["loss", "patching"], n_prompts=32, progress=False)
    assert len(read(tmp_path / "report.json")["resid_pre_recovered"]) == 1
    assert "Wrapped has no attn.hook_z" in (tmp_path / "report.html").read_text()


def test_the_error_for_an_unknown_section_lists_the_sections(tmp_path: Path):
    with pytest.raises(ValueError, match="no section 'heads'; it has loss, algorithm, shifts; heads is left out here"):
        mechicl.report(AlgorithmLearner(algorithms.ols), TASK, tmp_path, sections=["heads"], progress=False)


def test_the_command_line_has_seeds_sections_and_tasks(tmp_path: Path, capsys):
    made = checkpoint([0.3, 9.0, 0.1])
    folder = save(tmp_path / "made", made.models, made.record)
    (tmp_path / "task.json").write_text(json.dumps(task_to_dict(TASK.replace(weight_scale=2.0))))
    words = ["report", str(folder), "--out", str(tmp_path / "out"), "--quiet"]
    main([*words, "--seed", "12", "--sections", "loss", "--n-prompts", "64", "--task", str(tmp_path / "task.json")])
    data = read(tmp_path / "out" / "report.json")
    assert data["seeds"] == [12, 10, 11]
    assert data["verdict"]["seed"] == 12
    assert data["learning_curve"] is None  # it was measured on other prompts
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*words, "--sections", "los"])
    assert "no section 'los'; it has loss, alignment" in capsys.readouterr().err
