"""Compare reading demonstrations in context with fine-tuning on them, on the same queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.finetuning.last_token import LastTokenReader
from mechicl.analysis.finetuning.sgd import FineTuned, FineTuning, fine_tune
from mechicl.base.arguments import checked
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Shots
from mechicl.statistics import Interval, Result, interval
from mechicl.statistics.results import COSINE
from mechicl.text.scores import Scored, scores_and_losses

HIDDEN = -1e30  # below every score of a visible token
PAIRS = 2**21  # pairs of tokens that are compared at a time


@dataclass(frozen=True, eq=False)
class FineTuningComparison(Scored, Result):
    """Similarity of reading demonstrations and fine-tuning on them, for each query.

    `intervals()` has the mean of each measure with a 95% interval over queries. Undefined entries are NaN: the
    direction of a change of 0, the ranks of equal weights.

    Attributes:
        zero_shot_score: score without demonstrations: right (1) or wrong (0) among the choices; minus the squared error
            in a regression.
        in_context_score: score after demonstrations.
        finetuned_score: score without demonstrations, after fine-tuning on them.
        zero_shot_loss: cross entropy over the choices in nats, or squared error; also `in_context_loss` and
            `finetuned_loss`.
        prediction_distance: distance between predictions in context and after fine-tuning: total variation of the
            distributions over the choices, or Euclidean distance in a regression.
        update_similarity: SimAOU, the cosine between the changes that demonstrations and fine-tuning make to the output
            of each attention layer at the last token.
        random_update_similarity: baseline of SimAOU, with a random vector in place of fine-tuning's change.
        centred_update_similarity: SimAOU after each change's mean over queries is subtracted. A change that all queries
            share, such as a preference for label words, makes SimAOU high whatever is learned. NaN for one query.
        head_update_similarity: this cosine for each head's z (its output before W_O).
        map_similarity_before: SimAM before fine-tuning: the cosine between a head's scores (before the softmax) from
            the query's last token to its own tokens, with and without demonstrations. NaN for fewer than two such
            tokens; tokens that the head cannot see do not count.
        map_similarity_after: SimAM between the model with demonstrations and the fine-tuned one without.
        rank_correlation: Kendall's rank correlation between the last token's attention to the demonstrations' tokens in
            context, and the products of its query vector with theirs in the fine-tuned model (to five digits, so that
            equal tokens tie); both summed over heads. Labels and separators, which fine-tuning does not read, do not
            count. For linear attention the sign is a convention: -W_K with -W_V is the same model.
        rank_correlation_before: this rank correlation before fine-tuning. If only keys and values are tuned, that of
            the first layer cannot change.
        random_rank_correlation: baseline of `rank_correlation`, with random weights in place of fine-tuning's.
        head_rank_correlation: the rank correlation of each head.
    """

    zero_shot_score: Float[Tensor, "query"]
    in_context_score: Float[Tensor, "query"]
    finetuned_score: Float[Tensor, "query"]
    zero_shot_loss: Float[Tensor, "query"]
    in_context_loss: Float[Tensor, "query"]
    finetuned_loss: Float[Tensor, "query"]
    prediction_distance: Float[Tensor, "query"]
    update_similarity: Float[Tensor, "layer query"] = field(metadata=COSINE)
    random_update_similarity: Float[Tensor, "layer query"] = field(metadata=COSINE)
    centred_update_similarity: Float[Tensor, "layer query"] = field(metadata=COSINE)
    head_update_similarity: Float[Tensor, "layer head query"] = field(metadata=COSINE)
    map_similarity_before: Float[Tensor, "layer head query"] = field(metadata=COSINE)
    map_similarity_after: Float[Tensor, "layer head query"] = field(metadata=COSINE)
    rank_correlation: Float[Tensor, "layer query"] = field(metadata=COSINE)
    rank_correlation_before: Float[Tensor, "layer query"] = field(metadata=COSINE)
    random_rank_correlation: Float[Tensor, "layer query"] = field(metadata=COSINE)
    head_rank_correlation: Float[Tensor, "layer head query"] = field(metadata=COSINE)

    def recall(self) -> Interval:
        """Measure Rec2FTP: of the queries that fine-tuning improves, the share that demonstrations improve too.

        From 0 to 1, with a binomial 95% interval; NaN if fine-tuning improves no query (Dai et al. 2023, section 4.3).
        """
        before, after = self.zero_shot_score, self.finetuned_score
        return interval((self.in_context_score > before)[after > before])

    def recall_if_independent(self) -> Interval:
        """Measure the baseline of `recall`: its value if the two improved queries independently of each other.

        This is the share of all queries that can improve (wrong ones, or all of a regression) which demonstrations
        improve. Near 1, `recall` is too, whatever fine-tuning does.
        """
        before = self.zero_shot_score
        return replace(self, finetuned_score=torch.where(before < 1, math.inf, before)).recall()

    @classmethod
    @checked
    def concatenate(cls, parts: "Sequence[FineTuningComparison]") -> "FineTuningComparison":
        """Join comparisons of models of one shape, query after query."""
        if len(shapes := {part.head_rank_correlation.shape[:-1] for part in parts}) != 1:
            raise ValueError(f"parts must be of models of one shape, got {sorted(map(tuple, shapes))} heads")
        return cls(*(torch.cat([getattr(part, each.name) for part in parts], dim=-1) for each in fields(cls)))


@checked(locks=True)
def compare_with_finetuning(
    model: Any, shots: Shots, tuning: FineTuning | FineTuned, *, seed: int = 0, progress: bool | None = None
) -> FineTuningComparison:
    """Fine-tune a model on demonstrations and compare it with the same model reading them in context.

    Activations are read through hooks, at the last token; the model stays unchanged. Source: Dai et al. 2023, section
    4; Bar Natan, Deutch & Magar, section 3.3.

    Args:
        model: a mechicl model or a `TransformerBridge`, in eval mode.
        shots: demonstrations and queries as tokens, made by `prompt_shots` (points) or `mechicl.text.text_shots`.
        tuning: `FineTuning()` for one pass of SGD on W_K and W_V of all layers, or with other settings; or the result
            of `fine_tune`, on these demonstrations or others (for example with other labels).

    Returns:
        A `FineTuningComparison` with one value per query, or per layer and query.

    Example:
        >>> shots = prompt_shots(model, prompts[:1])
        >>> compare_with_finetuning(model, shots, FineTuning(learning_rate=0.01)).intervals()["update_similarity"]
    """
    before = BeforeFineTuning(model, shots, seed=seed, progress=progress)
    tuned = tuning if isinstance(tuning, FineTuned) else fine_tune(model, shots, tuning, progress=progress)
    return before.compare_with(tuned)


class BeforeFineTuning:
    """A model before fine-tuning, with and without demonstrations, read once for comparisons with several tunings."""

    @torch.no_grad()
    def __init__(self, model: Any, shots: Shots, *, seed: int = 0, progress: bool | None = None):
        self.shots, self.seed = shots, seed
        self.reader = LastTokenReader(ModelAdapter(model), shots, progress=progress)
        self.alone = self.reader.read(shots.zero_shot)
        self.in_context = self.reader.read(shots.in_context, pattern=True)
        assert self.in_context.pattern is not None
        self.attended = self.in_context.pattern
        self.implied_before = self.reader.implied_attention(self.alone)

    @torch.no_grad()
    def compare_with(self, tuned: FineTuned) -> FineTuningComparison:
        """Compare reading the demonstrations with a fine-tuning."""
        shots, alone, in_context = self.shots, self.alone, self.in_context
        after = self.reader.read(shots.zero_shot, tuned)
        settings = (alone, in_context, after)
        outputs = [setting.attention_output for setting in settings]
        implied = self.reader.implied_attention(after, tuned)
        attended = self.attended.sum(1)
        random = torch.rand(attended.shape, generator=torch.Generator().manual_seed(self.seed + 1), dtype=torch.float64)
        scored = [scores_and_losses(setting.outputs, shots) for setting in settings]
        return FineTuningComparison(
            *(score for score, _ in scored),
            *(loss for _, loss in scored),
            prediction_distance=_distance(in_context.outputs, after.outputs, shots.choices),
            update_similarity=update_similarity(*outputs),
            random_update_similarity=random_update_similarity(*outputs[:2], seed=self.seed),
            centred_update_similarity=update_similarity(*outputs, centred=True),
            head_update_similarity=update_similarity(*(setting.z for setting in settings)),
            map_similarity_before=_map_similarity(in_context.query_scores, alone.query_scores),
            map_similarity_after=_map_similarity(in_context.query_scores, after.query_scores),
            rank_correlation=attention_rank_correlation(attended, _to_five_digits(implied.sum(1))),
            rank_correlation_before=attention_rank_correlation(attended, _to_five_digits(self.implied_before.sum(1))),
            random_rank_correlation=attention_rank_correlation(attended, random),
            head_rank_correlation=attention_rank_correlation(self.attended, _to_five_digits(implied)),
        )


# ---- measures ----


def update_similarity(
    zero_shot: Float[Tensor, "*batch d"],
    in_context: Float[Tensor, "*batch d"],
    finetuned: Float[Tensor, "*batch d"],
    *,
    centred: bool = False,
) -> Float[Tensor, "*batch"]:
    """Measure SimAOU, the cosine between the changes that demonstrations and fine-tuning make to attention outputs.

    Each output is divided by its length first. With `centred`, each change's mean over queries (the last batch axis) is
    subtracted. NaN where either changes nothing. Source: Dai et al. 2023, section 4.4; Bar Natan, Deutch & Magar,
    section 3.3.
    """
    before = _directions(zero_shot)
    changes = [_directions(output) - before for output in (in_context, finetuned)]
    if centred:
        changes = [change - change.mean(-2, keepdim=True) for change in changes]
    return cosine(*changes)


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
    return F.normalize(vectors.double(), dim=-1)


def _map_similarity(in_context: Sequence[Tensor], alone: Sequence[Tensor]) -> Float[Tensor, "layer head query"]:
    similarities = []
    for a, b in zip(in_context, alone, strict=True):
        seen = (a > HIDDEN) & (b > HIDDEN)  # by both
        similarity = cosine(a.where(seen, 0), b.where(seen, 0))
        similarities.append(similarity.where(seen.sum(-1) > 1, math.nan))
    return torch.stack(similarities, dim=-1)


def _to_five_digits(products: Float[Tensor, "... token"]) -> Float[Tensor, "... token"]:
    # tokens after the same context have the same products up to rounding, which must not rank them
    largest = products.abs().amax(-1, keepdim=True)
    return (products / largest.clamp(min=1e-30) * 1e5).round()


def _distance(a: Tensor, b: Tensor, choices: Tensor | None) -> Float[Tensor, "query"]:
    if choices is None:
        return (a.double() - b.double()).norm(dim=-1)
    a, b = (outputs.double()[:, choices.cpu()].softmax(-1) for outputs in (a, b))
    return (a - b).abs().sum(-1) / 2
