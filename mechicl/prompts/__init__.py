"""What a prompt is: points with targets, token sequences, labelled shots, and their layouts as tokens."""

from mechicl.prompts.formats import Interleaved, Paired, PromptFormat, PromptFormatName, prompt_format
from mechicl.prompts.prompts import At, Points, PointsAt, Prompts, lies_prompts_last
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
