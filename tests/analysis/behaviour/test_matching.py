"""Best matches, growth curves and ranked families where the answer is known."""

import math

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens, Match, match
from mechicl.analysis.behaviour import rank_families
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.analysis.behaviour.matching import STEP_COPIES
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Trajectory
from mechicl.learners.learners import bytes_per_prompt
from mechicl.tasks import LinearRegression
from tests.analysis.behaviour.conftest import Bare

PROMPTS = LinearRegression(x_dim=4, n_context=9, inputs="gaussian").sample(60, seed=0, dtype=torch.float64)
NEWTON = AlgorithmLearner(algorithms.newton, {"steps": list(range(1, 13))})


def _as_layers(steps: list[int]) -> Trajectory:
    """A model whose layers run these numbers of Newton iterations."""
    newton = algorithms.newton(PROMPTS, steps, with_weights=True)
    return Trajectory(tuple(range(1, len(steps) + 1)), newton.predictions, "layer", newton.weights)


@pytest.mark.parametrize("similarity", ["errors", "weights"])
def test_layers_that_run_newton_match_their_own_iterations(similarity):
    memory = STEP_COPIES * 2 * bytes_per_prompt(NEWTON, PROMPTS) * 17
    result = match(_as_layers([2, 4, 6, 8, 10]), NEWTON, PROMPTS, similarity=similarity, memory=memory)
    best = result.best()
    assert [b.column for b in best] == [2, 4, 6, 8, 10]
    assert [(b.low, b.high) for b in best] == [(2, 2), (4, 4), (6, 6), (8, 8), (10, 10)]
    assert all(b.similarity.mean == pytest.approx(1) for b in best)
    assert not any(b.at_edge for b in best)
    growth = result.growth()
    assert growth.slope.mean == pytest.approx(2, abs=1e-6)
    assert growth.slope.low == pytest.approx(2, abs=1e-6)  # every resample chooses the same steps
    assert growth.better == "linear"
    assert growth.linear_share == 1
    assert (result.by_point is None) == (similarity == "errors")


def test_a_best_match_at_the_edge_is_marked_and_left_out_of_the_growth():
    result = match(_as_layers([1, 3, 5, 7, 12]), NEWTON, PROMPTS)
    assert [b.at_edge for b in result.best()] == [True, False, False, False, True]
    assert result.growth_rows() == [2, 3, 4]
    with pytest.raises(ValueError, match="at least 5 different layers"):
        result.growth()
    assert result.growth(rows=[5, 1, 2, 3, 4]).columns == (1, 3, 5, 7, 12)


def test_edges_are_those_of_the_values_whatever_their_order():
    values = torch.tensor([[[0.1], [0.9], [0.2]], [[0.9], [0.1], [0.2]]], dtype=torch.float64).expand(-1, -1, 3)
    assert [b.at_edge for b in Match("a", "b", (1, 2), (4, 1, 9), values, "errors").best()] == [True, False]


def test_growth_ends_where_nothing_grows_any_more():
    result = match(_as_layers([1, 2, 2, 4, 6, 8, 10, 10, 10]), NEWTON, PROMPTS)
    assert result.growth_rows() == [3, 4, 5, 6, 7]


def test_a_pair_that_is_hardly_ever_defined_does_not_win():
    values = torch.full((1, 2, 10), 0.99, dtype=torch.float64)
    values[0, 0] = math.nan
    values[0, 0, 0] = 1.0
    values[0, 1, 0] = 0.999
    mean = Match("a", "b", (1,), (1, 2), values, "errors").mean()
    torch.testing.assert_close(mean, torch.tensor([[1.0, 0.999]], dtype=torch.float64))  # on the one common prompt
    never = Match("a", "b", (1,), (1, 2), torch.full((1, 2, 10), math.nan, dtype=torch.float64), "errors").best()[0]
    assert math.isnan(never.column)


def test_a_family_over_another_hyperparameter_and_a_learner_without_steps_are_matched_too():
    penalties = AlgorithmFamily(algorithms.ridge, "penalty", (0.01, 0.3, 5.0))
    steps = AlgorithmLearner(algorithms.ridge, {"penalty": 0.3})

    for similarity in ("errors", "weights"):
        result = match(steps, penalties, PROMPTS, similarity=similarity)
        assert result.best()[0].column == 0.3
        assert result.columns == (0.01, 0.3, 5.0)
    assert match(Bare(steps), penalties, PROMPTS).best()[0].column == 0.3
    with pytest.raises(ValueError, match="not linear in the query"):
        match(AlgorithmLearner(algorithms.nearest_neighbours), penalties, PROMPTS, similarity="weights")


