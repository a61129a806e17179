"""The opening of reports, on models whose algorithm is known, and the model that a report opens."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mechicl
from mechicl import algorithms, constructions
from mechicl.algorithms.card import contains, phrase
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour.families import FamilyMatch
from mechicl.base.settings import settings
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots, Study, UnknownSeedError, save, stack_models
from mechicl.cli import main
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.algorithm import AlgorithmQuestion
from mechicl.reports.heads import ABLATED, RESTORED, heads_as_text
from mechicl.reports.kind import Part, task_as_text
from mechicl.reports.own import Own
from mechicl.reports.verdict import (
    agreement_with_papers,
    explained_terms,
    has_learned,
    percent,
    since_when,
    which_algorithm,
)
from mechicl.statistics import Interval
from mechicl.tasks import LinearRegression, MarkovChains, task_to_dict
from tests.reports import made
from tests.training.runs import READER, WORDS

TASK = LinearRegression(x_dim=3, n_context=6)
SIZES: Any = {"x_dim": 3, "n_context": 6}
N = 128


def answered(model: Any, steps: int | None = None) -> Any:
    return which_algorithm(identify(model, TASK, steps=steps, n_prompts=N, with_limits=False, progress=False))


@pytest.mark.parametrize(("model", "named"), [
    (constructions.gradient_descent(**SIZES, step_size=0.8), "one step of gradient descent"),
    (constructions.gradient_descent(**SIZES, step_size=0.3, steps=3), "3 steps of gradient descent"),
    (constructions.newton(**SIZES, steps=2, alpha=0.3), "2 iterations of Newton's method"),
])  # fmt: skip
def test_constructions_are_named(model, named):
    answer = answered(model)
    assert (answer.nearness, answer.rivals) == ("like", [])
    assert answer.headline == f"It behaves like {named}"
    if "one" in named:
        assert answer.match.hyperparameters["step_size"] == pytest.approx(0.8, rel=1e-4)
        assert "The fit has step size 0.8." in answer.words
        assert "0% (to rounding)" in answer.words


@pytest.mark.filterwarnings("ignore:the model's loss")
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_an_untrained_model_is_given_no_algorithm(attention):
    cfg = TransformerConfig(**SIZES, n_layers=2, attention=attention, d_model=8, n_heads=2, read_in="linear",
                            read_out="linear", initializer_range=0.3)  # fmt: skip
    with pytest.warns(UserWarning, match="looks untrained"):
        answer = answered(HookedTransformer(cfg, seed=3).eval())
    assert "it looks untrained" in answer.words
    assert answer.nearness == "none"
    assert answer.headline == "It behaves like no algorithm that was tried"


def test_a_mixture_of_algorithms_is_like_none_of_them():
    step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.8})
    near = AlgorithmLearner(algorithms.nearest_neighbours, {"n_neighbours": 1})

    class Mixed:
        def predict(self, prompts):
            return step.predict(prompts) + 0.7 * near.predict(prompts)

        def predict_prefixes(self, prompts):
            return step.predict_prefixes(prompts) + 0.7 * near.predict_prefixes(prompts)

    answer = answered(Mixed(), steps=2)
    assert answer.nearness == "nearest"
    assert answer.headline.startswith("It behaves like no algorithm that was tried; the nearest is ")


def match(name: str, distances: torch.Tensor, n_fitted: int = 1, elsewhere: float = 1e-4) -> FamilyMatch:
    changed = torch.full_like(distances, elsewhere)
    return FamilyMatch(name, None, {}, n_fitted, distances, torch.ones(len(distances)), distances, changed)


def ranked(*matches: FamilyMatch) -> Any:
    n = len(matches[0].squared_distances)
    return which_algorithm(Identification(list(matches), [], torch.ones(n), torch.ones(n), torch.ones(2, n)))


def test_ties_are_reported():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).double().abs() / 100
    newton, ridge = match("Newton, 3 iterations", noise), match("ridge", noise.flip(0))
    answer = ranked(newton, ridge, match("averaging", 0.9 + noise))
    assert answer.rivals == [ridge]
    assert answer.headline == "It behaves like 3 iterations of Newton's method, tied with ridge regression"
    assert "This is a tie: these 400 prompts do not distinguish it from ridge regression." in answer.words
    apart = ranked(newton, match("ridge", noise + 0.01))
    assert apart.rivals == []
    assert "The next algorithm, ridge regression, leaves " in apart.words


def test_what_is_near_and_no_copy_is_not_named():
    answer = ranked(match("ridge", torch.full((50,), 0.01).double(), elsewhere=0.03))
    assert answer.headline == "It predicts much like ridge regression, but is not a copy of it"
    assert "With changed prompts it is 3%" in answer.words
    assert "with a confidence of 100% it is none of the algorithms tried" in answer.words


@pytest.mark.parametrize(
    ("name", "words"),
    [("in weights", "the exact in-weights classifier"), ("in context", "the exact in-context classifier"),
     ("bayes", "the exact Bayes predictor"), ("my own rule", "my own rule")],
)  # fmt: skip
def test_reference_learners_have_names_that_sentences_can_use(name, words):
    answer = ranked(match(name, torch.full((50,), 0.01).double()))
    assert answer.headline == f"It behaves like {words}"
    assert f"predictions, {words} leaves 1% of them unexplained" in answer.words


def test_a_special_case_is_named_before_the_general_algorithm_and_families_for_scale_never():
    small = torch.linspace(0, 2e-4, 100).double()
    special = match("gradient descent, 1 step", 3 * small, 2)
    general = match("preconditioned gradient descent, 1 step", small, 9)
    answer = ranked(general, special)
    assert answer.match is special
    assert "which contains it as a special case, fits better still (0.01%)" in answer.words
    assert ranked(general, match("gradient descent, 1 step", 300 * small, 2)).match is general
    assert ranked(match("any function of S", small, 20), match("ridge", 2 * small)).match.name == "ridge"


@pytest.mark.parametrize(("general", "special", "true"), [
    ("preconditioned gradient descent, 1 step", "gradient descent, 1 step", True),
    ("preconditioned gradient descent, 1 step", "gradient descent, 2 steps", False),
    ("GD++, 5 steps", "gradient descent, 5 steps", True),
    ("GD++, 5 steps", "gradient descent, 496 steps", False),
    ("GD++, 5 steps", "gradient descent, 5 steps, parameters for each step", False),
    ("preconditioned gradient descent, 3 steps", "gradient descent with momentum, 3 steps", False),
    ("GD++, 5 steps, parameters for each step", "GD++, 5 steps", True),
    ("gradient descent, 5 steps", "GD++, 5 steps", False),
    ("Newton, 5 iterations", "gradient descent, 5 steps", False),
    ("ridge", "least squares", True),
])  # fmt: skip
def test_families_contain_their_special_cases(general, special, true):
    assert contains(general, special) is true


def test_the_step_is_that_of_the_first_snapshot_that_stays_near():
    steps, answer = (0, 10, 20, 40, 80), ranked(match("gradient descent, 1 step", torch.full((50,), 0.01).double()))
    words, step = since_when(steps, [30.0, 0.04, 0.2, 0.03, 0.01], answer, 0.05)
    assert step == 40  # at 10 it was near, and left again
    assert words.startswith(
        "Since step 40 of 80. From this snapshot on, one step of gradient descent leaves less than 5%"
    )
    assert words.endswith("At the first of 5 snapshots it left more than 1,000%.")
    assert since_when(steps, [0.01] * 5, answer, 0.05)[1] == 0
    words, step = since_when(steps, [1, 1, 1, 1, float("nan")], answer, 0.05)
    assert (step, "At no saved snapshot up to step 80" in words) == (None, True)


def test_a_model_that_becomes_gradient_descent_has_its_step():
    sizes = (-0.2, 0.75, 0.8)
    models = [constructions.gradient_descent(**SIZES, step_size=size) for size in sizes]
    stacks = [stack_models([model]) for model in models]
    kept = Snapshots((0, 100, 200), {name: torch.stack([stack[name] for stack in stacks]) for name in stacks[0]})
    checkpoint = made(TASK, models[-1], seeds=[0])
    question = AlgorithmQuestion(Study(type(checkpoint)("made", checkpoint.models, checkpoint.record, kept)), N)
    verdict = question.verdict(Comparison("", "", []))
    assert verdict.numbers["since_step"] == 100
    _, distances = question.over_training or ((), torch.empty(0))
    expected = [((size - 0.8) / size) ** 2 for size in sizes]  # predictions are proportional to the step size
    assert distances[:, 0].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-9)
    without = AlgorithmQuestion(Study(models[-1], TASK), N).verdict(Comparison("", "", []))
    assert "Since when?" not in without.sentences
    assert "no snapshots were saved" in without.sentences["What was not tested?"]


def test_published_numbers_are_counted_by_paper():
    rows = [
        Row("a", 1, Interval(1.01, 0.99, 1.03, 9), source="fu2024"),
        Row("b", 2, Interval(1.01, 0.99, 1.03, 9), source="fu2024"),
        Row("c", "above 1", 1.5, agrees=True, source="vonoswald2023"),
        Row("d", None, 1.5),
    ]
    words = agreement_with_papers(rows)
    assert "1 of 2 published numbers and claims of Fu et al. 2024" in words
    assert "1 of 1 published numbers and claims of von Oswald et al. 2023 agree" in words
    assert words.endswith("These differ: b.")
    assert agreement_with_papers(rows[3:]) == ""


def test_sites_are_described_in_words():
    half, places = Interval(0.5, 0.4, 0.6, 9), ("head 1 of layer 0", "head 0 of layer 2 at the query")
    rows = [Row(name, None, half, "", f"{at}, chosen on other prompts; the loss is 1")
            for name, at in zip((ABLATED, RESTORED), places, strict=True)]  # fmt: skip
    words = heads_as_text(Comparison("", "", rows))
    assert "Ablating head 1 of layer 0 raises the squared error by 0.50 ± 0.10." in words
    assert "restoring the output of head 0 of layer 2 at the query alone recovers 50% ± 10% of the loss." in words
    assert heads_as_text(Comparison("", "", [])) == ""


def test_shares_families_and_terms():
    assert phrase("GD++, 2 steps, parameters for each step") == "2 steps of GD++ with parameters for each step"
    assert phrase("my own rule") == "my own rule"
    assert percent(Interval(3.7e-5, 3.1e-5, 4.3e-5, 9)) == "0.0037% ± 0.0006%"
    assert percent(Interval(1e-13, 0, 2e-13, 9)) == "0% (to rounding)"
    assert percent(Interval(-0.25, -0.66, 0.16, 9)) == "-25% ± 41%"
    assert (percent(0.5), percent(20.0), percent(1.2)) == ("50%", "more than 1,000%", "120%")
    terms = str(explained_terms("two steps of GD++").content)
    assert "XᵀX" in terms
    assert "Newton" not in terms


# ---- the model that a report opens ----
STUDY_TASK = LinearRegression(x_dim=2, n_context=4)


def checkpoint(losses: Sequence[float | None], **training: Any) -> Checkpoint:
    models = [constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1 * (i + 1)) for i in range(len(losses))]
    record = {
        "seeds": [10 + i for i in range(len(losses))],
        "training": {"task": task_to_dict(STUDY_TASK), **training},
        "curve": {"eval_step": [0, 9], "eval_loss": [[1.0] * len(losses), losses]},
    }
    return Checkpoint("made", list(models), record)


@pytest.mark.parametrize(
    ("losses", "opened"),
    [([0.3, 9.0, 0.1], 12), ([0.3, math.nan, 0.4], 10), ([5.0, 0.4, 0.4], 11), ([None, 2.0], 11), ([1.0], 10)],
)
def test_the_seed_that_load_returns_is_opened(losses, opened):
    made = checkpoint(losses)
    result = Study(made)
    assert result.seeds[0] == opened
    assert result.model is made.models[opened - 10] is made.best
    assert sorted(result.seeds) == made.record["seeds"]
    assert result.record["curve"]["eval_loss"][-1][0] == losses[opened - 10]
    assert len(losses) == 1 or f"The opened model is seed {opened}, which has the least held-out" in result.chosen


def test_a_seed_can_be_requested():
    assert Study(checkpoint([0.3, 9.0, 0.1]), seed=11).seeds == [11, 10, 12]
    with pytest.raises(UnknownSeedError, match="has no seed 3; it has 10, 11, 12"):
        Study(checkpoint([0.3, 9.0, 0.1]), seed=3)


def test_own_models_are_compared_on_prompts_if_there_is_no_curve():
    sizes = (0.0, 0.9, 0.4)
    models = [AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": size}) for size in sizes]
    prompts = STUDY_TASK.sample(512, seed=4_000_003)
    errors = [(model.predict(prompts) - prompts.query.ys).square().mean().item() for model in models]
    assert Study(models, STUDY_TASK).model is models[min(range(3), key=errors.__getitem__)]


def test_of_several_tasks_the_first_is_opened_or_the_requested_one():
    made = checkpoint(
        [1.0, 2.0, 3.0, 4.0], more_tasks=[task_to_dict(STUDY_TASK.replace(weight_scale=3.0))], seeds=[0, 1]
    )
    made = Checkpoint(made.name, made.models, {**made.record, "seeds": [0, 1, 0, 1]})
    assert Study(made).task == STUDY_TASK
    assert "Trained on 2 tasks" in Study(made).chosen
    second = Study(made, task_index=1)
    assert (second.task.weight_scale, second.model) == (3.0, made.models[2])
    with pytest.raises(CheckpointError, match="task index is 0 to 1: got 2"):
        Study(made, task_index=2)


def test_tasks_are_described_with_distributions_and_noise():
    words = task_as_text(STUDY_TASK.replace(noise_std=0.1, inputs="gaussian", weight_scale=2.0))
    for part in ("4 context points", "inputs standard normal", "standard deviation 0.1", "weight scale 2.0"):
        assert part in words
    assert "no noise" in task_as_text(STUDY_TASK)
    assert task_as_text(MarkovChains()) == repr(MarkovChains())


def test_objects_that_do_not_predict_and_models_without_a_task_are_refused():
    with pytest.raises(TypeError, match="predict"):
        Study(torch.nn.Linear(2, 1), STUDY_TASK)
    with pytest.raises(TypeError, match=r"predict\(prompts\), .*load_language_model.* got .*Linear"):
        mechicl.report(torch.nn.Linear(2, 1), STUDY_TASK, "never")
    with pytest.raises(CheckpointError, match="give the task"):
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
    assert next(iter(data["verdict"]["sentences"].values())).startswith("It has learned the task: its squared error is")
    rows = {row["quantity"]: row["measured"]["mean"] for row in data["table"]}
    prompts = Flipped().sample(64, seed=6_000_003)
    expected = (rule.predict(prompts) - prompts.query.ys).square().mean().item()
    assert rows["squared error (MSE) of the query, my rule"] == pytest.approx(expected, rel=1e-5)
    assert "distance from my rule" in rows
    page = path.read_text()
    for words in ("Flipped has no field input_scale", "only predicts", "behaves like one step of gradient descent"):
        assert words in page
    assert "published" not in data["verdict"]["sentences"]["Do weights, causal tests and papers agree?"]


def test_a_section_that_is_not_requested_is_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    never = {"identify": "mechicl.reports.algorithm.identify", "score_heads": "mechicl.reports.tokens.score_heads"}
    for name in never.values():
        monkeypatch.setattr(name, lambda *args, **options: pytest.fail("measured"))
    step = constructions.gradient_descent(x_dim=2, n_context=4, step_size=2.0)
    mechicl.report(
        made(STUDY_TASK, step), None, tmp_path / "one.html", sections=["loss"], n_prompts=256, progress=False
    )
    network = HookedTransformer(READER, seed=0).eval()
    mechicl.report(network, WORDS, tmp_path / "tokens.html", sections=["learning"], n_prompts=8, progress=False)
    verdict = read(tmp_path / "one.json")["verdict"]
    assert verdict["headline"] == "It has learned the task"
    assert list(verdict["sentences"]) == ["Has it learned the task?", "What was not tested?"]
    assert "Sections left out: causes, " in verdict["sentences"]["What was not tested?"]
    assert "learned: " in read(tmp_path / "tokens.json")["verdict"]["headline"]


def test_a_wrapped_module_is_opened_as_far_as_it_goes(tmp_path: Path):
    model = mechicl.wrap(Wrapped().eval(), encode="paired", layers=["first"])
    mechicl.report(model, STUDY_TASK, tmp_path, sections=["loss", "patching"], n_prompts=32, progress=False)
    assert len(read(tmp_path / "report.json")["resid_pre_recovered"]) == 1
    assert "Wrapped has no attn.hook_z" in (tmp_path / "report.html").read_text()


def test_the_error_for_an_unknown_section_lists_the_sections(tmp_path: Path):
    with pytest.raises(ValueError, match="no section 'heads'; it has loss, algorithm, shifts; heads is left out here"):
        mechicl.report(AlgorithmLearner(algorithms.ols), STUDY_TASK, tmp_path, sections=["heads"], progress=False)
    with pytest.raises(ValueError, match="name one section or more, or leave sections out; this report has loss, algo"):
        mechicl.report(AlgorithmLearner(algorithms.ols), STUDY_TASK, tmp_path, sections=[], progress=False)


def test_the_command_line_has_seeds_sections_and_tasks(tmp_path: Path, capsys):
    made = checkpoint([0.3, 9.0, 0.1])
    folder = save(tmp_path / "made", made.models, made.record)
    (tmp_path / "task.json").write_text(json.dumps(task_to_dict(STUDY_TASK.replace(weight_scale=2.0))))
    words = ["report", str(folder), "--out", str(tmp_path / "out"), "--quiet"]
    main([*words, "--seed", "12", "--sections", "loss", "--n-prompts", "64", "--task", str(tmp_path / "task.json")])
    data = read(tmp_path / "out" / "report.json")
    assert data["seeds"] == [12, 10, 11]
    assert data["verdict"]["seed"] == 12
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Loss during training" not in page  # it was measured on other prompts
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*words, "--sections", "los"])
    assert "no section 'los'; it has loss, algorithm, weights" in capsys.readouterr().err


# ---- has it learned? ----
def test_one_prompt_does_not_tell_whether_a_model_has_learned():
    headline, words, _ = has_learned(torch.zeros(1), {"predicting 0": torch.ones(1)})
    assert headline == "Not known whether it has learned"
    assert words.startswith(f"{headline}: one prompt has no interval. There its squared error is 0%")


@pytest.mark.parametrize(("scale", "headline"), [
    (1.5, "Not learned: worse than predicting 0"),
    (1.0, "Not learned: not measurably better than predicting 0"),
    (0.7, "Barely learned: worse than averaging"),
    (0.5, "Barely learned: not measurably better than averaging"),
    (0.1, ""),
    (math.nan, "Not learned: not measurably better than predicting 0"),
])  # fmt: skip
def test_a_model_has_learned_if_its_loss_is_below_that_of_the_baselines(scale, headline):
    zero, noise = torch.rand(400, generator=torch.Generator().manual_seed(0)) + 0.5, torch.randn(400)
    noise = 0.01 * (noise - noise.mean())
    found, words, (value, meaning) = has_learned(scale * zero + noise, {"predicting 0": zero, "averaging": 0.5 * zero})
    assert found == headline
    assert words.startswith(headline or "It has learned the task")
    assert f"{value} of that of predicting 0" in words
    assert meaning.startswith("its squared error relative to that of predicting 0; ")


@dataclass(frozen=True)
class Scaled:
    """An algorithm's predictions, times a factor."""

    algorithm: Any
    factor: float

    def predict(self, prompts: Prompts) -> torch.Tensor:
        return self.factor * self.algorithm(prompts).query()[-1]

    def predict_prefixes(self, prompts: Prompts) -> torch.Tensor:
        return self.factor * self.algorithm(prompts).predictions[-1]


