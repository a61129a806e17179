"""What reports open with, on models whose algorithm is known: by construction, untrained, tied, and over training."""

from typing import Any

import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.algorithms.card import contains, phrase
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour import FamilyMatch
from mechicl.checkpoints import Checkpoint, Snapshots, stack_models
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.reports import Comparison, Row
from mechicl.reports.algorithm import AlgorithmQuestion, causes_in_words
from mechicl.reports.study import Study, study
from mechicl.reports.verdict import beside_published, percent, since_when, which_algorithm
from mechicl.statistics import Interval
from mechicl.tasks import LinearRegression, task_to_dict

TASK = LinearRegression(x_dim=3, n_context=6)
N = 256
HALF = Interval(0.5, 0.4, 0.6, 9)


def answered(model: Any, task: LinearRegression = TASK) -> Any:
    return which_algorithm(identify(model, task, n_prompts=N, progress=False))


def test_a_construction_of_gradient_descent_is_called_gradient_descent():
    one = answered(constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.8))
    assert (one.nearness, one.match.name, one.rivals) == ("like", "gradient descent, 1 step", [])
    assert one.headline == "It behaves like one step of gradient descent"
    assert one.match.hyperparameters["step_size"] == pytest.approx(0.8, rel=1e-4)
    three = answered(constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.3, steps=3))
    assert three.headline == "It behaves like 3 steps of gradient descent"
    assert "0% (to rounding)" in three.words


def test_a_construction_of_newton_is_called_newton():
    answer = answered(constructions.newton(x_dim=3, n_context=6, steps=2, alpha=0.3))
    assert answer.nearness == "like"
    assert answer.headline == "It behaves like 2 iterations of Newton's method"


@pytest.mark.filterwarnings("ignore:the model's loss")
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_an_untrained_model_is_given_no_algorithm(attention):
    cfg = TransformerConfig(x_dim=3, n_context=6, n_layers=2, attention=attention, d_model=8, n_heads=2,
                            read_in="linear", read_out="linear", initializer_range=0.3)  # fmt: skip
    answer = answered(HookedTransformer(cfg, seed=3).eval())
    assert answer.nearness == "none"
    assert "behaves like no algorithm" in answer.headline
    assert "It behaves like none of the" in answer.words


def test_what_lies_between_algorithms_is_like_none_of_them():
    step = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.8})
    near = AlgorithmLearner(algorithms.nearest_neighbours, {"n_neighbours": 1})

    class Mixed:
        def predict(self, prompts):
            return step.predict(prompts) + 0.7 * near.predict(prompts)

        def predict_prefixes(self, prompts):
            return step.predict_prefixes(prompts) + 0.7 * near.predict_prefixes(prompts)

    answer = answered(Mixed())
    assert answer.nearness == "nearest"
    assert answer.headline.startswith("It behaves like no algorithm that was tried; the nearest is ")


def match(name: str, distances: torch.Tensor, n_fitted: int = 1) -> FamilyMatch:
    return FamilyMatch(name, None, {}, n_fitted, distances, torch.ones(len(distances)), distances)


def ranked(*matches: FamilyMatch) -> Identification:
    n = len(matches[0].squared_distances)
    return Identification(list(matches), [], torch.ones(n), torch.ones(n), torch.ones(2, n))


def test_a_tie_is_called_a_tie():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).double().abs() / 100
    newton, ridge = match("Newton, 3 iterations", noise), match("ridge", noise.flip(0))
    answer = which_algorithm(ranked(newton, ridge, match("averaging", 0.9 + noise)))
    assert answer.rivals == [ridge]
    assert answer.headline == "It behaves like 3 iterations of Newton's method, which is tied with ridge regression"
    assert "this is a tie: these 400 prompts do not tell it from ridge regression" in answer.words
    apart = which_algorithm(ranked(newton, match("ridge", noise + 0.01)))
    assert apart.rivals == []
    assert "The next algorithm, ridge regression, leaves " in apart.words


def test_of_an_algorithm_and_one_that_contains_it_the_simpler_is_named():
    small = torch.linspace(0, 2e-4, 100).double()
    special, general = (
        match("gradient descent, 1 step", 3 * small, 2),
        match("preconditioned gradient descent, 1 step", small, 9),
    )
    answer = which_algorithm(ranked(general, special))
    assert answer.match is special
    assert "which contains it, comes nearer still: 0.01%" in answer.words
    far = match("gradient descent, 1 step", 300 * small, 2)
    assert which_algorithm(ranked(general, far)).match is general


