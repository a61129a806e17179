"""Texts to classify: data sets with templates and labels, a made-up language, and prompts with demonstrations."""

from mechicl.tasks.topics import TopicClassification, topic_tokenizer
from mechicl.text.classification import TEXT_TASKS, LabelledTexts, Labels, TextTask
from mechicl.text.demonstrations import label_ids, text_shots
from mechicl.text.loading import load_texts

__all__ = [
    "TEXT_TASKS",
    "LabelledTexts",
    "Labels",
    "TextTask",
    "TopicClassification",
    "label_ids",
    "load_texts",
    "text_shots",
    "topic_tokenizer",
]
