"""Scripts on models with known algorithms: right answers, and controls."""

import math

import pytest
import torch

from mechicl.algorithms.stepwise import AfterCopying, ResidualDescent
from mechicl.constructions import gradient_descent, known_models
from mechicl.tasks import LinearRegression
from tests.scripts import import_script

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
    assert families.Case("m", "Newton", "Newton, 6 iterations", 0.9, 0.1, 0.0, 64).is_right
    assert not families.Case("m", "Newton", "gradient descent, 6 steps", 0.9, 0.1, 0.0, 64).is_right


def test_controls_have_the_shape_and_not_the_weights():
    model = gradient_descent(x_dim=3, n_context=6, step_size=0.2, steps=2)
    prompts = TASK.sample(8, seed=0, dtype=torch.float64)
    for made in (answers.untrained(model, 0), answers.shuffled(model, 0)):
        assert made.cfg == model.cfg
        with torch.no_grad():
            assert not torch.allclose(made.predict(prompts), model.predict(prompts))
    before, after = (each.blocks[0].attn.W_Q.flatten().sort().values for each in (model, answers.shuffled(model, 0)))
    torch.testing.assert_close(before.double(), after)


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
    args = answers.Args(n_prompts=16, n_fitting=64)
    assert answers._matched_steps(known, args) == {
        "layers": [1, 2], "expected": [1, 2], "matched": [1, 2], "right": [True, True],
    }  # fmt: skip
    read = answers._read_variables(known, args)
    assert min(read["planted"].values()) > 0.999
    assert max(read["control"].values()) < 0.1
    assert math.isfinite(sum(read["untrained"].values()))
