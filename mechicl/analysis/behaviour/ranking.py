"""Which of several families of algorithms comes nearest to each layer, each by its best step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.matching import Match
from mechicl.base.arguments import checked
from mechicl.statistics import Interval, Result, interval


@dataclass(frozen=True, eq=False)
class FamilyRanking(Result):
    """How near the best step of each family comes to each layer, on other prompts than those that chose the step.

    Attributes:
        families: names, in the order of the first axis.
        rows: the layers.
        steps: the chosen steps, by family one a layer.
        similarities: `[family row prompt]`; NaN where one is not defined.
    """

    families: tuple[str, ...]
    rows: tuple[float, ...]
    steps: tuple[tuple[float, ...], ...]
    similarities: Float[Tensor, "family row prompt"]

    def minus(self, family: str, other: str) -> list[Interval]:
        """By layer, how much nearer one family's best step is than another's, with an interval over prompts."""
        a, b = (self.similarities[self._index(name)] for name in (family, other))
        return [interval(difference[difference.isfinite()]) for difference in a - b]

    def nearest(self, row: float) -> list[str]:
        """The families that come nearest to a layer: first the one that does, then those that are as near.

        As near is whose difference from the first, prompt by prompt, has an interval that covers 0.
        """
        if row not in self.rows:
            raise ValueError(f"no row {row}; there are {list(self.rows)}")
        i = self.rows.index(row)
        means = self.similarities[:, i].nanmean(-1).nan_to_num(-2.0).tolist()
        order = sorted(self.families, key=lambda name: -means[self._index(name)])
        return [name for name in order if name == order[0] or self.minus(order[0], name)[i].low <= 0]

    def _index(self, family: str) -> int:
        if family not in self.families:
            raise ValueError(f"no family {family!r}; there are {list(self.families)}")
        return self.families.index(family)


@checked
def rank_families(matches: Mapping[str, Match]) -> FamilyRanking:
    """How near families of algorithms come to each layer, by the steps that are best on every other prompt.

    A family with more steps to choose from has no advantage: its similarity is measured on the prompts that did not
    choose.

    Args:
        matches: of one model's layers with each family, on the same prompts, by the family's name.

    Example:
        >>> families = {"Newton": newton, "ridge path": ridge_path}
        >>> ranking = rank_families({name: match(readouts, each, prompts) for name, each in families.items()})
        >>> ranking.minus("Newton", "ridge path")[3], ranking.nearest(3)
    """
    if not matches:
        raise ValueError("rank_families() needs at least one match")
    first = next(iter(matches.values()))
    shape = (first.rows, first.similarity, first.similarities.shape[-1])
    for name, each in matches.items():
        if (each.rows, each.similarity, each.similarities.shape[-1]) != shape:
            raise ValueError(f"the match with {name!r} is of other layers, prompts or similarities than the first one")
    steps, similarities = [], []
    for each in matches.values():
        choosing, measured = each.halves()
        columns = choosing.best_columns()
        steps.append(tuple(each.columns[column] for column in columns))
        similarities.append(measured.similarities[torch.arange(len(each.rows)), torch.tensor(columns)])
    return FamilyRanking(tuple(matches), first.rows, tuple(steps), torch.stack(similarities))
