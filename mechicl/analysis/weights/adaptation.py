"""The functions of the query that contexts make of a learner."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.memory import MEMORY
from mechicl.learners import Learner, prompt_batches
from mechicl.models import PromptedModel
from mechicl.prompts import Prompts


@torch.no_grad()
def adapted_functions(
    learner: Learner, prompts: Prompts, grid: Float[Tensor, "query x"], *, memory: float = MEMORY
) -> Float[Tensor, "prompt query y"]:
    """What a learner predicts all over a grid of queries, from each prompt's context.

    Args:
        learner: any learner; a model computes each context once.
        prompts: the contexts; their own queries are not read.
        grid: query inputs, the same for all prompts.
        memory: bound in bytes.

    Returns:
        `[prompt query y]`, on the learner's device, without gradients.

    Raises:
        ValueError: a grid of another input dimension than the prompts.

    Source: von Oswald et al. 2023, Fig. 4, the adjusted functions.

    Example:
        >>> prompts = load_checkpoint("sine-lsa").task.sample(4, seed=0)
        >>> adapted_functions(load("sine-lsa"), prompts, torch.linspace(-5, 5, 11)[:, None]).shape
        torch.Size([4, 11, 1])
    """
    if grid.ndim != 2 or grid.shape[1] != prompts.x_dim:
        raise ValueError(f"the grid must be [query x] with x_dim={prompts.x_dim}, got {tuple(grid.shape)}")
    grid = grid.to(prompts.device, prompts.dtype)
    parts = []
    for part in prompt_batches(learner, prompts, memory, copies=max(len(grid), 1)):
        if isinstance(learner, PromptedModel):
            queries = grid.expand(len(part), 1, *grid.shape)
            *_, stream = learner.query_streams(part, queries, at="query")
            parts.append(learner.read_out(stream[:, 0]))
        else:
            xs, ys = (values.repeat_interleave(len(grid), dim=0) for values in (part.xs, part.ys))
            predicted = learner.predict(Prompts(xs, ys).with_query(grid.repeat(len(part), 1)))
            parts.append(predicted.unflatten(0, (len(part), len(grid))))
    return torch.cat(parts)
