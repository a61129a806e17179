"""Regression as text, so that a language model can be compared with learning algorithms."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.interventions.runs import rows_at_once
from mechicl.base.arguments import Positive, checked
from mechicl.base.memory import Budget
from mechicl.interop import LanguageModel
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.suffix_runs import fork_cache
from mechicl.prompts import Prompts
from mechicl.prompts.tokens import ids_after, own_ids, start_ids


class TextLearner:
    """A language model as a learner: it reads points as text and predicts the query's target from next-token logits.

    Numbers are written as integers from 00 to 99: -bound is 00, bound is 99, and values beyond are clipped. With two
    inputs a prompt reads "17 80 -> 63\\n", and so on for each point; it ends with the query and "->". The prediction is
    the mean of all outputs that could follow. Each is weighted by the probabilities of its tokens, among the tokens
    that continue some output. Predictions have no gradients, so `identify` compares them by distance alone. Source: the
    format follows Vacareanu et al. 2024, "From words to numbers".

    Args:
        language: a language model with its tokenizer, from `load_language_model`.
        x_bound: largest absolute value of the inputs.
        y_bound: largest absolute value of the targets.

    Example:
        >>> learner = TextLearner(load_language_model("HuggingFaceTB/SmolLM2-135M"), x_bound=0.5, y_bound=1.5)
        >>> identify(learner, LinearRegression(x_dim=1, n_context=16), n_prompts=64).to_dataframe()
    """

    @checked
    def __init__(self, language: LanguageModel, *, x_bound: Positive = 3.0, y_bound: Positive = 3.0):
        self.language, self.x_bound, self.y_bound = language, x_bound, y_bound
        self.outputs = {f"{i:02d}": y_bound * (i / 49.5 - 1) for i in range(100)}

    @checked
    def write(self, prompts: Prompts) -> list[str]:
        """Return the text of each prompt as the model gets it; it ends before the query's target."""
        if prompts.y_dim != 1:
            raise ValueError(f"targets must have one dimension to be written as text, got {prompts.y_dim}")
        texts = []
        for xs, ys in zip(prompts.xs.tolist(), prompts.ys[..., 0].tolist(), strict=True):
            inputs = [" ".join(_written(x, self.x_bound) for x in point) + " ->" for point in xs]
            lines = [f"{point} {_written(y, self.y_bound)}\n" for point, y in zip(inputs[:-1], ys[:-1], strict=True)]
            texts.append("".join(lines) + inputs[-1])
        return texts

    @torch.no_grad()
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the mean of all outputs for the query, weighted by their probabilities under the model."""
        texts, start = self.write(prompts), start_ids(self.language.tokenizer)
        ids = [own_ids(self.language.tokenizer, text) for text in texts]
        alike: dict[Any, list[int]] = defaultdict(list)  # prompts of one length with the same tokens for all outputs
        for row, text in enumerate(texts):
            alike[len(ids[row]), self._endings(text, ids[row])].append(row)
        means = torch.empty(len(texts), dtype=torch.float64)
        for (_, endings), rows in alike.items():
            shares = self._shares(torch.tensor([start + ids[row] for row in rows]), endings)
            means[rows] = shares @ torch.tensor(list(self.outputs.values()), dtype=torch.float64)
        return means[:, None].to(prompts.xs)

    def _endings(self, text: str, ids: list[int]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each output after a text, which has these ids."""
        name, endings = self.language.name, []
        continued = [f"{text} {output}" for output in self.outputs]
        for output, whole in zip(self.outputs, own_ids(self.language.tokenizer, continued), strict=True):
            if not (ending := tuple(ids_after(ids, whole))):
                raise ValueError(f"the tokenizer of {name} merges {output!r} with the text before it")
            endings.append(ending)
        beginnings = {ending[:n] for ending in endings for n in range(1, len(ending))}
        if len(set(endings)) < len(endings) or beginnings & set(endings):
            raise ValueError(f"with the tokenizer of {name}, one output is the beginning of another")
        return tuple(endings)

    def _shares(
        self, ids: Int[Tensor, "prompt pos"], endings: Sequence[tuple[int, ...]]
    ) -> Float[Tensor, "prompt output"]:
        """Return the probability of each output: the product of its tokens', each among those of some output there."""
        adapter, parts = ModelAdapter(self.language.model, "query"), []
        ids, longest = adapter.encode(ids), max(map(len, endings))
        beginnings = dict.fromkeys(ending[:n] for n in range(longest) for ending in endings if n < len(ending))
        for part in ids.split(rows_at_once(adapter, ids, Budget())):
            shares = torch.ones(len(part), len(endings), dtype=torch.float64)
            for beginning, logits in run_continued(adapter, part, beginnings):
                n = len(beginning)
                next_tokens = {i: ending[n] for i, ending in enumerate(endings) if ending[:n] == beginning}
                tokens, place = torch.tensor([*next_tokens.values()]).unique(return_inverse=True)
                shares[:, [*next_tokens]] *= logits[:, tokens.to(logits.device)].double().cpu().softmax(-1)[:, place]
            parts.append(shares)
        return torch.cat(parts)


def run_continued(
    adapter: ModelAdapter, ids: Int[Tensor, "prompt pos"], continuations: Iterable[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "prompt vocab"]]]:
    """Yield continuations with the logits after texts and them; texts' keys and values are cached if the model can."""
    alone, cache = adapter.run_cached(ids) if adapter.caches else (adapter.run(ids), None)
    for tokens in continuations:
        more = torch.tensor(tokens).to(ids).expand(len(ids), -1)
        if not tokens:
            yield tokens, alone
        elif (fork := fork_cache(cache)) is None:
            yield tokens, adapter.run(torch.cat([ids, more], dim=1))
        else:
            yield tokens, adapter.run(more, cache=fork)


def _written(value: float, bound: float) -> str:
    return f"{min(max(round((value / bound + 1) * 49.5), 0), 99):02d}"
