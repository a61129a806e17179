"""Texts to classify: data sets with templates and labels, a made-up language, and prompts with demonstrations."""

from mechicl.tasks.topics import topic_tokenizer
from mechicl.text.classification import TEXT_TASKS, LabelledTexts, TextTask
from mechicl.text.classification import Labels as Labels
from mechicl.text.demonstrations import text_shots
from mechicl.text.loading import load_texts

__all__ = ["TEXT_TASKS", "LabelledTexts", "TextTask", "load_texts", "text_shots", "topic_tokenizer"]
