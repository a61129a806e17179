"""Learners of Boolean functions.

Inputs and targets are -1 or 1, and predictions the target's mean given the earlier points, 2 P(y = 1) - 1.
"""

import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import sums_before
from mechicl.base.arguments import Fraction, Natural, checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts

MOST_FUNCTIONS = 3**11
AT_ONCE = 2**25  # numbers in the largest tensor


@checked
def conjunction_bayes(
    prompts: Prompts, *, literal_probability: Fraction = 0.3, positive_share: Fraction = 0.3
) -> Trajectory:
    """Predict by exact Bayes over all 3^d conjunctions, for inputs of `tasks.Conjunctions`.

    A function's weight is its prior times the probability of the inputs up to and including the predicted point's
    (inputs that satisfy the function are drawn more often), and 0 if it disagrees with an earlier target. Source:
    Bhattamishra et al. 2024 for the task.

    Args:
        literal_probability: probability that a variable is in the conjunction, as in the task.
        positive_share: share of inputs that are made to satisfy the conjunction, as in the task.

    Raises:
        ValueError: there are too many conjunctions to enumerate, or values other than -1 and 1.

    Example:
        >>> task = Conjunctions(x_dim=4, n_context=20)
        >>> prompts = task.sample(256, seed=0)
        >>> (conjunction_bayes(prompts).predictions[0, :, -1].sign() == prompts.query.ys).float().mean() > 0.9
        tensor(True)
    """
    _check_signs(prompts)
    d = prompts.x_dim
    _check_size(3**d, f"3^{d} conjunctions", "elimination")
    literals = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)] * d).view(-1, d)
    literals = literals.to(prompts.device)
    sizes = literals.abs().sum(-1)
    log_prior = torch.xlogy(sizes, literal_probability / 2) + torch.xlogy(d - sizes, 1 - literal_probability)
    # a uniform input has chance 2^-d, one made to satisfy the function 2^(m - d); the factor 2^-d is common to all
    log_positive = ((1 - positive_share) + positive_share * 2**sizes).log()
    log_negative = torch.full_like(sizes, 1 - positive_share).log()

    def outcomes(xs: Tensor) -> tuple[Tensor, Tensor]:
        holds = xs @ literals.T == sizes  # [prompt point function]
        return 2.0 * holds - 1, torch.where(holds, log_positive, log_negative)

    return Trajectory((1,), _posterior_means(prompts, log_prior, outcomes), "Bayes over conjunctions")


@checked
def parity_bayes(prompts: Prompts, *, degree: Natural | None = None) -> Trajectory:
    """Predict by exact Bayes over parities (products of some inputs), all equally likely.

    Args:
        degree: number of variables in the product; None for parities of any number of variables.

    Raises:
        ValueError: `degree` exceeds `x_dim`, too many parities to enumerate, or values other than -1 and 1.

    Source: Bhattamishra et al. 2024 for the task.
    """
    _check_signs(prompts)
    d = prompts.x_dim
    if degree is not None and degree > d:
        raise ValueError(f"degree must be at most x_dim={d}, got {degree}")
    sizes = range(d + 1) if degree is None else [degree]
    _check_size(sum(math.comb(d, size) for size in sizes), "parities", "gf2_elimination")
    subsets = [subset for size in sizes for subset in itertools.combinations(range(d), size)]
    masks = torch.zeros(len(subsets), d, dtype=torch.float64, device=prompts.device)
    for row, subset in enumerate(subsets):
        masks[row, list(subset)] = 1
    log_prior = torch.zeros(len(subsets), dtype=torch.float64, device=prompts.device)

    def outcomes(xs: Tensor) -> tuple[Tensor, Tensor]:
        odd = ((1 - xs) / 2 @ masks.T) % 2
        return 1 - 2 * odd, torch.zeros_like(odd)

    return Trajectory((1,), _posterior_means(prompts, log_prior, outcomes), "Bayes over parities")


