"""How do language models learn in context? Few-shot accuracy, function vectors, matched ablations, stability.

>>> language = load_language_model("HuggingFaceTB/SmolLM2-135M")
>>> icl_score(language, ["antonyms", "capitals"]).gain("antonyms")    # beyond what shuffled labels give
>>> function_vectors(language, "antonyms").heads                      # which heads carry the task
"""

from mechicl.analysis.language.matched import MatchedAblation, ablate_matched
from mechicl.analysis.language.numbers import TextLearner
from mechicl.analysis.language.shots import icl_score, loss_by_position
from mechicl.analysis.language.stability import Stability, stability
from mechicl.analysis.language.variables import AlignmentFit, CausalModel, VariableAlignment, align_variables
from mechicl.analysis.language.vectors import FunctionVector, TaskVectors, function_vectors, steering, task_vectors
from mechicl.text.scores import FewShotScores

__all__ = [
    "AlignmentFit", "CausalModel", "FewShotScores", "FunctionVector", "MatchedAblation", "Stability", "TaskVectors",
    "TextLearner", "VariableAlignment", "ablate_matched", "align_variables", "function_vectors", "icl_score",
    "loss_by_position", "stability", "steering", "task_vectors",
]  # fmt: skip
