"""What a prompt is: points with targets, token sequences, labelled shots, and their layouts as tokens."""

from mechicl.prompts.prompts import (
    At,
    Interleaved,
    Paired,
    Points,
    PointsAt,
    PromptFormat,
    PromptFormatName,
    Prompts,
    lies_prompts_last,
    prompt_format,
)
from mechicl.prompts.shots import Shots
from mechicl.prompts.tokens import TokenSequences

__all__ = [
    "At",
    "Interleaved",
    "Paired",
    "Points",
    "PointsAt",
    "PromptFormat",
    "PromptFormatName",
    "Prompts",
    "Shots",
    "TokenSequences",
    "lies_prompts_last",
    "prompt_format",
]
