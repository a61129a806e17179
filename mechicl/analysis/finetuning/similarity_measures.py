"""Scores of predictions, and measures of the similarity of reading demonstrations and fine-tuning on them."""

import math

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.prompts import Shots
from mechicl.statistics import Interval, interval

PAIRS = 2**21  # pairs of tokens that are compared at a time


class Scored:
    """Part of results with scores of answers: right (1) or wrong (0), or minus the squared error in a regression."""

    def _interval(self, name: str, samples: Tensor, level: float = 0.95) -> Interval:
        if name.endswith("score") and (samples >= 0).all():
            return interval(samples, level, within=(0, 1))
        return super()._interval(name, samples, level)  # type: ignore[misc]


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"], shots: Shots
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """Score (the higher the better) the predictions of the queries, and compute their losses; float64 on the CPU.

    Among choices: 1 where the right one has the highest logit and 0 elsewhere; cross entropy over the choices, in nats.
    In a regression: squared error summed over the target's dimensions, and minus it as the score.
    """
    outputs, targets = outputs.detach().cpu().double(), shots.targets.cpu()
    if shots.choices is None:
        loss = (outputs - targets.double()).square().sum(-1)
        return -loss, loss
    choices = shots.choices.cpu()
    logits, right = outputs[:, choices], (targets[:, None] == choices).int().argmax(-1)
    return (logits.argmax(-1) == right).double(), F.cross_entropy(logits, right, reduction="none")


def recall_of_gains(
    zero_shot: Float[Tensor, "query"], in_context: Float[Tensor, "query"], finetuned: Float[Tensor, "query"]
) -> Interval:
    """Measure Rec2FTP, the share of the queries that fine-tuning improves which demonstrations improve too.

    Arguments are scores of each query (the higher the better), `finetuned` those without demonstrations. The interval
    is binomial, its `n` the number of queries that fine-tuning improves; NaN if none. Source: Dai et al. 2023, section
    4.3; Bar Natan, Deutch & Magar, section 3.3.
    """
    return interval((in_context > zero_shot)[finetuned > zero_shot])


def recall_if_independent(zero_shot: Float[Tensor, "query"], in_context: Float[Tensor, "query"]) -> Interval:
    """Measure the baseline of Rec2FTP, the share of all improvable queries that demonstrations improve.

    Those are wrong at the start, or all of a regression. Near 1, Rec2FTP is too, whatever fine-tuning does.
    """
    return recall_of_gains(zero_shot, in_context, torch.where(zero_shot < 1, math.inf, zero_shot))


def update_similarity(
    zero_shot: Float[Tensor, "*batch d"], in_context: Float[Tensor, "*batch d"], finetuned: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch"]:
    """Measure SimAOU, the cosine between the changes that demonstrations and fine-tuning make to attention outputs.

    Each output is divided by its length first. NaN where either changes nothing. Source: Dai et al. 2023, section 4.4;
    Bar Natan, Deutch & Magar, section 3.3.
    """
    before = _directions(zero_shot)
    return cosine(_directions(in_context) - before, _directions(finetuned) - before)


def random_update_similarity(
    zero_shot: Float[Tensor, "*batch d"], in_context: Float[Tensor, "*batch d"], *, seed: int
) -> Float[Tensor, "*batch"]:
    """Measure the baseline of `update_similarity`: the demonstrations' change and a normal random vector."""
    change = _directions(in_context) - _directions(zero_shot)
    generator = torch.Generator().manual_seed(seed)
    return cosine(change, torch.randn(change.shape, generator=generator, dtype=change.dtype).to(change.device))


def attention_rank_correlation(
    attended: Float[Tensor, "... token"], implied: Float[Tensor, "... token"]
) -> Float[Tensor, "..."]:
    """Compute Kendall's tau-b of two attentions to the same tokens; NaN if one is flat (Dai et al. 2023, 4.6)."""
    if attended.shape != implied.shape:
        raise ValueError(f"attended and implied must have one shape, got {attended.shape} and {implied.shape}")
    n_tokens = attended.shape[-1]
    if n_tokens < 2:
        return torch.full(attended.shape[:-1], math.nan, dtype=torch.float64)
    # scipy's kendalltau takes one row at a time, and a model has thousands: here all pairs are compared at once
    first, second = torch.triu_indices(n_tokens, n_tokens, offset=1)
    rows = (weights.detach().cpu().double().reshape(-1, n_tokens) for weights in (attended, implied))
    batches = zip(*(each.split(max(1, PAIRS // len(first))) for each in rows), strict=True)
    correlations = []
    for batch in batches:
        a, b = ((each[:, first] - each[:, second]).sign() for each in batch)
        correlations.append(cosine(a, b))  # over the root of the numbers of pairs that do not tie in each
    return torch.cat(correlations).view(attended.shape[:-1])


def cosine(a: Float[Tensor, "... d"], b: Float[Tensor, "... d"]) -> Float[Tensor, "..."]:
    """Compute the cosine along the last axis, float64; NaN where a vector is 0."""
    a, b = a.double(), b.double()
    return einsum(a, b, "... d, ... d -> ...") / (a.norm(dim=-1) * b.norm(dim=-1))


def _directions(vectors: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    return torch.nn.functional.normalize(vectors.double(), dim=-1)
