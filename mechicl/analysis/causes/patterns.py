"""Exchange the query's attention patterns, or its addresses, between prompts: what acts only through them?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.analysis.causes.interchange import check_ends, check_shapes
from mechicl.base.arguments import Natural, checked
from mechicl.base.memory import Budget
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.stream_runs import tokens_per_point
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval


@dataclass(frozen=True, eq=False)
class PatternExchange(Result):
    """Predictions where the query attends as on another prompt; see `exchange_patterns`.

    Attributes:
        predictions: with the sources' attention patterns or addresses, and everything else from the prompts,
            `[y prompt]`.
        own: the model's predictions on the prompts, `[y prompt]`.
        others: its predictions on the sources, `[y prompt]`.
    """

    predictions: Float[Tensor, "y prompt"]
    own: Float[Tensor, "y prompt"]
    others: Float[Tensor, "y prompt"]

    def distances(self) -> dict[str, Float[Tensor, "prompt"]]:
        """Return squared distances of each prompt, exchanged "from own" and "from other", and "between" these two."""
        return {
            "from own": (self.predictions - self.own).square().sum(0),
            "from other": (self.predictions - self.others).square().sum(0),
            "between": (self.others - self.own).square().sum(0),
        }

    @property
    def from_own(self) -> Interval:
        """Mean squared distance from the own prediction, relative to that of the source: 0 without an effect."""
        return self._relative("from own")

    @property
    def from_other(self) -> Interval:
        """Mean squared distance from the source's prediction, relative to that between both ends."""
        return self._relative("from other")

    def _relative(self, name: str) -> Interval:
        distances = self.distances()
        return ratio_interval(distances[name], distances["between"])

    def _lines(self) -> list[tuple[str, str]]:
        return [(f"distance {name}", str(self._relative(name))) for name in ("from own", "from other")]


@checked(locks=True)
@torch.no_grad()
def exchange_patterns(
    model: Any,
    prompts: Prompts,
    sources: Prompts,
    *,
    layers: Sequence[Natural] | None = None,
    component: Literal["pattern", "q"] = "pattern",
) -> PatternExchange:
    """Exchange where the last point (the query) attends, to see through what its input and the context act.

    The last point's rows of the attention patterns come from a run on other prompts, the sources. Streams, keys and
    values are the prompt's own, and so are the patterns of all other tokens. With `component="q"` its query vectors
    come from the sources instead, and meet the prompt's own keys.

    Args:
        model: any model with hooks on attention patterns that reads prompts of points.
        prompts: the prompts to run on, two or more.
        sources: prompts of the same shape that patterns come from. What differs in them is what is tested:
            `prompts.with_query(other_xs)` differs in the query, `Prompts(prompts.xs, other_ys)` in the targets, and
            `sample_sources(task, prompts, seed=...)` in the context.
        layers: layers whose patterns are exchanged, all by default.
        component: "pattern" to exchange where the query attends, "q" to exchange the query vectors it attends by.

    Returns:
        A `PatternExchange`: a `from_own` of 0 means that the exchange has no effect, a `from_other` of 0 that it makes
        the prediction that on the sources.

    Raises:
        ValueError: the model predicts the same for all prompts and their sources, or not only finite numbers.

    Example:
        >>> model = constructions.gradient_descent(x_dim=5, n_context=20, step_size=0.14, steps=3)
        >>> task = LinearRegression(x_dim=5, n_context=20)
        >>> prompts, others = (task.sample(64, seed=seed, dtype=torch.float64) for seed in (0, 1))
        >>> exchange = exchange_patterns(model, prompts, prompts.with_query(others.query.xs))
        >>> exchange.from_other.mean < 1e-12  # the query's x acts only through where it attends
        True
    """
    adapter = ModelAdapter(model)
    tokens_per_point(model)  # raises TypeError for models that do not read points
    check_shapes(prompts, sources)
    chosen = range(adapter.n_layers) if layers is None else layers
    if not set(chosen) <= set(range(adapter.n_layers)):
        raise ValueError(f"layers must be some of 0 to {adapter.n_layers - 1}, got {list(chosen)}")
    names = [get_act_name(component, layer) for layer in chosen]
    trial = adapter.encode(prompts[:1])
    check_edits(adapter, trial, names)
    recorded = sum(value.nbytes for value in adapter.record(trial, names, 1).values())
    rows = Budget().holding(adapter.bytes_of_products).rows(adapter.bytes_per_row(trial) + recorded, at_most=512)
    parts = []
    positions = 2 if component == "pattern" else 1  # the axis of the positions that attend
    for each in zip(prompts.split(rows), sources.split(rows), strict=True):
        tokens, others = map(adapter.encode, each)
        recorded_parts = adapter.record(others, names, len(others))
        hooks = [(name, partial(_put, values=recorded_parts[name], axis=positions)) for name in names]
        parts.append([adapter.run(tokens, hooks), adapter.run(tokens), adapter.run(others)])
    predictions, own, others = (torch.cat(each).double().cpu().T for each in zip(*parts, strict=True))
    check_ends(own.T, others.T)
    return PatternExchange(predictions, own, others)


def _put(activation: Tensor, hook: HookPoint, values: Tensor, axis: int) -> Tensor:
    return activation.select_scatter(values.select(axis, -1), axis, -1)
