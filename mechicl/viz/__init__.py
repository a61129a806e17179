"""Figures of results: `plot` draws any of them, and the function of each kind of figure has its options.

>>> viz.plot(align(model, AlgorithmLearner(algorithms.ols), prompts))
>>> viz.head_table(score_heads(model, prompts=prompts), "Heads of gpt2-8l")
>>> viz.prompt_attention(model, prompts[:1], layer=2)
"""

from typing import TYPE_CHECKING, Any

from mechicl.viz.attention import attention_figure, prompt_attention
from mechicl.viz.behaviour import shifted_losses
from mechicl.viz.causes import causal_graph, counterfactual_scatter
from mechicl.viz.circuits import circuit_graph
from mechicl.viz.elements import interval_lines
from mechicl.viz.export import init_notebook, save
from mechicl.viz.grids import lines, phase_diagram
from mechicl.viz.interventions import composition_figure, head_table, patching_grid
from mechicl.viz.results import plot
from mechicl.viz.training import (
    alignments_over_training,
    head_similarity_figure,
    learning_coefficients,
    losses_over_training,
    map_similarity_figure,
    settings_figure,
    training_history,
    update_similarity_figure,
)
from mechicl.viz.weights import connectivity_paths, weight_products_figure

if TYPE_CHECKING:
    from mechicl.viz.explorer import PatchingExplorer

__all__ = [
    "PatchingExplorer", "alignments_over_training", "attention_figure", "causal_graph", "circuit_graph",
    "composition_figure", "connectivity_paths", "counterfactual_scatter", "head_similarity_figure", "head_table",
    "init_notebook", "interval_lines", "learning_coefficients", "lines",
    "losses_over_training", "map_similarity_figure", "patching_grid", "phase_diagram", "plot", "prompt_attention",
    "save", "settings_figure", "shifted_losses", "training_history", "update_similarity_figure",
    "weight_products_figure",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the widget, which needs an extra, when it is first named."""
    if name == "PatchingExplorer":
        from mechicl.viz.explorer import PatchingExplorer

        return PatchingExplorer
    raise AttributeError(f"module 'mechicl.viz' has no attribute {name!r}")
