"""Pictures of result objects."""

from mechicl.viz.attention import attention_html, model_attention, prompt_attention
from mechicl.viz.circuits import circuit_graph
from mechicl.viz.conditioning import condition_number_distribution, condition_numbers, eigenvalue_map
from mechicl.viz.constructions import connectivity_paths, identified_families, identified_filters
from mechicl.viz.explorer import PatchingExplorer
from mechicl.viz.finetuning import (
    head_similarity_figure,
    map_similarity_figure,
    settings_figure,
    update_similarity_figure,
)
from mechicl.viz.heads import composition_figure, head_table
from mechicl.viz.html import Html, init_notebook
from mechicl.viz.interventions import patching_grid
from mechicl.viz.kernels import adapted_functions_figure, kernel_heatmaps
from mechicl.viz.layers import interval_lines, match_curve, match_heatmap, probe_heatmap
from mechicl.viz.one_layer import (
    alignment_over_training,
    interpolation_paths,
    learning_curves,
    roll_outs,
    shifted_losses,
    weight_products_figure,
)
from mechicl.viz.training import (
    alignments_over_training,
    heads_during_training,
    losses_over_training,
    mean_patterns,
    sensitivity_over_training,
)

__all__ = [
    "Html",
    "PatchingExplorer",
    "adapted_functions_figure",
    "alignment_over_training",
    "alignments_over_training",
    "attention_html",
    "circuit_graph",
    "composition_figure",
    "condition_number_distribution",
    "condition_numbers",
    "connectivity_paths",
    "eigenvalue_map",
    "head_similarity_figure",
    "head_table",
    "heads_during_training",
    "identified_families",
    "identified_filters",
    "init_notebook",
    "interpolation_paths",
    "interval_lines",
    "kernel_heatmaps",
    "learning_curves",
    "losses_over_training",
    "map_similarity_figure",
    "match_curve",
    "match_heatmap",
    "mean_patterns",
    "model_attention",
    "patching_grid",
    "probe_heatmap",
    "prompt_attention",
    "roll_outs",
    "sensitivity_over_training",
    "settings_figure",
    "shifted_losses",
    "update_similarity_figure",
    "weight_products_figure",
]