def test_a_model_on_paired_prompts_is_compared_on_the_query():
    construction = constructions.gradient_descent(x_dim=4, n_context=9, step_size=0.02, steps=3)
    descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": [1, 2, 3, 4], "step_size": 0.02})
    result = match(Lens(construction), descent, PROMPTS, similarity="weights")
    assert [b.column for b in result.best()[1:]] == [1, 2, 3]


def test_undecided_prompts_widen_the_interval_of_the_best_step():
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(1, 5, 40, generator=generator, dtype=torch.float64)
    best = Match("a", "b", (0,), (1, 2, 3, 4, 5), noise, "errors").best()[0]
    assert best.low < best.high
    assert best.low <= best.column <= best.high


def test_prompts_without_a_similarity_do_not_count():
    values = torch.tensor([[[1.0, math.nan, 0.5], [0.6, 0.6, 0.6]]], dtype=torch.float64)
    result = Match("a", "b", (0,), (1, 2), values, "errors")
    assert result.mean()[0, 0].item() == pytest.approx(0.75)
    assert result.best()[0].similarity.n == 2


@pytest.mark.parametrize(("slope", "start"), [(0.6, 1.0), (2.3, 4.0), (5.7, 2.5)])
def test_a_linear_growth_is_found(slope, start):
    growth = fit_growth(list(range(3, 10)), [max(1, round(start + slope * i)) for i in range(7)])
    assert growth.slope.mean == pytest.approx(slope, rel=0.35, abs=0.15)


@pytest.mark.parametrize("doublings", [0.8, 1.4, 2.5])
def test_an_exponential_growth_is_found_and_preferred(doublings):
    growth = fit_growth(list(range(2, 9)), [max(1, round(2 ** (1 + doublings * i))) for i in range(7)])
    assert growth.doubling.mean == pytest.approx(doublings, rel=0.1)
    assert growth.better == "exponential"


def test_the_exponential_fit_is_a_regression_of_the_logarithm():
    rows, columns = [1, 2, 3, 4, 5], [2, 3, 9, 14, 40]
    growth = fit_growth(rows, columns)
    slope, intercept = np.polyfit(rows, np.log2(columns), 1)
    np.testing.assert_allclose(np.log2(growth.exponential_fit), slope * np.array(rows) + intercept, atol=1e-9)
    residuals = np.log(columns) - np.log(growth.exponential_fit)
    aic = 5 * math.log(residuals @ residuals / 5) + 6 + 24 / 1
    assert growth.exponential_aic == pytest.approx(aic, rel=1e-9)


FEWER = LinearRegression(x_dim=3, n_context=8, inputs="gaussian").sample(60, seed=0)
LONG_NEWTON = AlgorithmLearner(algorithms.newton, {"steps": tuple(range(1, 13))})
FAMILIES = {
    "Newton": LONG_NEWTON,
    "ridge path": AlgorithmLearner(algorithms.ridge_path, {"steps": tuple(range(12))}),
    "Newton again": LONG_NEWTON,
}


def ranked(learner, families=FAMILIES, prompts=FEWER):
    return rank_families({name: match(learner, each, prompts) for name, each in families.items()})


def test_newtons_iterations_are_nearest_to_newton_and_as_near_to_its_double():
    ranking = ranked(algorithms.newton(FEWER, [3, 6]))
    assert ranking.rows == (3, 6)
    assert ranking.nearest(6)[0] == "Newton"
    assert set(ranking.nearest(6)) == {"Newton", "Newton again"}
    assert ranking.steps[0] == (3, 6)
    assert all(each.low > 0 for each in ranking.minus("Newton", "ridge path"))
    assert all(each.mean == 0 for each in ranking.minus("Newton", "Newton again"))


def test_steps_are_chosen_on_other_prompts_than_those_that_measure():
    ranking = ranked(algorithms.ridge_path(FEWER, [2, 5]))
    matched = match(algorithms.ridge_path(FEWER, [2, 5]), LONG_NEWTON, FEWER)
    means = matched.similarities[:, :, ::2].mean(-1)
    for row in (0, 1):
        best = int(means[row].argmax())
        torch.testing.assert_close(ranking.similarities[0, row], matched.similarities[row, best, 1::2])
        assert ranking.steps[0][row] == matched.columns[best]


def test_prompts_without_a_similarity_are_left_out():
    prompts = FEWER[:]
    prompts.ys[1] = 0  # no error of any learner: no cosine
    ranking = ranked(algorithms.newton(prompts, [3]), prompts=prompts)
    assert ranking.similarities[:, 0, 0].isnan().all()
    assert ranking.minus("Newton", "ridge path")[0].n == 29
    assert ranking.nearest(3)[0] == "Newton"