@pytest.mark.parametrize(("algorithm", "factor", "headline"), [
    (algorithms.ols, -1.0, "Not learned: worse than predicting 0"),
    (algorithms.averaging, 0.5, "Barely learned: worse than averaging"),
    (algorithms.ols, 1.0, ""),
    (algorithms.ols, 0.9, ""),
])  # fmt: skip
def test_the_loss_of_the_opened_model_is_compared_with_that_of_the_baselines(algorithm, factor, headline):
    kind = Own(Study(Scaled(algorithm, factor), TASK), n_prompts=512)
    assert kind.learned[0] == headline
    predicted, ys = factor * algorithm(kind.held_out).query()[-1], kind.held_out.query.ys
    share = ((predicted - ys).square().mean() / ys.square().mean()).item()
    found = re.search(r"is ([\d.,]+)%.* of that of predicting 0", kind.learned[1])
    assert found is not None
    assert share < 1e-9 or abs(float(found[1].replace(",", "")) / 100 - share) < 0.01


@pytest.mark.parametrize("progress", [True, False])
def test_what_a_report_runs_shows_progress_bars_if_the_report_does(
    progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown = []
    monkeypatch.setattr(Own, "parts", (Part("bars", lambda kind: shown.append(settings.progress) or ([], [], {})),))
    mechicl.report(AlgorithmLearner(algorithms.averaging), TASK, tmp_path, n_prompts=8, progress=progress)
    assert shown == [progress]
    assert settings.progress
