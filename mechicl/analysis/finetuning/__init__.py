"""Fine-tuning on demonstrations against reading them in context (Dai et al. 2023; Bar Natan, Deutch & Magar)."""

from mechicl.analysis.finetuning.comparison import FineTuningComparison, compare_with_finetuning
from mechicl.analysis.finetuning.measures import (
    attention_rank_correlation,
    random_update_similarity,
    recall_of_gains,
    update_similarity,
)
from mechicl.analysis.finetuning.regression import compare_on_prompts, prompt_shots, search_on_prompts
from mechicl.analysis.finetuning.runs import linearized_outputs
from mechicl.analysis.finetuning.search import TuningSearch, search_tuning
from mechicl.analysis.finetuning.study import TaskStudy, TaskTexts, accuracy_by_shots, draw_texts, study_task
from mechicl.analysis.finetuning.tuning import FineTuned, FineTuning, fine_tune

__all__ = [
    "FineTuned",
    "FineTuning",
    "FineTuningComparison",
    "TaskStudy",
    "TaskTexts",
    "TuningSearch",
    "accuracy_by_shots",
    "attention_rank_correlation",
    "compare_on_prompts",
    "compare_with_finetuning",
    "draw_texts",
    "fine_tune",
    "linearized_outputs",
    "prompt_shots",
    "random_update_similarity",
    "recall_of_gains",
    "search_on_prompts",
    "search_tuning",
    "study_task",
    "update_similarity",
]
