"""All seeds of a checkpoint: their models, errors, and the sentence that lists them; tuned descent as a model."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import constructions
from mechicl.learners import Learner, squared_errors
from mechicl.learners.learners import query_predictions
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts


def in_float64(models: Iterable[Any]) -> list[Any]:
    return [copy.deepcopy(model).double() for model in models]


def query_errors(learners: Iterable[Learner], prompts: Prompts) -> Float[Tensor, "seed prompt"]:
    return torch.stack([squared_errors(learner, prompts)[:, 0] for learner in learners])


@torch.no_grad()
def over_orders(
    learner: Learner, prompts: Prompts, *, n_orders: int, seed: int = 0
) -> tuple[Float[Tensor, "prompt"], Float[Tensor, "prompt"]]:
    """Variance and mean square of the query's prediction over random orders of its context."""
    found = torch.stack([query_predictions(learner, prompts.permuted(seed=seed + i)) for i in range(n_orders)])
    return found.var(0).mean(-1), found.square().mean(0).mean(-1)


def by_seed(values: Iterable[Any], digits: str = ".3g") -> str:
    """Words for a note: "by seed 1.2, 1.3"."""
    return "by seed " + ", ".join(f"{float(value):{digits}}" for value in values)


def kept_seeds(checkpoint: Any) -> Sequence[int]:
    return [i for i in range(len(checkpoint.models)) if i not in checkpoint.stuck]


def descent_layers(learner: Any, steps: int, clip: float | None = None, **sizes: Any) -> HookedTransformer:
    """Tuned descent as layers, with tokens clipped where a model's are; `sizes` are x_dim and n_context."""
    tuned = learner.hyperparameters

    def each(name: str) -> list[float]:  # one for all steps, or one a step; the last γ does nothing and was not tuned
        return [float(tuned.get(name, tuned.get(f"{name}_{i + 1}", 0.0))) for i in range(steps)]

    made = constructions.gd_plus_plus(**sizes, step_size=each("step_size"), gamma=each("gamma"), steps=steps)
    clipped = HookedTransformer(made.cfg.replace(token_clip=clip))
    clipped.load_state_dict(made.state_dict())
    return clipped.eval()
