"""Scores of each head's attention pattern and weights, on token ids or on points."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import head_detector
from transformer_lens.utilities import get_act_name

from mechicl.analysis.heads.composition import circuit_scores
from mechicl.base.arguments import Count, checked
from mechicl.base.memory import Budget
from mechicl.base.precision import nan_last
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.sites import hook_names, nearest_name
from mechicl.models.transformer.attention import key_mask
from mechicl.models.wrapping.wrapped import WrappedModel
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import UNBOUNDED, Interval, Result, interval

OWN_SCORES = (
    "previous_token", "duplicate_token", "induction", "target_to_input", "input_to_target", "copying",
    "prefix_matching",
)  # fmt: skip
PERIOD = 25  # length of the repeated segment, if the model has the positions and the tokens for it

Pattern = str | Tensor | Callable[[Tensor], Tensor]
"""An attention pattern to look for: see the argument `patterns` of `score_heads`."""


@dataclass(frozen=True, eq=False)
class HeadScores(Result):
    """Scores of each head's attention and weights, by name: see `score_heads`, which defines them.

    Scores of attention have a value per prompt and so intervals over prompts; scores of weights have none.

    Attributes:
        scores: by name, scores of attention `[layer head prompt]`, of weights `[layer head]`; float64 on the CPU.
        chance: the score of attention that is uniform over the visible keys, on the same prompts, without the sink; 0
            for scores of weights, whose sign is random for random weights. A mean over layers, where these differ.
        chance_by_layer: the same in each layer `[layer]`: some may attend to a window only.
    """

    scores: dict[str, Tensor]
    chance: dict[str, float]
    chance_by_layer: dict[str, Float[Tensor, "layer"]] = field(default_factory=dict)

    def samples(self) -> dict[str, Float[Tensor, "layer head prompt"]]:
        """Return the scores of attention, `[layer head prompt]`."""
        return {name: scores for name, scores in self.scores.items() if scores.ndim == 3}

    def axis_names(self) -> dict[str, tuple[str, ...]]:
        """Return the leading axes of the scores of attention: layers and heads."""
        return dict.fromkeys(self.samples(), ("layer", "head"))

    def __getitem__(self, name: str) -> Tensor:
        """Return a score; a ValueError for an unknown name suggests the nearest one."""
        if name not in self.scores:
            raise ValueError(f"no score {name!r}, only {tuple(self.scores)}{nearest_name(name, self.scores)}")
        return self.scores[name]

    def is_of_attention(self, name: str) -> bool:
        """True if a score is one of attention, measured on prompts, and not one of weights."""
        return self[name].ndim == 3

    def mean(self, name: str) -> Float[Tensor, "layer head"]:
        """Return a score of each head, as a mean over prompts for scores of attention."""
        return self[name].mean(-1) if self.is_of_attention(name) else self[name]

    def interval(self, name: str, layer: int, head: int, level: float = 0.95) -> Interval:
        """Return the mean over prompts of one head's score of attention, with its confidence interval."""
        if not self.is_of_attention(name):
            raise ValueError(f"{name!r} is a score of the weights, without an interval: take mean({name!r})")
        layers, heads = self[name].shape[:2]
        if not (0 <= layer < layers and 0 <= head < heads):
            raise ValueError(f"no head {head} of layer {layer} among {layers} layers of {heads} heads")
        return interval(self[name][layer, head], level, within=UNBOUNDED).within(0, 1)

    def best(self, name: str) -> tuple[int, int, Interval]:
        """Return layer and head with the largest score, chosen on every other prompt, and the score on the rest.

        Of several the first is taken. Scores of weights, and of a single prompt, have no interval: its ends are NaN.
        """
        chosen = self[name][..., ::2].mean(-1) if self.is_of_attention(name) else self[name]
        layer, head = divmod(int(nan_last(chosen).argmax()), chosen.shape[1])
        if not self.is_of_attention(name):
            return layer, head, interval(chosen[layer, head])
        measured = self[name][layer, head, 1::2] if self[name].shape[-1] > 1 else self[name][layer, head]
        return layer, head, interval(measured, within=UNBOUNDED).within(0, 1)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return a table with one row per head: layer, head, and the mean of each score over prompts.

        For scores of attention, `name_half_width` is half the length of its interval over prompts.
        """
        rows = []
        layers, heads = next(iter(self.scores.values())).shape[:2]
        for layer, head in itertools.product(range(layers), range(heads)):
            row: dict[str, Any] = {"layer": layer, "head": head}
            for name in self.scores:
                row[name] = self.mean(name)[layer, head].item()
                if self.is_of_attention(name):
                    row[f"{name}_half_width"] = self.interval(name, layer, head, level).half_width
            rows.append(row)
        return pd.DataFrame(rows)


@checked(locks=True)
@torch.no_grad()
def score_heads(
    model: Any,
    *,
    prompts: Prompts | None = None,
    sequences: TokenSequences | Int[Tensor, "prompt pos"] | None = None,
    n_prompts: Count = 64,
    seed: int = 0,
    patterns: Mapping[str, Pattern] | None = None,
    progress: bool | None = None,
) -> HeadScores:
    """Score every head by its attention and, in models with a vocabulary, by its weights.

    A score of attention is the sum of the pattern from one position to some keys, from 0 to 1. Patterns without a
    softmax may be negative and sum to anything: for them it is the share of these keys in the sum of all absolute
    weights, and 0 for a position that attends to nothing. On token ids:

    - `previous_token`: attention to the position before, mean over all positions but the first;
    - `duplicate_token`: attention to the earlier occurrences of the token, mean over the positions whose token occurred
      before (in drawn sequences the whole second copy);
    - `induction`: attention to the positions after these earlier occurrences, mean over the same positions.

    On interleaved prompts of regression (tokens x_1, y_1, x_2, ..., query):

    - `previous_token`: attention to the token before, mean over all tokens but the first;
    - `target_to_input`: attention from the token of y_i to that of its x_i, mean over the context's points;
    - `input_to_target`: attention from the token of x_i to that of its y_i, as in `constructions.copy_targets`
      (von Oswald et al. 2023, section 4), mean over the context's points; missing with causal keys, which hide y_i.

    From weights, `Σ Re λ / Σ |λ|` over the eigenvalues λ of a circuit from tokens to tokens, between -1 and 1, and 0
    where all are 0; norms, MLPs, positions and biases are left out:

    - `copying`: score of the OV circuit `W_E W_V W_O W_U`, 1 for a head that makes the token it attends to more likely;
      missing if the outputs have another vocabulary;
    - `prefix_matching`: score of the QK circuit through the earlier head with the largest K composition with this one
      (`composition_scores`); 0 in layer 0.

    Args:
        model: in eval mode: a `HookedTransformer` on token ids or interleaved prompts, a wrapped module with
            `encode="interleaved"` and patterns, or a `TransformerBridge` with causal or bidirectional attention.
        prompts: for a model on interleaved prompts, which needs them.
        sequences: for a model on token ids, ids `[prompt pos]` to use instead of drawn ones, for instance with a
            beginning-of-sequence token.
        n_prompts: number of sequences to draw: a random segment of 25 different tokens (fewer if the model lacks the
            positions or tokens) twice.
        patterns: more scores of attention, by name: weights `[query key]` between 0 and 1 of the keys to look for, or a
            function of the model's tokens `[prompt pos]` that returns them, or `[prompt query key]`; or a name of
            `transformer_lens.head_detector`, such as "induction_head". The score is the sum of attention times weight
            over the keys, as a mean over the queries with a weight.

    Returns:
        A `HeadScores`: `scores["induction"]` is one, `best(name)` the strongest head, `to_dataframe()` has a row each.

    Source: Elhage et al. 2021 for the circuits; Olsson et al. 2022 for the scores on repeated random tokens.

    Example:
        >>> scores = score_heads(constructions.induction(d_vocab=40, n_ctx=50, n_heads=2, induction_head=1, seed=0))
        >>> layer, head, score = scores.best("induction")
        >>> str(scores.interval("previous_token", layer=0, head=0))
        ((1, 1), '1.0000 ± 0.0000')
    """
    adapter = ModelAdapter(model)
    cfg, names = model.cfg, _pattern_hooks(model)
    format_name = getattr(cfg, "prompt_format", "token_ids")  # TransformerLens' models take nothing else
    if format_name == "own":
        raise ValueError("head scores are of interleaved prompts or token ids, and encode= of this model is a function")
    if format_name == "paired":
        raise ValueError("tokens of paired prompts contain x and y together, so positions do not show what a head does")
    if (prompts is None) == (format_name == "interleaved") or (prompts is not None and sequences is not None):
        kind = "prompts" if format_name == "interleaved" else "token ids (sequences=, or none to have them drawn)"
        raise ValueError(f"a model of prompt_format={format_name!r} is scored on {kind}")
    if prompts is not None and (len(prompts) == 0 or prompts.n_context == 0):
        raise ValueError(f"needs at least one prompt and one context point, got {prompts}")
    if taken := sorted({*(patterns or {})} & {*OWN_SCORES}):
        raise ValueError(f"patterns must have other names than the scores {OWN_SCORES}, got {taken[0]!r}")
    if prompts is None and sequences is None:
        tokens = _repeated_segments(cfg, n_prompts, seed).to(cfg.device)
    else:
        tokens = adapter.encode(sequences if prompts is None else prompts)  # type: ignore[arg-type]
    if prompts is None and (tokens.ndim != 2 or len(tokens) == 0):
        raise ValueError(f"sequences must be ids [prompt pos], one prompt or more; got {tuple(tokens.shape)}")
    visible = _visible_keys(adapter, tokens, names)
    uniform = visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)

    parts: dict[str, list[Tensor]] = {}
    summed: dict[str, Tensor] = {}
    shares_of_prompt = 3 * torch.float64.itemsize * len(names) * cfg.n_heads * tokens.shape[1] ** 2
    batches = tokens.split(Budget().rows(adapter.bytes_per_row(tokens) + shares_of_prompt))
    for part in progress_bar(batches, unit="batch", progress=progress, desc="heads"):
        places = _token_places(part.cpu()) if prompts is None else _point_places(part.shape[1], visible[0])
        places |= {name: _custom_places(name, pattern, part) for name, pattern in (patterns or {}).items()}
        cache = adapter.record(part, names, len(part))
        shares = [_shares(cache[name], cfg, layer) for layer, name in enumerate(names)]
        for name, weights in places.items():
            weights = weights.expand(len(part), -1, -1)
            equation = "prompt head query key, prompt query key -> head prompt"
            parts.setdefault(name, []).append(torch.stack([einsum(share, weights, equation) for share in shares]))
            summed[name] = summed.get(name, 0) + weights.sum(0)
        del cache, shares  # before the next are made
    scores = {name: torch.cat(part, dim=-1) for name, part in parts.items()}
    chances = {name: (uniform * weights / len(tokens)).sum((1, 2)) for name, weights in summed.items()}
    if prompts is None:
        circuits = circuit_scores(model)
        scores, chances = scores | circuits, chances | dict.fromkeys(circuits, torch.zeros(len(names)).double())
    return HeadScores(scores, {name: each.mean().item() for name, each in chances.items()}, chances)


def _pattern_hooks(model: Any) -> list[str]:
    if model.cfg.n_layers == 0:
        raise ValueError("the model has no layers, so it has no heads")
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    missing = sorted(set(names) - set(hook_names(model)))
    if missing:
        hint = model.how_to_declare(missing[0]) if isinstance(model, WrappedModel) else ""
        raise ValueError(f"head scores need attention, and this {type(model).__name__} has no hook {missing[0]}{hint}")
    return names


def _repeated_segments(cfg: Any, n_prompts: int, seed: int) -> Int[Tensor, "prompt pos"]:
    period = min(PERIOD, cfg.n_ctx // 2, cfg.d_vocab)
    if period < 2:
        raise ValueError(
            f"repeated segments need at least 4 positions and 2 different tokens; the model has n_ctx={cfg.n_ctx} and "
            f"d_vocab={cfg.d_vocab}"
        )
    generator = torch.Generator().manual_seed(seed)
    segments = torch.stack([torch.randperm(cfg.d_vocab, generator=generator)[:period] for _ in range(n_prompts)])
    return segments.repeat(1, 2)


def _visible_keys(adapter: ModelAdapter, tokens: Tensor, names: list[str]) -> Bool[Tensor, "layer query key"]:
    """The keys that each layer's mask shows: of other models, those that get any attention, also if queries are 0."""
    cfg, n_pos = adapter.model.cfg, tokens.shape[1]
    if hasattr(cfg, "keys"):
        layers = map(getattr(cfg, "for_layer", lambda layer: cfg), range(len(names)))  # some have windows
        return torch.stack([key_mask(each, n_pos, slice(None), torch.device("cpu")) for each in layers])
    visible = torch.zeros(len(names), n_pos, n_pos, dtype=torch.bool)

    def add(pattern: Tensor, hook: Any, layer: int) -> None:
        visible[layer] |= (pattern != 0).any(0).any(0).cpu()

    listening: list[Hook] = [(name, partial(add, layer=layer)) for layer, name in enumerate(names)]
    queries = [name for layer in range(len(names)) if (name := get_act_name("q", layer)) in hook_names(adapter.model)]
    for zeroed in ([], queries):
        adapter.run(tokens[:1], [*((name, lambda q, hook: torch.zeros_like(q)) for name in zeroed), *listening])
    return visible


