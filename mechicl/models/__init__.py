"""Hooked networks."""

from mechicl.models.config import ELEMENTWISE, TransformerConfig
from mechicl.models.transformer import HookedTransformer

__all__ = ["ELEMENTWISE", "HookedTransformer", "TransformerConfig"]
