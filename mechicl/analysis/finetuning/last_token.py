"""Activations at the last token of every prompt, which the measures of a comparison need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.finetuning.forward_passes import Weights, check_lengths, equal_length_batches, run_with_changes
from mechicl.analysis.finetuning.sgd import FineTuned
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import check_hook
from mechicl.prompts import Shots

OUTPUT, MOVED, QUERY, KEY = "hook_attn_out", "attn.hook_z", "attn.hook_q", "attn.hook_k"
SCORES, PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"


@dataclass(frozen=True)
class LastToken:
    """Activations at the last token of each query's prompt, float64 on the CPU."""

    outputs: Float[Tensor, "query d_out"]
    attention_output: Float[Tensor, "layer query d_model"]  # of each attention layer
    z: Float[Tensor, "layer head query d_head"]
    q: Float[Tensor, "layer head query d_head"]
    # for each query, scores (before the softmax) of the query's tokens, whose number differs.
    query_scores: list[Float[Tensor, "layer head _"]]
    pattern: Float[Tensor, "layer head query token"] | None  # attention to the demonstrations' tokens, if requested


class LastTokenReader:
    """Reads the activations of a model, before or after fine-tuning, at the last tokens of prompts."""

    def __init__(self, adapter: ModelAdapter, shots: Shots, *, progress: bool | None = None):
        self.adapter, self.shots, self.progress = adapter, shots, progress
        self.layers = range(adapter.n_layers)
        for layer in self.layers:
            for hook in (OUTPUT, MOVED, SCORES, PATTERN, QUERY):
                check_hook(adapter.model, f"blocks.{layer}.{hook}")
        check_lengths(adapter.model, (*shots.zero_shot, *shots.in_context, *shots.examples))
        self.multiplies = self._scores_are_weights()

    def read(self, prompts: Sequence[Tensor], tuned: FineTuned | None = None, *, pattern: bool = False) -> LastToken:
        """Read the activations at the last token of the queries' prompts, and if requested the attention pattern."""
        lengths = self.shots.query_lengths
        parts: dict[str, Any] = {OUTPUT: np.s_[:, -1], MOVED: np.s_[:, -1], QUERY: np.s_[:, -1]}
        if pattern:
            parts[PATTERN] = np.s_[:, :, -1, self.shots.demonstration_positions()]
        by_query: dict[int, dict[str, Tensor]] = {}
        for index, tokens in self._batches(prompts):
            longest = max(lengths[i] for i in index)
            scores = {KEY: np.s_[:, -longest:]} if self.multiplies else {SCORES: np.s_[:, :, -1, -longest:]}
            outputs, activations = self._run(tokens, parts | scores, tuned)
            for row, i in enumerate(index):
                by_query[i] = {name: activation[row] for name, activation in activations.items()}
                by_query[i]["outputs"] = outputs[row].cpu()
        queries = [by_query[i] for i in range(len(prompts))]
        for query in queries if self.multiplies else ():
            keys = query[KEY].repeat_interleave(query[QUERY].shape[1] // query[KEY].shape[2], dim=2)
            query[SCORES] = einsum(query[QUERY], keys, "layer head d, layer token head d -> layer head token")

        def stacked(name: str) -> Tensor:
            return torch.stack([query[name] for query in queries], dim=-2)

        return LastToken(
            outputs=torch.stack([query["outputs"] for query in queries]),
            attention_output=stacked(OUTPUT),
            z=stacked(MOVED),
            q=stacked(QUERY),
            query_scores=[query[SCORES][..., -length:] for query, length in zip(queries, lengths, strict=True)],
            pattern=stacked(PATTERN) if pattern else None,
        )

    def implied_attention(
        self, last: LastToken, tuned: FineTuned | None = None
    ) -> Float[Tensor, "layer head query token"]:
        """Multiply the query vectors that were read with those of the demonstrations' tokens in the same model.

        The effect of tuning on a token on another's attention grows with this (Dai et al. 2023, section 4.6).
        """
        by_example: dict[int, Tensor] = {}
        for index, tokens in self._batches(self.shots.examples):  # each demonstration is read alone
            _, activations = self._run(tokens, {QUERY: np.s_[:]}, tuned)
            for row, i in enumerate(index):
                _, number = self.shots.example_spans[i]
                by_example[i] = activations[QUERY][row][:, -number:].transpose(1, 2)
        of_examples = torch.cat([by_example[i] for i in range(len(by_example))], dim=2)
        return einsum(last.q, of_examples, "layer head query d, layer head token d -> layer head query token")

    def _scores_are_weights(self) -> bool:
        """True if the hook for scores has weights after the softmax, as some bridges' does.

        Scores are then computed as products of queries and keys, since a cosine does not depend on their scale; a
        ValueError where positions change the scores in a way that these products lack.
        """
        last_rows = {SCORES: np.s_[:, :, -1], PATTERN: np.s_[:, :, -1]}
        _, activations = self._run(self.shots.in_context[0][None], last_rows, None)
        scores, weights = activations[SCORES][:, 0], activations[PATTERN][:, 0]
        cfg = self.adapter.model.cfg
        softmax = getattr(cfg, "attention", "softmax") == "softmax"
        if not softmax or scores.shape[-1] == 1 or not torch.equal(scores, weights):
            return False
        if getattr(cfg, "positional_embedding_type", "standard") != "standard":
            raise ValueError(f"blocks.0.{SCORES} has weights in this model, not scores before the softmax")
        return True

    def _batches(self, prompts: Sequence[Tensor]) -> Any:
        with progress_bar(total=len(prompts), unit="prompt", progress=self.progress) as bar:
            for index, tokens in equal_length_batches(self.adapter.model, prompts):
                yield index, tokens
                bar.update(len(index))

    def _run(self, tokens: Tensor, parts: Mapping[str, Any], tuned: FineTuned | None) -> tuple[Tensor, Weights]:
        by_layer = {f"blocks.{layer}.{name}": part for layer in self.layers for name, part in parts.items()}
        changes, linearized = (None, False) if tuned is None else (tuned.changes, tuned.linearized)
        outputs, activations = run_with_changes(
            self.adapter, self.adapter.encode(tokens), by_layer, changes, linearized=linearized
        )
        return outputs, {
            name: torch.stack([activations[f"blocks.{layer}.{name}"] for layer in self.layers], 1).cpu().double()
            for name in parts
        }
