"""The ranking of families by layer, on trajectories whose nearest family is known."""

import torch

from mechicl import algorithms
from mechicl.analysis import match
from mechicl.analysis.behaviour import rank_families
from mechicl.learners import AlgorithmLearner
from mechicl.statistics import load_result
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=3, n_context=8, inputs="gaussian").sample(60, seed=0)
NEWTON = AlgorithmLearner(algorithms.newton, {"steps": tuple(range(1, 13))})
FAMILIES = {
    "Newton": NEWTON,
    "ridge path": AlgorithmLearner(algorithms.ridge_path, {"steps": tuple(range(12))}),
    "Newton again": NEWTON,
}


def ranked(learner, families=FAMILIES, prompts=PROMPTS):
    return rank_families({name: match(learner, each, prompts) for name, each in families.items()})


def test_newtons_iterations_are_nearest_to_newton_and_as_near_to_its_double():
    ranking = ranked(algorithms.newton(PROMPTS, [3, 6]))
    assert ranking.rows == (3, 6)
    assert ranking.nearest(6)[0] == "Newton"
    assert set(ranking.nearest(6)) == {"Newton", "Newton again"}
    assert ranking.steps[0] == (3, 6)
    assert all(each.low > 0 for each in ranking.minus("Newton", "ridge path"))
    assert all(each.mean == 0 for each in ranking.minus("Newton", "Newton again"))


def test_steps_are_chosen_on_other_prompts_than_those_that_measure():
    ranking = ranked(algorithms.ridge_path(PROMPTS, [2, 5]))
    matched = match(algorithms.ridge_path(PROMPTS, [2, 5]), NEWTON, PROMPTS)
    means = matched.similarities[:, :, ::2].mean(-1)
    for row in (0, 1):
        best = int(means[row].argmax())
        torch.testing.assert_close(ranking.similarities[0, row], matched.similarities[row, best, 1::2])
        assert ranking.steps[0][row] == matched.columns[best]


def test_prompts_without_a_similarity_are_left_out():
    prompts = PROMPTS[:]
    prompts.ys[1] = 0  # no error of any learner: no cosine
    ranking = ranked(algorithms.newton(prompts, [3]), prompts=prompts)
    assert ranking.similarities[:, 0, 0].isnan().all()
    assert ranking.minus("Newton", "ridge path")[0].n == 29
    assert ranking.nearest(3)[0] == "Newton"


def test_a_ranking_is_stored_and_loaded(tmp_path):
    ranking = ranked(algorithms.newton(PROMPTS, [3, 6]))
    loaded = load_result(ranking.save(tmp_path / "ranking"))
    assert loaded.nearest(3) == ranking.nearest(3)
    assert loaded.steps == ranking.steps
