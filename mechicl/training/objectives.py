"""What a model is trained to do: squared error on points, or the cross entropy of the next token."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.models import PromptedModel
from mechicl.prompts import At, Prompts, TokenSequences


def examples(model: PromptedModel, prompts: Prompts | TokenSequences, at: At) -> tuple[Tensor, Tensor]:
    """What a model reads `[prompt pos ...]` and what it is to predict: `[prompt row y]`, or ids `[prompt row]`."""
    if isinstance(prompts, TokenSequences):
        return prompts.read, prompts.targets()
    return model.encode(prompts), prompts.ys if at == "points" else prompts.ys[:, -1:]


def weight_of_share(prompts: Prompts | TokenSequences, share: slice, world: int) -> float:
    """What the mean loss over a share of a batch counts for, where the mean over `world` shares is taken.

    1 for equal shares: the mean over the shares is then that over the batch.
    """
    if isinstance(prompts, TokenSequences):
        scored = prompts.predictable[:, 1:]
        return world * int(scored[share].sum()) / max(int(scored.sum()), 1)
    return world * len(prompts.xs[share]) / len(prompts)


def losses(
    outputs: Float[Tensor, "model prompt row d_out"],
    targets: Float[Tensor, "model prompt row d_out"] | Int[Tensor, "model prompt row"],
) -> Float[Tensor, "model"]:
    """Each model's mean squared error, or its cross entropy (nats) over the tokens that are scored.

    Raises:
        ValueError: none of a model's tokens is scored, so that there is nothing to take a mean of.
    """
    if targets.is_floating_point():
        return (outputs - targets).square().mean(dim=(1, 2, 3))
    scored = (targets >= 0).sum(dim=(1, 2))
    if (scored == 0).any():
        raise ValueError(
            f"none of the tokens is to be predicted for model {(scored == 0).nonzero().flatten().tolist()}"
        )
    nats = F.cross_entropy(outputs.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    return nats.sum(dim=(1, 2)) / scored
