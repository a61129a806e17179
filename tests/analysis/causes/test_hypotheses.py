"""Which hypothesis wins, and that schedules and parameters are those that the model was made with."""

import itertools
from typing import Any

import pytest
import torch

from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent, query_of
from mechicl.analysis.causes import test_hypotheses as rank_hypotheses
from mechicl.analysis.causes.hypotheses import _rising_steps, candidate_algorithms, reads_ahead
from mechicl.constructions import gd_plus_plus, gradient_descent, hide, known_models
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.statistics import load_result
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=4, n_context=12)
SIZES: dict[str, Any] = {"x_dim": 4, "n_context": 12}


@pytest.fixture(scope="module")
def ranked():
    model = hide(gd_plus_plus(**SIZES, steps=3, step_size=(0.2, 0.5, 1.5), gamma=(0.08, 0.3, 0.5)), seed=1).model
    return rank_hypotheses(model, TASK, n_prompts=64, with_likeness=False, progress=False)


def test_the_algorithm_of_a_hidden_model_comes_first(ranked):
    assert ranked.best.hypothesis == "GD++, 3 steps, parameters for each"
    assert ranked.best.effects.mean > 0.99
    assert ranked.best in ranked.supported
    assert ranked.schedules[0] == ((0, 0), (1, 1), (2, 2), (3, 3))
    others = ranked.to_dataframe().iloc[1:]
    assert others["effects"].max() < ranked.best.effects.low


def test_newtons_method_comes_first_in_its_own_model():
    known = next(known for known in known_models() if known.name == "Newton, 3 iterations")
    result = rank_hypotheses(known.model, known.task, n_prompts=24, with_likeness=False, progress=False)
    assert result.best.hypothesis == "Newton, 3 iterations, answered at the end"
    assert result.best.score.mean > 0.99


def test_the_nearest_family_by_predictions_is_reported_too(ranked, tmp_path):
    model = gradient_descent(**SIZES, step_size=0.2, steps=2)
    hypotheses = [Hypothesis(kind(2, step_size=0.2)) for kind in (QueryDescent, ResidualDescent)]
    result = rank_hypotheses(model, TASK, hypotheses, n_prompts=64, progress=False)
    assert result.best.hypothesis == ResidualDescent(2, step_size=0.2).name
    assert result.likeness.startswith("gradient descent, 2 steps")
    assert "nearest by predictions" in str(result)
    again = load_result(ranked.save(tmp_path / "test"))
    assert again.to_dataframe().equals(ranked.to_dataframe())


def test_a_schedule_is_the_best_of_all_that_rise():
    generator = torch.Generator().manual_seed(0)
    predicted, expected = (torch.randn(n, 2, 5, 1, generator=generator, dtype=torch.float64) for n in (3, 5))

    def cost(steps) -> float:
        total = 0.0
        for layer, step in enumerate(steps):
            for ask in range(2):
                model, algorithm = predicted[layer, ask], expected[step, ask]
                total += ((model - algorithm).norm() ** 2 / (model.norm() ** 2 + algorithm.norm() ** 2)).item()
        return total

    rising = [s for s in itertools.product(range(5), repeat=3) if list(s) == sorted(s)]
    assert tuple(_rising_steps(predicted, expected)) == min(rising, key=cost)


def test_a_hypothesis_that_covers_fewer_layers_ranks_lower():
    model = gradient_descent(**SIZES, step_size=0.2, steps=3)
    whole = Hypothesis(ResidualDescent(3, step_size=0.2), name="layer by layer")
    part = Hypothesis(ResidualDescent(3, step_size=0.2), schedule=((0, 0), (2, 2), (3, 3)), name="two at once")
    ends = Hypothesis(ResidualDescent(3, step_size=0.2), schedule=((0, 0), (3, 3)), name="the end alone")
    result = rank_hypotheses(model, TASK, [ends, part, whole], n_prompts=16, with_likeness=False, progress=False)
    assert [test.hypothesis for test in result.tests] == ["layer by layer", "two at once", "the end alone"]
    assert result.to_dataframe()["layers_covered"].tolist() == [1.0, 0.5, 0.0]
    assert [test.hypothesis for test in result.supported] == ["layer by layer", "two at once"]


def test_causal_points_have_causal_candidates():
    task = LinearRegression(x_dim=2, n_context=6)
    prompts = task.sample(300, seed=0, dtype=torch.float64)
    truth = ResidualDescent(3, step_size=(0.1, 0.2, 0.3), gamma=(0.02, 0.05, 0.0), causal=True)
    after = torch.stack([truth.read(query_of(state)) for state in truth.states(prompts)[1:]])
    candidates = candidate_algorithms(prompts, after, causal=True)
    named = candidates["GD++, 3 steps, parameters for each, each point from its past"]
    assert isinstance(named, ResidualDescent)
    assert named.causal
    assert named.step_sizes == pytest.approx((0.1, 0.2, 0.3), rel=1e-4)
    assert named.gammas[:2] == pytest.approx((0.02, 0.05), rel=1e-3)
    whole = [name for name, algorithm in candidates.items() if not algorithm.causal and "in the context" in name]
    assert whole == ["preconditioned gradient descent, 1 step, residuals in the context"]  # no point reads them


def test_points_that_read_later_ones_are_detected():
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    ahead = gradient_descent(**SIZES, step_size=0.2, steps=2)
    assert reads_ahead(ModelAdapter(ahead), prompts, 1)
    config = TransformerConfig(**SIZES, n_layers=2, d_model=8, n_heads=1, prompt_format="interleaved", read_in="linear")
    assert not reads_ahead(ModelAdapter(HookedTransformer(config).eval()), prompts, 2)
