"""Constructions warn of divergence if they are given the largest eigenvalue of their prompts."""

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
PARAMETERS = {  # by name: the parameter that has a bound, the bound, and the other arguments
    "gradient_descent": ("step_size", STEP_BOUND, SIZES),
    "gd_plus_plus": ("step_size", STEP_BOUND, {**SIZES, "gamma": 0.0}),
    "copy_then_gradient_descent": ("step_size", STEP_BOUND, SIZES),
    "kernel_gradient_descent": ("step_size", STEP_BOUND, KERNEL),
    "newton": ("alpha", ALPHA_BOUND, SIZES),
}


def builder(name):
    """Return the construction, with a share of its bound."""
    parameter, bound, arguments = PARAMETERS[name]
    return lambda share, **more: getattr(constructions, name)(**{parameter: share * bound}, **arguments, **more)


builders = pytest.mark.parametrize(
    ("build", "bound"), [(builder(name), PARAMETERS[name][1]) for name in PARAMETERS], ids=PARAMETERS
)


@builders
def test_above_the_bound_there_is_a_warning_that_names_it(build, bound):
    with pytest.warns(DivergenceWarning) as caught:
        build(1.001, steps=4, largest_eigenvalue=LARGEST)
    (warning,) = caught
    assert f"diverges where λ_max(S) is {LARGEST:.4g}. It converges with" in str(warning.message)
    assert f" = {bound:.4g}" in str(warning.message)


@builders
def test_below_the_bound_for_one_step_or_unknown_prompts_there_is_none(build, bound):
    build(0.999, steps=4, largest_eigenvalue=LARGEST)
    build(5.0, steps=1, largest_eigenvalue=LARGEST)
    build(5.0, steps=4)


def test_gd_plus_plus_is_judged_by_all_of_its_steps():
    with pytest.warns(DivergenceWarning, match="gamma="):
        constructions.gd_plus_plus(
            **SIZES, step_size=0.1 * STEP_BOUND, gamma=1.05 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
        )
    # a gamma that shrinks the inputs allows a larger step size, and later steps may compensate for a large one
    constructions.gd_plus_plus(
        **SIZES, step_size=1.3 * STEP_BOUND, gamma=0.2 * STEP_BOUND, steps=9, largest_eigenvalue=LARGEST
    )
    constructions.gd_plus_plus(
        **SIZES, step_size=[1.2 * STEP_BOUND, 0.5 * STEP_BOUND], gamma=0.0, steps=2, largest_eigenvalue=LARGEST
    )
