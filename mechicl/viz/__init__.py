"""Pictures of results: `plot` draws any of them, and the function of each kind of picture has its options.

>>> viz.plot(align(model, AlgorithmLearner(algorithms.ols), prompts))
>>> viz.head_table(score_heads(model, prompts=prompts), "Heads of gpt2-8l")
>>> viz.prompt_attention(model, prompts[:1], layer=2)
"""

from mechicl.base.arguments import check_arguments
from mechicl.viz.attention import attention_html, model_attention, prompt_attention
from mechicl.viz.attention_grid import attention_figure, mean_patterns
from mechicl.viz.behaviour import identified_families, identified_filters, shifted_losses
from mechicl.viz.causes import causal_graph, counterfactual_scatter, hypotheses_ranked, interchange_heatmap
from mechicl.viz.circuit_curves import edge_ranking, faithfulness_curves
from mechicl.viz.circuits import circuit_differences, circuit_graph
from mechicl.viz.conditioning import condition_number_distribution, condition_numbers, eigenvalue_map
from mechicl.viz.elements import interval_lines
from mechicl.viz.explorer import PatchingExplorer
from mechicl.viz.export import save
from mechicl.viz.finetuning import (
    head_similarity_figure,
    map_similarity_figure,
    settings_figure,
    update_similarity_figure,
)
from mechicl.viz.grids import lines, phase_diagram
from mechicl.viz.heads import composition_figure, head_table
from mechicl.viz.html import Html, init_notebook
from mechicl.viz.interventions import patching_grid
from mechicl.viz.kernels import adapted_functions_figure, kernel_heatmaps
from mechicl.viz.layers import match_curve, match_heatmap, probe_heatmap
from mechicl.viz.results import plot
from mechicl.viz.subspaces import subspace_curves
from mechicl.viz.training import (
    alignments_over_training,
    heads_during_training,
    losses_over_training,
    sensitivity_over_training,
)
from mechicl.viz.weights import connectivity_paths, roll_outs, weight_products_figure

__all__ = [
    "Html",
    "PatchingExplorer",
    "adapted_functions_figure",
    "alignments_over_training",
    "attention_figure",
    "attention_html",
    "causal_graph",
    "circuit_differences",
    "circuit_graph",
    "composition_figure",
    "condition_number_distribution",
    "condition_numbers",
    "connectivity_paths",
    "counterfactual_scatter",
    "edge_ranking",
    "eigenvalue_map",
    "faithfulness_curves",
    "head_similarity_figure",
    "head_table",
    "heads_during_training",
    "hypotheses_ranked",
    "identified_families",
    "identified_filters",
    "init_notebook",
    "interchange_heatmap",
    "interval_lines",
    "kernel_heatmaps",
    "lines",
    "losses_over_training",
    "map_similarity_figure",
    "match_curve",
    "match_heatmap",
    "mean_patterns",
    "model_attention",
    "patching_grid",
    "phase_diagram",
    "plot",
    "probe_heatmap",
    "prompt_attention",
    "roll_outs",
    "save",
    "sensitivity_over_training",
    "settings_figure",
    "shifted_losses",
    "subspace_curves",
    "update_similarity_figure",
    "weight_products_figure",
]

check_arguments(__name__)
