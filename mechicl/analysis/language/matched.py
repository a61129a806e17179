"""Ablation of a set of heads against random heads of the same layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.interventions.ablation import Replacement, record_replacements
from mechicl.analysis.interventions.metrics import target_probability
from mechicl.analysis.interventions.patching import make_experiment
from mechicl.base.arguments import Count, checked
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import Site
from mechicl.statistics import Interval, Result, interval
from mechicl.text import WordPrompts

Heads = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class MatchedAblation(Result):
    """Probability of the right answer without some heads, and without random heads; see `ablate_matched`."""

    heads: tuple[tuple[int, int], ...]
    intact: Float[Tensor, " prompt"]
    ablated: Float[Tensor, " prompt"]
    matched: Float[Tensor, "draw prompt"]

    def effect(self, level: float = 0.95) -> Interval:
        """Return how much more probability the heads' ablation costs than that of random heads, with its interval.

        This is the mean over prompts of `matched` (mean over draws) minus `ablated`: above 0 if they matter more.
        """
        return interval(self.matched.mean(0) - self.ablated, level, within=(-1, 1))


@checked(locks=True)
def ablate_matched(
    model: Any,
    prompts: WordPrompts,
    heads: Heads,
    *,
    reference: WordPrompts,
    exclude: Heads = (),
    n_random: Count = 20,
    seed: int = 0,
    progress: bool | None = None,
) -> MatchedAblation:
    """Ablate some heads together, and compare with the same number of random heads in the same layers.

    Outputs of heads are replaced by their means over the reference, at every position. To compare two kinds of heads,
    exclude the heads that are of both kinds: otherwise they decide the comparison (Yin and Steinhardt 2025).

    Args:
        model: a model with hooks, such as `language.model`.
        prompts: few-shot prompts, from `word_prompts`.
        heads: the heads to ablate, as pairs (layer, head).
        reference: prompts with as many tokens, from which the task cannot be learned, such as those with shuffled
            labels. Means over prompts of the task itself would contain the task, so that nothing is lost.
        exclude: heads that are neither ablated nor drawn at random, for example those of another kind.

    Returns:
        Probabilities of the right answer's token: `intact` `[prompt]`, `ablated` without the heads `[prompt]`, and
        `matched` without each random set `[draw prompt]` (in the nearest layers if one has too few heads); `effect()`
        is how much more the heads matter than random ones, with a 95% interval over prompts. Prompts with the same
        query are averaged.

    Example:
        >>> shuffled = word_prompts(language.tokenizer, "antonyms", labels="shuffled")
        >>> result = ablate_matched(language.model, prompts, found.heads, reference=shuffled)
        >>> print(result.effect())
    """
    adapter = ModelAdapter(model, "query")
    n_layers, n_heads = adapter.n_layers, model.cfg.n_heads
    kept = [head for head in dict.fromkeys(heads) if head not in set(exclude)]
    if not kept:
        raise ValueError(f"heads must contain a head that is not excluded, got {list(heads)}")
    for layer, head in kept:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise ValueError(
                f"head {layer}.{head} is not in the model: layers 0 to {n_layers - 1}, heads 0 to {n_heads - 1}"
            )
    generator = torch.Generator().manual_seed(seed)
    sets = [kept] + [_random_set(kept, {*kept, *exclude}, n_layers, n_heads, generator) for _ in range(n_random)]
    tokens = adapter.encode(prompts.ids)
    experiment = make_experiment(adapter, tokens, tokens, target_probability(prompts.targets))
    cells = [tuple(Site("z", layer, head=head) for layer, head in each) for each in sets]
    names = sorted({site.hook_name for cell in cells for site in cell})
    values = record_replacements(experiment, names, Replacement("mean", reference.ids))
    baseline = experiment.run_baseline(len(cells), values)
    with progress_bar(total=len(cells), unit="run", progress=progress) as bar:
        measured = experiment.run_cells(baseline, cells, values, bar.update).values["metric"].cpu()
    intact = experiment.metrics["metric"](baseline.predictions).cpu()
    intact, measured = prompts.by_query(intact), prompts.by_query(measured)
    return MatchedAblation(tuple(kept), intact, measured[0], measured[1:])


def _random_set(
    heads: Heads, taken: set[tuple[int, int]], n_layers: int, n_heads: int, generator: torch.Generator
) -> Heads:
    free = {(layer, head) for layer in range(n_layers) for head in range(n_heads)} - taken
    if len(free) < len(heads):
        raise ValueError(f"the model has {len(free)} other heads to draw {len(heads)} from: ablate fewer heads")
    drawn: list[tuple[int, int]] = []
    for layer, _ in heads:
        nearest = min(abs(other - layer) for other, _ in free)
        choices = sorted(head for head in free if abs(head[0] - layer) == nearest)
        chosen = choices[int(torch.randint(len(choices), (1,), generator=generator))]
        drawn.append(chosen)
        free.remove(chosen)
    return drawn
