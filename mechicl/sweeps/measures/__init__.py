"""What a sweep can measure of a model: functions of a checkpoint that holds one, which return numbers by name.

All take held-out prompts of a fixed seed, the same for every model.
"""

from collections.abc import Callable, Mapping

from mechicl.base.arguments import check_arguments
from mechicl.checkpoints import Checkpoint
from mechicl.sweeps.measures.copying import target_copying
from mechicl.sweeps.measures.general import alignment, identified, loss, mean_regret, transition
from mechicl.sweeps.measures.one_model import Measured
from mechicl.sweeps.measures.pools import compare_on_pool, fit_mixture, pool_distances
from mechicl.sweeps.measures.regression import descent_limits, gap_to_descent
from mechicl.sweeps.measures.tokens import markov_phases

Measure = Callable[[Checkpoint], Measured]
MEASURES: Mapping[str, Measure] = {
    "loss": loss,
    "regret": mean_regret,
    "alignment": alignment,
    "identify": identified,
    "transition": transition,
    "pool": pool_distances,
    "depth": descent_limits,
    "descent": gap_to_descent,
    "markov": markov_phases,
    "copying": target_copying,
}
"""Measures by name, for `mechicl sweep --measure`."""

__all__ = [
    "MEASURES", "alignment", "compare_on_pool", "descent_limits", "fit_mixture", "gap_to_descent", "identified", "loss",
    "markov_phases", "mean_regret", "pool_distances", "target_copying", "transition",
]  # fmt: skip

check_arguments(__name__)
