"""Models of other projects as hooked transformers."""

from mechicl.interop.garg import from_garg, garg_task, load_garg, load_garg_state
from mechicl.interop.linear_transformer import from_linear_transformer

__all__ = ["from_garg", "from_linear_transformer", "garg_task", "load_garg", "load_garg_state"]
