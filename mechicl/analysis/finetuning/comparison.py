"""Zero-shot, in context, fine-tuned: one model and one set of demonstrations, measured on the same queries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl.analysis.finetuning.measures import (
    attention_rank_correlation,
    cosine,
    random_update_similarity,
    recall_of_gains,
    update_similarity,
)
from mechicl.analysis.finetuning.runs import Weights, read
from mechicl.analysis.finetuning.sequences import batches, check_lengths, scores_and_losses
from mechicl.analysis.finetuning.tuning import FineTuned, FineTuning, fine_tune
from mechicl.models.adapter import ModelAdapter
from mechicl.models.sites import check_hook
from mechicl.shots import Shots
from mechicl.statistics import Interval, Result, interval

HIDDEN = -1e30  # no score of a token that is seen is as low
SCORES = "attn.hook_attn_scores"
HOOKS = ("hook_attn_out", "attn.hook_z", SCORES, "attn.hook_pattern", "attn.hook_q")


@dataclass(frozen=True, eq=False)
class FineTuningComparison(Result):
    """How alike reading demonstrations and fine-tuning on them are, for each query.

    Entries that are not defined are NaN: the direction of a change that is 0, the ranks of weights that are all equal.

    Attributes:
        zero_shot_score: right (1) or wrong (0) among the choices; minus the squared error in a regression.
        in_context_score: the same with demonstrations.
        finetuned_score: the same after fine-tuning.
        zero_shot_loss: cross entropy over the choices in nats, or squared error.
        in_context_loss: the same with demonstrations.
        finetuned_loss: the same after fine-tuning.
        prediction_distance: between predictions in context and after fine-tuning: total variation of the distributions
            over the choices, or Euclidean distance.
        update_similarity: SimAOU, the cosine between what demonstrations and what fine-tuning change in the output of
            each attention layer at the last token.
        random_update_similarity: the same with a random vector for fine-tuning's change.
        head_update_similarity: the same for what each head moves (z).
        map_similarity_before: SimAM before fine-tuning: the cosine between a head's scores, before the softmax, of the
            query's own tokens by its last one, with and without demonstrations. NaN for fewer than two such tokens,
            whose cosine is a sign; tokens that the head cannot see count for none.
        map_similarity_after: the same between the model with demonstrations and the fine-tuned one without.
        rank_correlation: Kendall's, between the attention that the last token pays to the demonstrations' tokens in
            context, and the products of its query vector with theirs in the fine-tuned model (to five digits, so that
            equal tokens tie); both summed over heads. The tokens are those of the demonstrations' texts: labels and
            separators, which fine-tuning does not read, are left out. For linear attention the sign is a convention:
            -W_K with -W_V is the same model.
        rank_correlation_before: the same before fine-tuning. Where keys and values alone are tuned, the first layer's
            query vectors, and so this measure, cannot change.
        random_rank_correlation: the same with random weights for fine-tuning's.
        head_rank_correlation: the same for each head.
    """

    zero_shot_score: Float[Tensor, "query"]
    in_context_score: Float[Tensor, "query"]
    finetuned_score: Float[Tensor, "query"]
    zero_shot_loss: Float[Tensor, "query"]
    in_context_loss: Float[Tensor, "query"]
    finetuned_loss: Float[Tensor, "query"]
    prediction_distance: Float[Tensor, "query"]
    update_similarity: Float[Tensor, "layer query"]
    random_update_similarity: Float[Tensor, "layer query"]
    head_update_similarity: Float[Tensor, "layer head query"]
    map_similarity_before: Float[Tensor, "layer head query"]
    map_similarity_after: Float[Tensor, "layer head query"]
    rank_correlation: Float[Tensor, "layer query"]
    rank_correlation_before: Float[Tensor, "layer query"]
    random_rank_correlation: Float[Tensor, "layer query"]
    head_rank_correlation: Float[Tensor, "layer head query"]

    def recall(self) -> Interval:
        """Rec2FTP: the share of the queries that fine-tuning improves which demonstrations improve too."""
        return recall_of_gains(self.zero_shot_score, self.in_context_score, self.finetuned_score)

    def by_layer(self, name: str) -> list[Interval]:
        """A measure's mean over queries in each layer, heads averaged, with its interval.

        Raises:
            ValueError: a measure that has no layers.
        """
        value = self._of_layers(name, least=2)
        return [interval(layer.mean(0) if layer.ndim > 1 else layer) for layer in value]

    def by_head(self, name: str) -> list[list[Interval]]:
        """A measure's mean over queries for each head of each layer, with its interval.

        Raises:
            ValueError: a measure that has no heads.
        """
        return [[interval(head) for head in layer] for layer in self._of_layers(name, least=3)]

    def _of_layers(self, name: str, least: int) -> Tensor:
        known = {field: value for field, value in self.samples().items() if value.ndim >= least}
        if name not in known:
            raise ValueError(f"{name!r} is not one of {list(known)}")
        return known[name]

    @classmethod
    def concatenate(cls, parts: "Sequence[FineTuningComparison]") -> "FineTuningComparison":
        """Several comparisons of models of one shape, query after query.

        Raises:
            ValueError: none.
        """
        if not parts:
            raise ValueError("no comparisons to put together")
        return cls(*(torch.cat([getattr(part, field.name) for part in parts], dim=-1) for field in fields(cls)))


def compare_with_finetuning(
    model: Any,
    shots: Shots,
    tuning: FineTuning | FineTuned,
    *,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = False,
) -> FineTuningComparison:
    """Fine-tune a model on demonstrations and compare it with the same model reading them.

    Activations are read through hooks, at the last token; the model is left as it was.

    Args:
        model: of TransformerLens' protocol, ours or a `TransformerBridge`, in eval mode.
        shots: queries and demonstrations.
        tuning: how to fine-tune on them; or what fine-tuning has found, on these demonstrations or others (with other
            labels, say).
        seed: of the random baselines.
        batch_size: queries in memory at a time.
        progress: show a progress bar.

    Raises:
        TypeError: a model without hooks.
        ValueError: a prompt longer than the model's context, a hook of attention that the model does not have, or what
            `fine_tune` refuses.

    Source: Dai et al. 2023, section 4; Bar Natan, Deutch & Magar, section 3.3.

    Example:
        >>> compare_with_finetuning(model, shots, FineTuning(learning_rate=0.3)).intervals()["update_similarity"]
    """
    with_tuned = comparer(model, shots, seed=seed, batch_size=batch_size, progress=progress)
    tuned = tuning if isinstance(tuning, FineTuned) else fine_tune(model, shots, tuning, progress=progress)
    return with_tuned(tuned)


@torch.no_grad()
def comparer(
    model: Any, shots: Shots, *, seed: int = 0, batch_size: int = 16, progress: bool = False
) -> Callable[[FineTuned], FineTuningComparison]:
    """`compare_with_finetuning` for several fine-tunings, with what does not depend on them read once.

    Arguments and errors as there.
    """
    adapter = ModelAdapter(model)
    for layer in range(adapter.n_layers):
        for hook in HOOKS:
            check_hook(model, f"blocks.{layer}.{hook}")
    check_lengths(model, (*shots.zero_shot, *shots.in_context, *shots.examples))
    bar = tqdm(total=2 * len(shots) + len(shots.examples), unit="prompt", disable=not progress, leave=False)
    reader = _Reader(adapter, shots, batch_size, bar)
    alone = reader.read(shots.zero_shot)
    behind = reader.read(shots.in_context, attended=True)
    attended = behind["hook_pattern"]
    generator = torch.Generator().manual_seed(seed + 1)
    uniform = torch.rand(attended.sum(1).shape, generator=generator, dtype=torch.float64)
    ranks_before = attention_rank_correlation(attended.sum(1), _to_five_digits(reader.implied(alone).sum(1)))
    random_ranks = attention_rank_correlation(attended.sum(1), uniform)
    bar.close()

    @torch.no_grad()
    def with_tuned(tuned: FineTuned) -> FineTuningComparison:
        after = reader.read(shots.zero_shot, tuned)
        implied = reader.implied(after, tuned)
        scored = [scores_and_losses(of["outputs"], shots.targets, shots.choices) for of in (alone, behind, after)]
        outputs = [of["hook_attn_out"][:, 0] for of in (alone, behind, after)]
        return FineTuningComparison(
            *(score for score, _ in scored),
            *(loss for _, loss in scored),
            prediction_distance=_distance(behind["outputs"], after["outputs"], shots.choices),
            update_similarity=update_similarity(*outputs),
            random_update_similarity=random_update_similarity(*outputs[:2], seed=seed),
            head_update_similarity=update_similarity(*(of["hook_z"] for of in (alone, behind, after))),
            map_similarity_before=_map_similarity(behind["own"], alone["own"]),
            map_similarity_after=_map_similarity(behind["own"], after["own"]),
            rank_correlation=attention_rank_correlation(attended.sum(1), _to_five_digits(implied.sum(1))),
            rank_correlation_before=ranks_before,
            random_rank_correlation=random_ranks,
            head_rank_correlation=attention_rank_correlation(attended, _to_five_digits(implied)),
        )

    return with_tuned


class _Reader:
    """Reads what the measures need of each prompt, float64 on the CPU, queries in their order."""

    def __init__(self, adapter: ModelAdapter, shots: Shots, batch_size: int, bar: Any):
        self.adapter, self.shots, self.batch_size, self.bar = adapter, shots, batch_size, bar
        self.layers = range(adapter.n_layers)
        self.places = shots.demonstration_positions()
        self.products = self._scores_are_weights()

    def read(self, prompts: Sequence[Tensor], tuned: FineTuned | None = None, *, attended: bool = False) -> Any:
        """Activations at the last token: `outputs` [query d_out], those of hooks [layer head query d], and `own`.

        `own` is a list of [layer head token], scores of the query's own tokens. `attended` adds the pattern on the
        demonstrations' tokens. `hook_attn_out` has one head.
        """
        names = ["hook_attn_out", "attn.hook_z", "attn.hook_q", "attn.hook_k" if self.products else SCORES]
        names += ["attn.hook_pattern"] if attended else []
        found: dict[int, dict[str, Tensor]] = {}
        for index, tokens in batches(prompts, self.batch_size):
            most = max(self.shots.n_own[i] for i in index)
            wanted = {
                "hook_attn_out": lambda of: of[:, -1:],
                "attn.hook_z": lambda of: of[:, -1],
                "attn.hook_q": lambda of: of[:, -1],
                "attn.hook_k": lambda of, most=most: of[:, -most:].transpose(1, 2),
                SCORES: lambda of, most=most: of[:, :, -1, -most:],
                "attn.hook_pattern": lambda of: of[:, :, -1, self.places.to(of.device)],
            }
            outputs, kept = self._run(tokens, {name: wanted[name] for name in names}, tuned)
            stacked = {
                name.split(".")[-1]: torch.stack([kept[f"blocks.{layer}.{name}"] for layer in self.layers], 1)
                for name in names
            }
            stacked = {name: of.cpu().double() for name, of in stacked.items()}
            for row, i in enumerate(index):
                found[i] = {name: of[row] for name, of in stacked.items()} | {"outputs": outputs[row].cpu()}
                own = self._products(found[i]) if self.products else found[i].pop("hook_attn_scores")
                found[i]["own"] = own[..., -self.shots.n_own[i] :]
            self.bar.update(len(index))
        ordered = [found[i] for i in range(len(prompts))]
        together: dict[str, Any] = {"own": [of["own"] for of in ordered]}
        together["outputs"] = torch.stack([of["outputs"] for of in ordered])
        for name in {name.split(".")[-1] for name in names} - {"hook_attn_scores", "hook_k"}:
            together[name] = torch.stack([of[name] for of in ordered], dim=2)
        return together

    def implied(self, read: Any, tuned: FineTuned | None = None) -> Float[Tensor, "layer head query token"]:
        """Products of the query vectors that were read with those of the demonstrations' tokens, by the same model."""
        own = "layer head query d, layer head token d -> layer head query token"
        return einsum(read["hook_q"], self._example_queries(tuned), own)

    def _example_queries(self, tuned: FineTuned | None) -> Float[Tensor, "layer head token d_head"]:
        """Query vectors of the demonstrations' own tokens, each demonstration read alone."""
        parts: dict[int, Tensor] = {}
        for index, tokens in batches(self.shots.examples, self.batch_size):
            _, kept = self._run(tokens, {"attn.hook_q": lambda of: of}, tuned)
            stacked = torch.stack([kept[f"blocks.{layer}.attn.hook_q"] for layer in self.layers])
            for row, i in enumerate(index):
                own = stacked[:, row, -self.shots.places[i][1] :]
                parts[i] = own.transpose(1, 2).cpu().double()
            self.bar.update(len(index))
        return torch.cat([parts[i] for i in range(len(parts))], dim=2)

    def _scores_are_weights(self) -> bool:
        """Whether the hook for scores shows what is behind the softmax, as some bridges' does.

        Scores are then products of queries and keys, whose scale a cosine does not depend on.

        Raises:
            ValueError: it does, and positions are part of the scores in a way that the products do not know.
        """
        pattern = "attn.hook_pattern"
        tokens = self.shots.in_context[0][None]
        _, kept = self._run(tokens, {SCORES: lambda of: of[:, :, -1], pattern: lambda of: of[:, :, -1]}, None)
        scores, weights = (kept[f"blocks.0.{name}"] for name in (SCORES, pattern))
        cfg = self.adapter.model.cfg
        softmax = getattr(cfg, "attention", "softmax") == "softmax"
        if not softmax or scores.shape[-1] == 1 or not torch.equal(scores, weights):
            return False
        if getattr(cfg, "positional_embedding_type", "standard") != "standard":
            raise ValueError(
                f"blocks.0.{SCORES} of {type(self.adapter.model).__name__} shows weights, not scores before the softmax"
            )
        return True

    def _products(self, found: dict[str, Tensor]) -> Float[Tensor, "layer head token"]:
        keys = found.pop("hook_k")
        keys = keys.repeat_interleave(found["hook_q"].shape[1] // keys.shape[1], dim=1)
        return einsum(found["hook_q"], keys, "layer head d, layer head token d -> layer head token")

    def _run(self, tokens: Tensor, wanted: Any, tuned: FineTuned | None) -> tuple[Tensor, Weights]:
        by_layer = {f"blocks.{layer}.{name}": take for layer in self.layers for name, take in wanted.items()}
        changes, linearized = (None, False) if tuned is None else (tuned.changes, tuned.linearized)
        return read(self.adapter, self.adapter.encode(tokens), by_layer, changes, linearized=linearized)


def _map_similarity(behind: Sequence[Tensor], alone: Sequence[Tensor]) -> Float[Tensor, "layer head query"]:
    found = []
    for a, b in zip(behind, alone, strict=True):
        seen = (a > HIDDEN) & (b > HIDDEN)  # by both
        similarity = cosine(a.where(seen, 0), b.where(seen, 0))
        found.append(similarity.where(seen.sum(-1) > 1, math.nan))
    return torch.stack(found, dim=-1)


def _to_five_digits(products: Float[Tensor, "... token"]) -> Float[Tensor, "... token"]:
    """Products to five digits of the largest.

    Tokens that demonstrations begin with alike have the same products but for rounding: that must not rank them.
    """
    largest = products.abs().amax(-1, keepdim=True)
    return (products / largest.clamp(min=1e-30) * 1e5).round()


def _distance(a: Tensor, b: Tensor, choices: Tensor | None) -> Float[Tensor, "query"]:
    if choices is None:
        return (a.double() - b.double()).norm(dim=-1)
    a, b = (of.double()[:, choices.cpu()].softmax(-1) for of in (a, b))
    return (a - b).abs().sum(-1) / 2
