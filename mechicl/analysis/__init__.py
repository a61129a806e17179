"""Analyses: they take learners and return result objects of per-prompt tensors; nothing is averaged before you ask."""

from mechicl.analysis.algorithm_families import tuned_descent
from mechicl.analysis.alignment import Alignment, align, sensitivities
from mechicl.analysis.closed_forms import (
    OneStepOptimum,
    linear_attention_optimum,
    one_step_optimum,
    preconditioned_gd_optimum,
)
from mechicl.analysis.conditioning import Conditioning, EigenvalueRange, conditioning, transformed_eigenvalues
from mechicl.analysis.connectivity import Curve, ModeConnectivity, Path, interpolate, mode_connectivity
from mechicl.analysis.construction_families import FamilyName
from mechicl.analysis.context_use import (
    Forgetting,
    OrderSensitivity,
    OutsideSpan,
    forgetting,
    order_sensitivity,
    outside_span,
)
from mechicl.analysis.copying import Copying, TokenSensitivity, copying, token_sensitivity
from mechicl.analysis.dual_form import DualForm, dual_form
from mechicl.analysis.finetuning import (
    FineTuned,
    FineTuning,
    FineTuningComparison,
    TuningSearch,
    attention_rank_correlation,
    compare_on_prompts,
    compare_with_finetuning,
    fine_tune,
    linearized_outputs,
    prompt_shots,
    random_update_similarity,
    recall_of_gains,
    search_tuning,
    update_similarity,
)
from mechicl.analysis.fits import ConstructionFit, Members, fit_construction
from mechicl.analysis.growth import Growth, fit_growth
from mechicl.analysis.head_circuits import composition_scores, prefix_matching
from mechicl.analysis.heads import HeadScores, score_heads
from mechicl.analysis.identification import FamilyMatch, Identification, identify
from mechicl.analysis.induced_weights import induced_weights, regressed_weights
from mechicl.analysis.interventions import (
    Circuit,
    Edge,
    Node,
    Sweep,
    ablate,
    agreement,
    attribute,
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
from mechicl.analysis.interventions.sites import Site
from mechicl.analysis.kernels import (
    KernelView,
    PredictionParts,
    adapted_functions,
    initial_function,
    view_kernel,
)
from mechicl.analysis.layer_learners import LayerErrors, Lens, layer_errors
from mechicl.analysis.matching import BestMatch, Match, match
from mechicl.analysis.one_layer import OneLayerStudy, study_one_layer
from mechicl.analysis.over_training import (
    AlignmentOverTraining,
    HeadsOverTraining,
    Transitions,
    align_over_training,
    heads_over_training,
    transitions,
)
from mechicl.analysis.probes import (
    ProbeResult,
    cross_moments,
    gradient_descent_weights,
    newton_weights,
    ols_weights,
    probe,
    second_moments,
)
from mechicl.analysis.readouts import Readouts, fit_readouts, train_readouts
from mechicl.analysis.rollout import repeated
from mechicl.analysis.shifts import FOREIGN_INPUTS, ShiftedLosses, losses_over_scales
from mechicl.analysis.similarity import similarity_of_errors, similarity_of_weights
from mechicl.analysis.spectral import SpectralLearner
from mechicl.analysis.symmetries import aligned, lifted, rescaled
from mechicl.analysis.weights import WeightProducts, weight_products, with_products

__all__ = [
    "FOREIGN_INPUTS",
    "Alignment",
    "AlignmentOverTraining",
    "BestMatch",
    "Circuit",
    "Conditioning",
    "ConstructionFit",
    "Copying",
    "Curve",
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
    "Match",
    "Members",
    "ModeConnectivity",
    "Node",
    "OneLayerStudy",
    "OneStepOptimum",
    "OrderSensitivity",
    "OutsideSpan",
    "PatchingSession",
    "Path",
    "PredictionParts",
    "ProbeResult",
    "Readouts",
    "SessionResult",
    "ShiftedLosses",
    "Site",
    "SpectralLearner",
    "Sweep",
    "TokenSensitivity",
    "Transitions",
    "TuningSearch",
    "WeightProducts",
    "ablate",
    "adapted_functions",
    "agreement",
    "align",
    "align_over_training",
    "aligned",
    "attention_rank_correlation",
    "attribute",
    "compare_on_prompts",
    "compare_with_finetuning",
    "composition_scores",
    "conditioning",
    "copying",
    "corrupt",
    "corrupt_tokens",
    "cross_moments",
    "distance_to",
    "dual_form",
    "find_circuit",
    "fine_tune",
    "fit_construction",
    "fit_growth",
    "fit_readouts",
    "forgetting",
    "gradient_descent_weights",
    "heads_over_training",
    "identify",
    "induced_weights",
    "initial_function",
    "interpolate",
    "layer_errors",
    "lifted",
    "linear_attention_optimum",
    "linearized_outputs",
    "logit_difference",
    "losses_over_scales",
    "match",
    "measure_circuit",
    "mode_connectivity",
    "newton_weights",
    "next_token_loss",
    "ols_weights",
    "one_step_optimum",
    "order_sensitivity",
    "outside_span",
    "patch",
    "patch_paths",
    "preconditioned_gd_optimum",
    "prefix_matching",
    "probe",
    "prompt_shots",
    "random_update_similarity",
    "recall_of_gains",
    "regressed_weights",
    "repeated",
    "rescaled",
    "score_heads",
    "search_tuning",
    "second_moments",
    "sensitivities",
    "similarity_of_errors",
    "similarity_of_weights",
    "squared_error",
    "study_one_layer",
    "token_sensitivity",
    "train_readouts",
    "transformed_eigenvalues",
    "transitions",
    "tuned_descent",
    "update_similarity",
    "view_kernel",
    "weight_products",
    "with_products",
]
