"""The study of a model whose answers are known: a rescaled construction."""

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import one_step_optimum, study_one_layer
from mechicl.checkpoints import Checkpoint
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=5)


def construction(step_size: float, scale: float = -2.0):
    model = constructions.gradient_descent(x_dim=3, n_context=5, step_size=step_size)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(scale)
        model.blocks[0].attn.W_O.div_(scale)
    return model


@pytest.fixture(scope="module")
def study():
    optimum = one_step_optimum(TASK).step_size
    checkpoint = Checkpoint("known", [construction(optimum), construction(1.1 * optimum)], {"seeds": [4, 7]})
    return study_one_layer(checkpoint, TASK, n_prompts=3000, progress=False)


def test_tuned_step_is_near_the_exact_one(study):
    assert study.step_size == pytest.approx(one_step_optimum(TASK).step_size, rel=0.01)


def test_known_answers_are_found(study):
    found = study.fit.projected.parameters["step_size"][:, 0]
    for step_size, factor in zip(found.tolist(), (1.0, 1.1), strict=True):
        assert step_size == pytest.approx(factor * one_step_optimum(TASK).step_size)
    assert study.fit.beta.flatten().tolist() == pytest.approx([-2.0, -2.0])
    assert study.fit.distance_KQ.max() < 1e-12
    assert study.sensitivity_cosine().mean == pytest.approx(1.0)
    assert study.seeds == (4, 7)
    assert study.over_training is None


def test_a_longer_step_overshoots_where_inputs_are_large(study):
    ratio = study.shift_ratio("input scale")
    assert ratio[-1, 1] > 1.1
    assert ratio[-1, 0] == pytest.approx(1, abs=0.02)
    assert study.worst_shift("input scale")[1] == pytest.approx((ratio[1:, 1] - 1).abs().max().item())


def test_middle_of_the_path_is_flat_rescaled_and_bad_raw(study):
    assert abs(study.midpoint_excess().mean) < 0.01
    assert study.midpoint_excess(rescaled=False).mean > 0.1


def test_roll_out_of_the_exact_step_is_gradient_descent(study):
    for roll_out in study.roll_outs:
        torch.testing.assert_close(roll_out.trained[:, 0], roll_out.whole_layer[:, 0])
        assert roll_out.trained.shape == (51, 2)
    damped = next(r for r in study.roll_outs if r.damping == 0.5)
    torch.testing.assert_close(damped.trained[:, 0], damped.gradient_descent, rtol=0.05, atol=1e-4)


def test_deep_models_are_refused():
    deep = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.5, steps=2)
    with pytest.raises(ValueError, match="2 layers"):
        study_one_layer(Checkpoint("deep", [deep]), TASK)