def _token_places(ids: Int[Tensor, "prompt pos"]) -> dict[str, Float[Tensor, "prompt query key"]]:
    """The weight of each query and key in the scores on token ids: a mean over queries, a sum over keys."""
    duplicates = (ids[:, :, None] == ids[:, None]).tril(-1)
    repeated = duplicates.any(-1)
    if not repeated.any(-1).all():
        raise ValueError("every sequence needs a token that occurs twice")
    following = duplicates.roll(1, dims=-1)  # the last key, which rolls around, is before no query
    later = (torch.arange(ids.shape[1]) > 0).expand(len(ids), -1)
    return {
        "previous_token": _mean_over(later, _previous(ids.shape[1])),
        "duplicate_token": _mean_over(repeated, duplicates),
        "induction": _mean_over(repeated, following),
    }


def _point_places(n_pos: int, visible: Bool[Tensor, "query key"]) -> dict[str, Float[Tensor, "1 query key"]]:
    """The weight of each query and key in the scores on interleaved prompts, the same for all prompts."""
    pos, previous = torch.arange(n_pos)[None], _previous(n_pos)
    places = {"previous_token": _mean_over(pos > 0, previous), "target_to_input": _mean_over(pos % 2 == 1, previous)}
    if visible[0, 1]:
        places["input_to_target"] = _mean_over((pos % 2 == 0) & (pos < n_pos - 1), previous.mT)
    return places


