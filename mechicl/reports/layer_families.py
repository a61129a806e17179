"""The algorithms that layers are matched with, and the words and numbers that the paper has on them."""

from mechicl import algorithms
from mechicl.learners import AlgorithmLearner, IterativeLearner
from mechicl.tasks import Task

SOURCE = "fu2024"
NEWTON_STEPS = tuple(range(1, 24))
RIDGE_STEPS = tuple(range(1, 25))
CHEBYSHEV_STEPS = tuple(range(1, 31))
# 65,536, where the paper has 4,096, so that no layer's best lies at the end; any number of steps costs the same
GD_STEPS = tuple(sorted({round(2 ** (i / 3)) for i in range(49)}))
SEARCH_STEPS = tuple(sorted({round(1024 ** (i / 27)) for i in range(28)}))  # of steepest descent, which runs them all
PAPER_GRID = (1, *range(50, 1301, 50))
"""Numbers of gradient descent steps in Figs. 2, 4 and 12: none between 1 and 50."""
RIVALS = ("gradient descent", "ridge path", "steepest descent", "conjugate gradients", "Chebyshev")
"""What Newton's method is held against. Only the first is in the paper; the second has no iterations."""
GROWING = ("Newton", "gradient descent", "ridge path", "steepest descent")
PUBLISHED_GROWTH = {
    "Newton": ("linear, about 3 a layer in layers 3 to 9", "is linear"),
    "gradient descent": ("exponential", "is exponential"),
}


def reference_families(task: Task) -> dict[str, IterativeLearner]:
    """The algorithms that layers are matched with.

    Gradient descent takes the largest step that converges on all of 4096 prompts of the task, always the same ones.
    """
    return {
        "Newton": AlgorithmLearner(algorithms.newton, {"steps": NEWTON_STEPS}),
        "gradient descent": gradient_descent_on(GD_STEPS, task),
        "ridge path": AlgorithmLearner(algorithms.ridge_path, {"steps": RIDGE_STEPS}),
        "steepest descent": AlgorithmLearner(algorithms.steepest_descent, {"steps": SEARCH_STEPS}),
        "conjugate gradients": AlgorithmLearner(
            algorithms.conjugate_gradient, {"steps": tuple(range(1, 2 * task.x_dim + 1))}
        ),
        "Chebyshev": AlgorithmLearner(algorithms.chebyshev, {"steps": CHEBYSHEV_STEPS}),
        "OLS": AlgorithmLearner(algorithms.ols),
    }


def gradient_descent_on(steps: tuple[int, ...], task: Task) -> AlgorithmLearner:
    """Gradient descent at these numbers of steps, with the largest step size that converges on the task's prompts."""
    step_size = algorithms.stable_step_size(task.sample(4096, seed=2**31))
    return AlgorithmLearner(algorithms.gradient_descent, {"steps": steps, "step_size": step_size})


def ridge_path_of(n_layers: int) -> AlgorithmLearner:
    """A ridge path with two halvings a layer: what a model would be that has no iterations at all."""
    return AlgorithmLearner(algorithms.ridge_path, {"steps": tuple(range(1, 2 * n_layers + 2, 2))})
