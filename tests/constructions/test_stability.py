"""Constructions that know their prompts' largest eigenvalue warn where they would diverge on them."""

import math

import pytest
import torch

from mechicl import constructions
from mechicl.algorithms import DivergenceWarning
from tests.constructions.reference import largest_eigenvalue, random_prompts

PROMPTS = random_prompts(n_context=8)
LARGEST = largest_eigenvalue(PROMPTS)
SIZES = {"x_dim": 3, "y_dim": 2, "n_context": 8}
STEP_BOUND, ALPHA_BOUND = 2 / LARGEST, 2 / LARGEST**2
KERNEL = {"weights": torch.eye(3), "act_fn": "identity", "y_dim": 2, "n_context": 8}
BUILDERS = {  # by name: the construction with a fraction of its bound, and its bound
    "gradient_descent": (
        lambda share, **more: constructions.gradient_descent(**SIZES, step_size=share * STEP_BOUND, **more),
        STEP_BOUND,
    ),
    "gd_plus_plus": (
        lambda share, **more: constructions.gd_plus_plus(**SIZES, step_size=share * STEP_BOUND, gamma=0.0, **more),
        STEP_BOUND,
    ),
    "copy_then_gradient_descent": (
        lambda share, **more: constructions.copy_then_gradient_descent(**SIZES, step_size=share * STEP_BOUND, **more),
        STEP_BOUND,
    ),
    "kernel_gradient_descent": (
        lambda share, **more: constructions.kernel_gradient_descent(**KERNEL, step_size=share * STEP_BOUND, **more),
        STEP_BOUND,
    ),
    "newton": (lambda share, **more: constructions.newton(**SIZES, alpha=share * ALPHA_BOUND, **more), ALPHA_BOUND),
    "ridge": (lambda share, **more: constructions.ridge(**SIZES, alpha=share * ALPHA_BOUND, **more), ALPHA_BOUND),
}
builders = pytest.mark.parametrize(("build", "bound"), BUILDERS.values(), ids=BUILDERS)


@builders
def test_above_the_bound_there_is_a_warning_that_names_it(build, bound):
    with pytest.warns(DivergenceWarning) as caught:
        build(1.001, steps=4, largest_eigenvalue=LARGEST)
    (warning,) = caught
    assert f"diverges where λ_max(S) is {LARGEST:.4g}. It converges with" in str(warning.message)
    assert f" = {bound:.4g}" in str(warning.message)


@builders
def test_below_it_or_for_one_step_or_unknown_prompts_there_is_none(build, bound):
    build(0.999, steps=4, largest_eigenvalue=LARGEST)
    build(5.0, steps=1, largest_eigenvalue=LARGEST)
    build(5.0, steps=4)


@builders
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_largest_eigenvalue_that_is_none_is_refused(build, bound, value):
    with pytest.raises(ValueError, match="largest_eigenvalue must be positive and finite"):
        build(0.5, steps=2, largest_eigenvalue=value)


def test_gd_plus_plus_is_judged_by_what_its_steps_do():
    with pytest.warns(DivergenceWarning, match="gamma="):
        constructions.gd_plus_plus(
            **SIZES, step_size=0.1 * STEP_BOUND, gamma=1.05 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
        )
    # a gamma that shrinks the inputs allows a larger step size, and a large step may be made good by the next ones
    constructions.gd_plus_plus(
        **SIZES, step_size=1.3 * STEP_BOUND, gamma=0.2 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
    )
    constructions.gd_plus_plus(
        **SIZES, step_size=[1.2 * STEP_BOUND, 0.5 * STEP_BOUND], gamma=0.0, steps=2, largest_eigenvalue=LARGEST
    )
