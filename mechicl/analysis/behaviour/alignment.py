"""How alike two learners are, prompt by prompt."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget
from mechicl.base.progress import progress_bar
from mechicl.learners import Learner, bytes_per_prompt
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.statistics.results import COSINE

GRAPH_COPIES = 8  # a graph keeps the activations of every layer, where `bytes_per_prompt` counts two layers'


@dataclass(frozen=True, eq=False)
class Alignment(Result):
    """Distances and cosines between two learners on each prompt (von Oswald et al. 2023, section 3).

    Attributes:
        prediction_distance: L2 norm of the difference of their predictions.
        sensitivity_cosine: cosine between their derivatives d prediction / d query; NaN where one is zero.
        sensitivity_distance: L2 norm of the difference of those derivatives.
    """

    prediction_distance: Float[Tensor, "prompt"]
    sensitivity_cosine: Float[Tensor, "prompt"] = field(metadata=COSINE)
    sensitivity_distance: Float[Tensor, "prompt"]


@checked
def align(a: Learner, b: Learner, prompts: Prompts, *, memory: float = MEMORY, progress: bool = True) -> Alignment:
    """Compare two learners on each prompt's query.

    Args:
        a: a learner whose predictions are differentiable with respect to the query.
        b: another one.
        prompts: prompts to compare them on; the papers use 10,000.

    Source: von Oswald et al. 2023, section 3.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, dict(steps=1, step_size=0.6))
        >>> print(align(load("lsa-1l"), step, LinearRegression().sample(1000, seed=0)))
    """
    if len(prompts) == 0:
        raise ValueError("align() needs at least one prompt")
    per_prompt = GRAPH_COPIES * max(bytes_per_prompt(learner, prompts) for learner in (a, b))
    batches, parts = list(prompts.split(Budget(memory).rows(per_prompt, at_most=4096))), []
    for part in progress_bar(batches, unit="batch", progress=progress, desc="align"):
        # learners may be on other devices than the prompts
        (y_a, s_a), (y_b, s_b) = (
            [each.to(part.device) for each in predictions_and_sensitivities(learner, part)] for learner in (a, b)
        )
        parts.append(((y_a - y_b).norm(dim=1), cosine_of_sensitivities(s_a, s_b), (s_a - s_b).flatten(1).norm(dim=1)))
    return Alignment(*(torch.cat(column) for column in zip(*parts, strict=True)))


def cosine_of_sensitivities(a: Float[Tensor, "prompt y x"], b: Float[Tensor, "prompt y x"]) -> Float[Tensor, "prompt"]:
    """Cosine between two learners' sensitivities on each prompt; NaN where one is zero."""
    flat_a, flat_b = a.flatten(1), b.flatten(1)
    cosine = (flat_a * flat_b).sum(1) / (flat_a.norm(dim=1) * flat_b.norm(dim=1))
    return cosine.clamp(-1, 1)


@checked
def sensitivities(learner: Learner, prompts: Prompts) -> Float[Tensor, "prompt y x"]:
    """Differentiate a learner's prediction with respect to the query's input, exactly, in float64.

    For a learner that is linear in the query this is the linear model that it has learned from the context.

    Example:
        >>> sensitivities(model, prompts).norm(dim=(1, 2)).mean()
    """
    return predictions_and_sensitivities(learner, prompts)[1]


def predictions_and_sensitivities(
    learner: Learner, prompts: Prompts
) -> tuple[Float[Tensor, "prompt y"], Float[Tensor, "prompt y x"]]:
    """Query predictions and their derivatives, both float64 and detached; the learner's gradients do not change."""
    query = prompts.query.xs.detach().clone().requires_grad_()
    with torch.enable_grad():
        predictions = learner.predict(prompts.with_query(query))
        if not predictions.requires_grad:
            raise ValueError(f"{type(learner).__name__}.predict is not differentiable with respect to the query")
        # one prompt's prediction does not see another's query: the sum over prompts has each prompt's own derivative
        rows = [
            torch.autograd.grad(predictions[:, i].sum(), query, retain_graph=True, allow_unused=True)[0]
            for i in range(predictions.shape[1])
        ]
    if any(row is None for row in rows):
        raise ValueError(f"{type(learner).__name__}.predict does not depend on the query")
    return predictions.detach().double(), torch.stack(rows, dim=1).detach().double()