def _custom_places(name: str, pattern: Pattern, tokens: Tensor) -> Float[Tensor, "prompt query key"]:
    """The weight of each query and key in the score of a user's pattern."""
    n_pos = tokens.shape[1]
    if isinstance(pattern, str):
        if pattern not in head_detector.HEAD_NAMES:
            raise ValueError(f"pattern {pattern!r} is not one of {head_detector.HEAD_NAMES}")
        make = getattr(head_detector, f"get_{pattern}_detection_pattern")
        weights = torch.stack([make(each[None].cpu()) for each in tokens])
    else:
        weights = pattern if isinstance(pattern, Tensor) else pattern(tokens)
    shape = (len(tokens), n_pos, n_pos)
    if not isinstance(weights, Tensor) or weights.shape not in (shape, shape[1:]):
        got = [*weights.shape] if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"pattern {name!r} must be [query key] = {[*shape[1:]]}, got {got}")
    weights = weights.detach().cpu().double().expand(shape)
    queries = weights.any(-1)
    if not bool(((weights >= 0) & (weights <= 1)).all()) or not queries.any(-1).all():
        raise ValueError(f"pattern {name!r} must have weights between 0 and 1, not all 0 for any prompt")
    return _mean_over(queries, weights)


def _previous(n_pos: int) -> Bool[Tensor, "query key"]:
    pos = torch.arange(n_pos)
    return pos[:, None] == pos + 1


def _mean_over(queries: Bool[Tensor, "prompt query"], keys: Tensor) -> Float[Tensor, "prompt query key"]:
    each = queries.double() / queries.sum(-1, keepdim=True)
    return each[..., None] * keys


def _shares(pattern: Float[Tensor, "prompt head query key"], cfg: Any, layer: int) -> Tensor:
    pattern = pattern.detach().cpu().double()
    if not hasattr(cfg, "prompt_format") or (hasattr(cfg, "for_layer") and cfg.for_layer(layer).attention == "softmax"):
        return pattern
    total = pattern.abs().sum(-1, keepdim=True)
    return pattern.abs() / total.masked_fill(total == 0, 1)
