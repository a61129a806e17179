"""Analyses: they take learners and return result objects of per-prompt tensors; nothing is averaged before you ask."""

from mechicl.analysis.behaviour.algorithm_families import tuned_descent
from mechicl.analysis.behaviour.alignment import Alignment, align, sensitivities
from mechicl.analysis.behaviour.context_use import (
    Forgetting,
    OrderSensitivity,
    OutsideSpan,
    measure_forgetting,
    measure_order_sensitivity,
    measure_outside_span,
)
from mechicl.analysis.behaviour.growth import Growth, fit_growth
from mechicl.analysis.behaviour.identification import FamilyMatch, Identification, identify
from mechicl.analysis.behaviour.induced_weights import induced_weights, regressed_weights
from mechicl.analysis.behaviour.matching import BestMatch, Match, match
from mechicl.analysis.behaviour.shifts import FOREIGN_INPUTS, ShiftedLosses, measure_shifted_losses
from mechicl.analysis.behaviour.similarity import similarity_of_errors, similarity_of_weights
from mechicl.analysis.behaviour.spectral import SpectralLearner
from mechicl.analysis.dynamics.snapshots import (
    AlignmentOverTraining,
    HeadsOverTraining,
    align_over_training,
    score_heads_over_training,
)
from mechicl.analysis.dynamics.transitions import Transitions, find_transitions
from mechicl.analysis.finetuning import (
    FineTuned,
    FineTuning,
    FineTuningComparison,
    TaskStudy,
    TaskTexts,
    TuningSearch,
    attention_rank_correlation,
    compare_on_prompts,
    compare_with_finetuning,
    draw_texts,
    fine_tune,
    linearized_outputs,
    measure_accuracy,
    prompt_shots,
    random_update_similarity,
    recall_of_gains,
    search_on_prompts,
    search_tuning,
    study_task,
    update_similarity,
)
from mechicl.analysis.heads.composition import composition_scores, prefix_matching_scores
from mechicl.analysis.heads.dual_form import DualForm, read_dual_form
from mechicl.analysis.heads.scores import HeadScores, score_heads
from mechicl.analysis.heads.target_copying import (
    TargetCopying,
    TokenSensitivity,
    measure_target_copying,
    measure_token_sensitivity,
)
from mechicl.analysis.interventions import (
    Circuit,
    Edge,
    Node,
    Sweep,
    ablate,
    attribute,
    correlate_effects,
    corrupt,
    corrupt_tokens,
    distance_to,
    find_circuit,
    logit_difference,
    measure_circuit,
    next_token_loss,
    patch,
    patch_paths,
    squared_error,
)
from mechicl.analysis.interventions.session import PatchingSession, SessionResult
from mechicl.analysis.layers.layer_learners import LayerErrors, Lens
from mechicl.analysis.layers.probes import (
    ProbeResult,
    cross_moments,
    gradient_descent_weights,
    newton_weights,
    ols_weights,
    probe,
    second_moments,
)
from mechicl.analysis.layers.readouts import Readouts, fit_readouts, train_readouts
from mechicl.analysis.weights.adaptation import adapted_functions
from mechicl.analysis.weights.closed_forms import (
    OneStepOptimum,
    linear_attention_optimum,
    one_step_optimum,
    preconditioned_gd_optimum,
)
from mechicl.analysis.weights.conditioning import (
    Conditioning,
    EigenvalueRange,
    measure_conditioning,
    transformed_eigenvalues,
)
from mechicl.analysis.weights.connectivity import ModeConnectivity, connect_modes
from mechicl.analysis.weights.construction_families import FamilyName
from mechicl.analysis.weights.fits import ConstructionFit, Members, fit_construction
from mechicl.analysis.weights.kernels import (
    KernelView,
    PredictionParts,
    initial_function,
    view_kernel,
)
from mechicl.analysis.weights.paths import LossPath, WeightCurve, interpolate
from mechicl.analysis.weights.products import WeightProducts, read_weight_products, replace_products
from mechicl.analysis.weights.rollout import repeat_layers
from mechicl.analysis.weights.symmetries import align_heads, lift_heads, rescale_heads
from mechicl.models.sites import Site

__all__ = [
    "FOREIGN_INPUTS",
    "Alignment",
    "AlignmentOverTraining",
    "BestMatch",
    "Circuit",
    "Conditioning",
    "ConstructionFit",
    "DualForm",
    "Edge",
    "EigenvalueRange",
    "FamilyMatch",
    "FamilyName",
    "FineTuned",
    "FineTuning",
    "FineTuningComparison",
    "Forgetting",
    "Growth",
    "HeadScores",
    "HeadsOverTraining",
    "Identification",
    "KernelView",
    "LayerErrors",
    "Lens",
    "LossPath",
    "Match",
    "Members",
    "ModeConnectivity",
    "Node",
    "OneStepOptimum",
    "OrderSensitivity",
    "OutsideSpan",
    "PatchingSession",
    "PredictionParts",
    "ProbeResult",
    "Readouts",
    "SessionResult",
    "ShiftedLosses",
    "Site",
    "SpectralLearner",
    "Sweep",
    "TargetCopying",
    "TaskStudy",
    "TaskTexts",
    "TokenSensitivity",
    "Transitions",
    "TuningSearch",
    "WeightCurve",
    "WeightProducts",
    "ablate",
    "adapted_functions",
    "align",
    "align_heads",
    "align_over_training",
    "attention_rank_correlation",
    "attribute",
    "compare_on_prompts",
    "compare_with_finetuning",
    "composition_scores",
    "connect_modes",
    "correlate_effects",
    "corrupt",
    "corrupt_tokens",
    "cross_moments",
    "distance_to",
    "draw_texts",
    "find_circuit",
    "find_transitions",
    "fine_tune",
    "fit_construction",
    "fit_growth",
    "fit_readouts",
    "gradient_descent_weights",
    "identify",
    "induced_weights",
    "initial_function",
    "interpolate",
    "lift_heads",
    "linear_attention_optimum",
    "linearized_outputs",
    "logit_difference",
    "match",
    "measure_accuracy",
    "measure_circuit",
    "measure_conditioning",
    "measure_forgetting",
    "measure_order_sensitivity",
    "measure_outside_span",
    "measure_shifted_losses",
    "measure_target_copying",
    "measure_token_sensitivity",
    "newton_weights",
    "next_token_loss",
    "ols_weights",
    "one_step_optimum",
    "patch",
    "patch_paths",
    "preconditioned_gd_optimum",
    "prefix_matching_scores",
    "probe",
    "prompt_shots",
    "random_update_similarity",
    "read_dual_form",
    "read_weight_products",
    "recall_of_gains",
    "regressed_weights",
    "repeat_layers",
    "replace_products",
    "rescale_heads",
    "score_heads",
    "score_heads_over_training",
    "search_on_prompts",
    "search_tuning",
    "second_moments",
    "sensitivities",
    "similarity_of_errors",
    "similarity_of_weights",
    "squared_error",
    "study_task",
    "train_readouts",
    "transformed_eigenvalues",
    "tuned_descent",
    "update_similarity",
    "view_kernel",
]
