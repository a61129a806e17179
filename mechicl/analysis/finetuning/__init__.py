"""Reading demonstrations compared with fine-tuning on them (Dai et al. 2023; Bar Natan, Deutch & Magar).

One model answers the same queries without demonstrations, after them, and without them after SGD on them. For a model
on points, with each prompt's context as demonstrations:

>>> tuning = search_on_prompts(model, prompts[:2], learning_rates=(0.003, 0.01), epochs=(1,)).best
>>> print(compare_on_prompts(model, prompts[2:6], tuning))

For a language model on a text task: `study_task(model, tokenizer, draw_texts(task))`. For demonstrations and queries of
another kind make `Shots`, the input of `search_tuning`, `fine_tune` and `compare_with_finetuning`.
"""

from mechicl.analysis.finetuning.context_comparison import FineTuningComparison, compare_with_finetuning
from mechicl.analysis.finetuning.hyperparameter_search import search_tuning
from mechicl.analysis.finetuning.prompt_contexts import compare_on_prompts, prompt_shots, search_on_prompts
from mechicl.analysis.finetuning.sgd import (
    METHOD_NAMES,
    METHODS,
    FineTuning,
    FineTuningDivergedError,
    Method,
    fine_tune,
)
from mechicl.analysis.finetuning.text_tasks import TaskTexts, draw_texts, measure_accuracy, study_task

__all__ = [
    "METHODS", "METHOD_NAMES", "FineTuning", "FineTuningComparison", "FineTuningDivergedError", "Method",
    "TaskTexts", "compare_on_prompts", "compare_with_finetuning", "draw_texts", "fine_tune", "measure_accuracy",
    "prompt_shots", "search_on_prompts", "search_tuning", "study_task",
]  # fmt: skip
