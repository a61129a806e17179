"""Similarities between two learners: of their errors along the prompt, and of the weights that they induce."""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.learners import Trajectory
from mechicl.prompts import Prompts


def similarity_of_errors(a: Trajectory, b: Trajectory, prompts: Prompts) -> Float[Tensor, "step_a step_b prompt"]:
    """Cosine between the errors that two learners make along each prompt, for all pairs of their steps.

    The errors of a prompt are those of its points 2 to n + 1, each predicted from the points before it; of trajectories
    with the query alone, that one error. NaN where a learner makes no error at all.

    Source: Fu et al. 2024, A.3.1, eq. 11 and 12.

    Example:
        >>> newton = algorithms.newton(prompts, [1, 2, 4])
        >>> similarity_of_errors(Lens(model).trajectory(prompts), newton, prompts).mean(-1)
    """
    if prompts.n_context == 0:
        raise ValueError("prompts without context points have no errors to compare")
    errors_a, errors_b = _errors(a, prompts), _errors(b, prompts)
    if errors_a.shape[1:] != errors_b.shape[1:]:
        raise ValueError(f"one trajectory has {errors_a.shape[2]} errors a prompt, the other {errors_b.shape[2]}")
    cosines = einsum(_normed(errors_a), _normed(errors_b), "a prompt error, b prompt error -> a b prompt")
    return cosines.clamp(-1, 1)


def similarity_of_weights(a: Trajectory, b: Trajectory) -> Float[Tensor, "step_a step_b prompt point"]:
    """Cosine between the weights that two learners induce from every prefix with at least one point.

    The last axis has an entry for each number of points, from 1 to n; of trajectories with the query alone, one entry.
    NaN where a learner's weights are zero.

    Source: Fu et al. 2024, A.3.1.

    Example:
        >>> newton = algorithms.newton(prompts, [1, 2, 4], with_weights=True)
        >>> similarity_of_weights(Lens(model).trajectory(prompts, with_weights=True), newton).nanmean((2, 3))
    """
    units = []
    for trajectory in (a, b):
        if trajectory.weights is None:
            raise ValueError(f"{trajectory.name or 'a trajectory'} has no weights: ask for with_weights=True")
        units.append(_normed(_after_first(trajectory.weights).double().flatten(3)))
    shapes = [trajectory.weights.shape[1:] for trajectory in (a, b) if trajectory.weights is not None]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"weights of different prompts: [prompt point x y] is {tuple(shapes[0])} for {a.name or 'one'} and "
            f"{tuple(shapes[1])} for {b.name or 'the other'}"
        )
    cosines = einsum(
        units[0], units[1].to(units[0]), "a prompt point weight, b prompt point weight -> a b prompt point"
    )
    return cosines.clamp(-1, 1)


def _errors(trajectory: Trajectory, prompts: Prompts) -> Float[Tensor, "step prompt error"]:
    predictions = trajectory.predictions.to(prompts.device).double()
    targets = (prompts.ys[:, -1:] if predictions.shape[2] == 1 else prompts.ys).double()
    if predictions.shape[1:] != targets.shape:
        raise ValueError(
            f"predictions [step prompt point y] of shape {tuple(predictions.shape)} by "
            f"{trajectory.name or 'a learner'} are not of {prompts}"
        )
    return _after_first(predictions - targets).flatten(2)


def _after_first(values: Float[Tensor, "step prompt point *rest"]) -> Tensor:
    """Leave out the first point, which has no context; a query alone stays."""
    return values[:, :, 1:] if values.shape[2] > 1 else values


def _normed(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)