@checked
def elimination(prompts: Prompts) -> Trajectory:
    """Learn a conjunction by elimination: predict the "and" of the literals that are true in all positive examples.

    A literal is a variable or its negation. It starts from all literals, so it predicts -1 before the first positive
    example, and never errs on a negative one. Source: Valiant 1984, "A theory of the learnable".
    """
    _check_signs(prompts)
    positive, xs = prompts.ys == 1, prompts.xs
    # True where the literal "x is value" was true in all positive examples before each point
    kept = [sums_before((positive & (xs != value)).double()) == 0 for value in (1, -1)]
    holds = (~kept[0] | (xs == 1)) & (~kept[1] | (xs == -1))
    predictions = 2 * holds.all(-1, keepdim=True).to(prompts.dtype) - 1
    return Trajectory((1,), predictions[None], "elimination")


@checked
def gf2_elimination(prompts: Prompts) -> Trajectory:
    """Predict a parity by Gaussian elimination over the field of two elements; 0 where it is undetermined.

    With bits b = (1 - x) / 2 a parity is linear: y's bit is the sum of some of x's bits. A query that is a sum of
    context inputs has the sum of their targets; any other is as likely odd as even, so that this is exact Bayes over
    parities of any subset.

    Example:
        >>> prompts = Parities(x_dim=6, n_context=30, degree=None).sample(64, seed=0)
        >>> (gf2_elimination(prompts).query()[0] == prompts.query.ys).all()
        tensor(True)
    """
    _check_signs(prompts)
    rows = torch.cat([prompts.xs, prompts.ys], dim=-1) < 0  # [prompt point bit], the target's bit last
    n_prompts, d = len(prompts), prompts.x_dim
    basis = torch.zeros(n_prompts, d, d + 1, dtype=torch.bool, device=prompts.device)  # by leading bit
    present = torch.zeros(n_prompts, d, dtype=torch.bool, device=prompts.device)
    predictions = []
    for t in range(prompts.n_context + 1):
        row = rows[:, t].clone()
        target = row[:, -1].clone()
        for bit in range(d):  # clears bit i, unless its row is missing
            row ^= (row[:, bit] & present[:, bit])[:, None] & basis[:, bit]
        left = row[:, :-1]
        known = ~left.any(-1)
        # the rows added are equations of the context: their targets sum to that of the query
        guess = 1.0 - 2.0 * (row[:, -1] ^ target).to(prompts.dtype)
        predictions.append(torch.where(known, guess, torch.zeros_like(guess)))
        leading = left.to(torch.uint8).argmax(-1)  # the first bit that remains
        new = torch.nn.functional.one_hot(leading, d).bool() & ~known[:, None]
        basis = torch.where(new[..., None], row[:, None], basis)
        present = present | new
    return Trajectory((1,), torch.stack(predictions, dim=1)[None, ..., None], "elimination over GF(2)")


def _posterior_means(
    prompts: Prompts, log_prior: Float[Tensor, "function"], outcomes: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Float[Tensor, "step prompt point y"]:
    """Average the target over functions, weighted by prior, probability of the inputs, and the targets so far."""
    parts = []
    for part in prompts.split(max(1, AT_ONCE // (len(log_prior) * (prompts.n_context + 1)))):
        values, log_chances = outcomes(part.xs.double())
        agree = torch.where(values == part.ys.double(), 0.0, -torch.inf)
        logs = log_prior + sums_before(agree) + log_chances.cumsum(1)
        most = logs.amax(-1, keepdim=True)
        weights = torch.where(most.isfinite(), (logs - most).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        parts.append(((weights * values).sum(-1, keepdim=True) / total.clamp(min=1e-300)).to(prompts.dtype))
    return torch.cat(parts)[None]


def _check_signs(prompts: Prompts) -> None:
    for name, values in (("inputs", prompts.xs), ("targets", prompts.ys)):
        if len(wrong := values[values.abs() != 1]):
            raise ValueError(f"{name} of Boolean functions are -1 or 1, got {wrong[0].item():g}")
    if prompts.y_dim != 1:
        raise ValueError(f"a Boolean function has one target, got y_dim={prompts.y_dim}")


def _check_size(n_functions: int, kind: str, instead: str) -> None:
    if n_functions > MOST_FUNCTIONS:
        raise ValueError(f"{n_functions} {kind} are too many to enumerate (at most {MOST_FUNCTIONS}): take {instead}")
