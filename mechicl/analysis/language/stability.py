"""How stable a ranking of heads, a circuit, or any other selection is over prompts, seeds and thresholds."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits import Circuit
from mechicl.base.annotations import described
from mechicl.base.arguments import Count, calling, checked
from mechicl.base.progress import progress_bar
from mechicl.statistics import Interval, Result, interval
from mechicl.statistics.results import largest


@dataclass(frozen=True, eq=False)
class Stability(Result):
    """Selections over repeated draws, and how much they overlap; see `stability`.

    Attributes:
        selections: the selected items of each draw, as text, best first if they have scores.
        jaccard: for each draw the mean Jaccard index with the other draws.
    """

    selections: tuple[tuple[str, ...], ...]
    jaccard: Float[Tensor, " draw"]

    def mean(self, level: float = 0.95) -> Interval:
        """Return the mean Jaccard index over pairs of draws, with its jackknife interval over draws; NaN for two."""
        n, others = len(self.jaccard), self.jaccard.double()
        if n < 3:
            return interval(others[:1], level)
        # each draw is in n - 1 pairs, so leaving it out moves the mean by about twice its share
        return interval(others.mean() + 2 * (n - 1) / (n - 2) * (others - others.mean()), level, within=(0, 1))

    def frequencies(self) -> pd.DataFrame:
        """Return how often each item was selected, as a share of the draws, most frequent first."""
        counts = Counter(item for selection in self.selections for item in selection)
        rows = [(item, n / len(self.selections)) for item, n in counts.most_common()]
        return pd.DataFrame(rows, columns=["item", "share"])


@checked
def stability(
    find: Callable[[Any], Any], draws: Iterable[Any], *, top: Count | None = 10, progress: bool | None = None
) -> Stability:
    """Repeat an analysis on several draws and measure how much its selections overlap.

    Shows whether a circuit, or the best heads, depend on the prompts, seeds or thresholds.

    Args:
        find: function of a draw that returns scores `[layer head]` or of any other shape (the `top` largest are the
            selection; a tensor or array), a `Circuit` (its edges are), or a collection of hashable items.
        draws: arguments of `find`, one for each repetition: prompts, seeds, thresholds.
        top: number of scores that are selected; not used for circuits and collections, for which it may be None.

    Returns:
        A `Stability`: `mean()` is the mean Jaccard index (items in both draws divided by items in either: 1 if all
        draws agree, 0 if none share an item); `frequencies()` has the share of draws that selected each item.

    Example:
        >>> found = function_vectors(language, "antonyms")
        >>> resamples = [torch.randint(32, (32,)) for _ in range(10)]
        >>> print(stability(lambda rows: found.indirect_effects[..., rows].mean(-1), resamples).mean())
    """
    draws = list(draws)
    if len(draws) < 2:
        raise ValueError(f"draws must be at least two, got {len(draws)}")
    selections = []
    for draw in progress_bar(draws, unit="draw", progress=progress):
        with calling("find"):
            found = find(draw)
        selections.append(_selected(found, top))
    pairs = torch.ones(len(draws), len(draws))
    for i, j in itertools.permutations(range(len(draws)), 2):
        first, second = set(selections[i]), set(selections[j])
        pairs[i, j] = len(first & second) / len(first | second) if first | second else 1.0
    others = (pairs.sum(1) - 1) / (len(draws) - 1)
    named = [[".".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in s] for s in selections]
    return Stability(tuple(map(tuple, named)), others)


def _selected(found: Any, top: int | None) -> list[Hashable]:
    if isinstance(found, Circuit):
        return list(found.edges)
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found)
    if not isinstance(found, Iterable) or isinstance(found, Mapping):
        raise TypeError(f"find must return scores, a Circuit or a collection, got {described(found)}")
    if not isinstance(found, Tensor):
        return list(found)
    if top is None:
        raise ValueError("top must be a number if find returns scores, got None")
    if found.isnan().any() or top >= found.numel():
        raise ValueError(f"find must return more than top={top} scores without NaN, got {described(found)}")
    return [tuple(map(int, np.unravel_index(i, found.shape))) for i in largest(found, top, "scores of find")[0]]
