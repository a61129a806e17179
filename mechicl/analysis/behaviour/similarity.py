"""Similarities between two learners: of their errors along the prompt, and of the weights that they induce."""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.learners import Trajectory
from mechicl.prompts import Prompts


def similarity_of_errors(a: Trajectory, b: Trajectory, prompts: Prompts) -> Float[Tensor, "step_a step_b prompt"]:
    """Cosine between the errors that two learners make along each prompt, for all pairs of their steps.

    The errors of a prompt are those of its points 2 to n + 1, each predicted from the points before it; of trajectories
    that hold the query alone, that one error. NaN where a learner makes no error at all.

    Args:
        a: predictions of a learner on the prompts.
        b: of another.
        prompts: with the targets.

    Source: Fu et al. 2024, A.3.1, eq. 11 and 12.

    Example:
        >>> newton = algorithms.newton(prompts, [1, 2, 4])
        >>> similarity_of_errors(Lens(model).trajectory(prompts), newton, prompts).mean(-1)
    """
    errors_a, errors_b = _errors(a, prompts), _errors(b, prompts)
    if errors_a.shape[1:] != errors_b.shape[1:]:
        raise ValueError(f"one trajectory has {errors_a.shape[2]} errors a prompt, the other {errors_b.shape[2]}")
    cosines = einsum(_normed(errors_a), _normed(errors_b), "a prompt error, b prompt error -> a b prompt")
    return cosines.clamp(-1, 1)


def similarity_of_weights(a: Trajectory, b: Trajectory) -> Float[Tensor, "step_a step_b prompt point"]:
    """Cosine between the weights that two learners induce from every prefix with at least one point.

    NaN where a learner's weights are zero.

    Args:
        a: a trajectory with weights, as from `learner.trajectory(prompts, with_weights=True)`.
        b: another, on the same prompts.

    Returns:
        One entry a number of points, from 1 to n (of a trajectory that holds the query alone, one entry).

    Source: Fu et al. 2024, A.3.1.

    Example:
        >>> newton = algorithms.newton(prompts, [1, 2, 4], with_weights=True)
        >>> similarity_of_weights(Lens(model).trajectory(prompts, with_weights=True), newton).nanmean((2, 3))
    """
    for trajectory in (a, b):
        if trajectory.weights is None:
            raise ValueError(f"{trajectory.name or 'a trajectory'} has no weights: ask for with_weights=True")
    assert a.weights is not None
    assert b.weights is not None
    if a.weights.shape[1:] != b.weights.shape[1:]:
        raise ValueError(
            f"weights of different prompts: [prompt point x y] is {tuple(a.weights.shape[1:])} for {a.name or 'one'} "
            f"and {tuple(b.weights.shape[1:])} for {b.name or 'the other'}"
        )
    units_a, units_b = (
        _normed(_after_first(w, axis=2).double().flatten(3)) for w in (a.weights, b.weights.to(a.weights))
    )
    return einsum(units_a, units_b, "a prompt point weight, b prompt point weight -> a b prompt point").clamp(-1, 1)


def _errors(trajectory: Trajectory, prompts: Prompts) -> Float[Tensor, "step prompt error"]:
    if prompts.n_context == 0:
        raise ValueError("prompts without context points have no errors to compare")
    predictions = trajectory.predictions.to(prompts.device).double()
    targets = (prompts.ys[:, -1:] if predictions.shape[2] == 1 else prompts.ys).double()
    if predictions.shape[1:] != targets.shape:
        raise ValueError(
            f"predictions [step prompt point y] of shape {tuple(predictions.shape)} by "
            f"{trajectory.name or 'a learner'} are not of {prompts}"
        )
    return _after_first(predictions - targets, axis=2).flatten(2)


def _after_first(values: Tensor, axis: int) -> Tensor:
    """Without the first point, which nothing precedes; a query alone stays."""
    n = values.shape[axis]
    return values.narrow(axis, 1, n - 1) if n > 1 else values


def _normed(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)
