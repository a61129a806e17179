"""How sure is an algorithm's name? Families weighed by distance and by what was fitted, over resampled prompts."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import ROUNDING
from mechicl.base.arguments import checked

EVIDENCE, PRICE, ELSEWHERE = 32.0, 0.25, 0.4
"""How many independent observations a distance counts for, how many of them a fitted number takes, how far is "none".

A model that runs an algorithm inexactly deviates from it in the same way on all prompts: more of them do not make a
family that is a little nearer any likelier. The three numbers were chosen on variations of known models, so that the
right family is likeliest; `analyses/known_families.py` measures on other ones how often a name is right.
"""
N_RESAMPLES = 200


@checked(undefined=True)
def family_weights(
    distances: Float[Tensor, "family prompt"],
    n_fitted: Sequence[int],
    scale: float,
    *,
    evidence: float = EVIDENCE,
    price: float = PRICE,
    elsewhere: float = ELSEWHERE,
    seed: int = 0,
) -> Float[Tensor, "family"]:
    """The probability of each family, by its distance and its simplicity; what is left of 1 is none of them.

    With D a family's mean distance, as a part of the scale, and k its fitted numbers, its weight is `D^(-(N - c k)/2)`:
    the likelihood of N observations with an unknown variance, of which every fitted number takes c. So a family that
    contains another one must come nearer by the more, the nearer the other is already. What is no member of any family
    has a weight too, as if it were at the distance `elsewhere`. Weights are averaged over resampled prompts: few of
    them make no firm answer.

    Args:
        distances: squared distances of predictions from the model's; a family with one not finite has no weight.
        n_fitted: fitted numbers of each family.
        scale: the model's mean squared prediction; 1e-10 of it is rounding, which is added to each distance.
        evidence: N.
        price: c; Bayes' rule for numbers of which nothing is known before has 1.
        elsewhere: the distance of anything else, as a part of the scale; where infinite, nothing else is possible.
        seed: of the resampled prompts.

    Source: Schwarz 1978, whose criterion has a constant price; Efron 1979.

    Example:
        >>> far, near = torch.full((50,), 0.01), torch.full((50,), 0.001)
        >>> near_weight, far_weight = family_weights(torch.stack([near, far]), [2, 2], 1.0)
        >>> near_weight > 0.9, far_weight < 0.1
        (tensor(True), tensor(True))
    """
    if not (evidence > 0 and elsewhere > 0 and price >= 0):
        raise ValueError(f"evidence and elsewhere must be above 0, price not below: {evidence}, {elsewhere}, {price}")
    if len(n_fitted) != len(distances):
        raise ValueError(f"n_fitted must have a number for each of {len(distances)} families, got {len(n_fitted)}")
    scale = max(scale, 1e-300)
    values = torch.cat([distances.double() / scale, torch.full_like(distances[:1].double(), elsewhere)])
    finite, n = values.isfinite().all(1), values.shape[1]
    drawn = torch.randint(n, (N_RESAMPLES, n), generator=torch.Generator().manual_seed(seed))
    counts = torch.stack([torch.bincount(row, minlength=n) for row in drawn]).double()
    means = values.masked_fill(~finite[:, None], 1.0) @ counts.T / n + ROUNDING
    taken = price * torch.tensor([*n_fitted, 0])[:, None].double()
    scores = -0.5 * (evidence - taken) * means.log()
    return scores.masked_fill(~finite[:, None], -math.inf).softmax(0).mean(1)[:-1]
