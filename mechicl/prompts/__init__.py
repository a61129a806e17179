"""Prompts: points with targets, tables, token sequences, labelled shots, and their layouts as tokens."""

from mechicl.prompts.formats import Interleaved, Paired, prompt_format
from mechicl.prompts.prompts import At, Prompts
from mechicl.prompts.tables import Tables
from mechicl.prompts.tokens import Shots, TokenSequences

__all__ = ["At", "Interleaved", "Paired", "Prompts", "Shots", "Tables", "TokenSequences", "prompt_format"]
