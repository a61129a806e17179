"""Texts to classify and words to map: data sets, templates and labels, a made-up language, few-shot prompts."""

from mechicl.tasks.topics import topic_tokenizer
from mechicl.text.classification import TEXT_TASKS, LabelledTexts, TextTask
from mechicl.text.classification import Labels as Labels
from mechicl.text.few_shot import WordPrompts, text_shots, word_prompts
from mechicl.text.loading import load_texts
from mechicl.text.words import WORD_TASKS, WordTask, read_word_task

__all__ = [
    "TEXT_TASKS", "WORD_TASKS", "LabelledTexts", "TextTask", "WordPrompts", "WordTask", "load_texts", "read_word_task",
    "text_shots", "topic_tokenizer", "word_prompts",
]  # fmt: skip