def test_families_for_scale_are_never_the_answer():
    small = torch.linspace(0, 2e-4, 100).double()
    answer = which_algorithm(ranked(match("any function of S", small, 20), match("ridge", 2 * small)))
    assert answer.match.name == "ridge"


@pytest.mark.parametrize(
    ("general", "special", "held"),
    [
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
    ],
)
def test_which_families_contain_which(general, special, held):
    assert contains(general, special) is held


def answer_at(distance: float) -> Any:
    return which_algorithm(ranked(match("gradient descent, 1 step", torch.full((50,), distance).double())))


def test_since_which_step_is_the_first_snapshot_that_stays_near():
    steps, answer = (0, 10, 20, 40, 80), answer_at(0.01)
    words, step = since_when(steps, [30.0, 0.04, 0.2, 0.03, 0.01], answer, 0.05)
    assert step == 40  # at 10 it was near, and left again
    assert words.startswith(
        "Since step 40 of 80: from this snapshot on one step of gradient descent leaves less than 5%"
    )
    assert "at step 0 it left more than 1,000%, at the end 1%; 5 snapshots" in words
    assert since_when(steps, [0.01] * 5, answer, 0.05)[1] == 0
    words, step = since_when(steps, [1, 1, 1, 1, float("nan")], answer, 0.05)
    assert (step, "At no saved snapshot up to step 80" in words) == (None, True)


def snapshots_of(models: list[HookedTransformer]) -> Study:
    stacks = [stack_models([model]) for model in models]
    kept = Snapshots((0, 100, 200), {name: torch.stack([stack[name] for stack in stacks]) for name in stacks[0]})
    record = {"seeds": [0], "training": {"task": task_to_dict(TASK)}}
    return study(Checkpoint("made", [models[-1]], record, kept))


def test_a_model_that_becomes_gradient_descent_has_its_step():
    sizes = (-0.2, 0.75, 0.8)
    models = [constructions.gradient_descent(x_dim=3, n_context=6, step_size=size) for size in sizes]
    question = AlgorithmQuestion(snapshots_of(models), progress=False, n_prompts=N)
    verdict = question.verdict(Comparison("", "", []))
    assert verdict.numbers["since_step"] == 100
    _, distances = question.over_training or ((), torch.empty(0))
    expected = [((size - 0.8) / size) ** 2 for size in sizes]  # predictions are proportional to the step size
    assert distances[:, 0].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-9)
    without = AlgorithmQuestion(study(models[-1], TASK), progress=False, n_prompts=N).verdict(Comparison("", "", []))
    assert without.sentences["Since when?"].startswith("No snapshots were saved during training")


def test_published_numbers_are_counted_by_paper():
    rows = [
        Row("a", 1, Interval(1.01, 0.99, 1.03, 9), source="fu2024"),
        Row("b", 2, Interval(1.01, 0.99, 1.03, 9), source="fu2024"),
        Row("c", "above 1", 1.5, agrees=True, source="vonoswald2023"),
        Row("d", None, 1.5),
    ]
    words = beside_published(rows)
    assert "1 of 2 published numbers and claims of Fu et al. 2024" in words
    assert "1 of 1 published numbers and claims of von Oswald et al. 2023 agree" in words
    assert words.endswith("What differs: b.")
    assert beside_published(rows[3:]) == "No number was published for this model."


def test_causes_say_where_and_not_what():
    note = "head 0.1, chosen on other prompts; the loss is 1 with all heads"
    row = Row("change of the loss (MSE) without the head that changes it most", None, HALF, "", note)
    words = "By ablation and patching: without head 0.1 the squared error changes by 0.50 ± 0.10. "
    assert causes_in_words([row]) == f"{words}That says where, not what."
    assert causes_in_words([]) == ""


def test_words_for_families_and_shares():
    assert phrase("GD++, 2 steps, parameters for each step") == "2 steps of GD++ with parameters for each step"
    assert phrase("my own rule") == "my own rule"
    assert percent(Interval(3.7e-5, 3.1e-5, 4.3e-5, 9)) == "0.0037% ± 0.0006%"
    assert percent(Interval(1e-13, 0, 2e-13, 9)) == "0% (to rounding)"
    assert (percent(0.5), percent(20.0), percent(1.2)) == ("50%", "more than 1,000%", "120%")
