"""Analyses of attention heads: where they attend, what they copy, and the update of weights that they write.

>>> score_heads(model, prompts=prompts).to_dataframe()      # previous-token, induction, copying, ... scores
>>> read_dual_form(model, prompts).relative_error                # attention as an update of the query's weights
"""

from mechicl.analysis.heads.composition import composition_scores
from mechicl.analysis.heads.dual_form import read_dual_form
from mechicl.analysis.heads.scores import HeadScores, score_heads
from mechicl.analysis.heads.target_copying import TargetCopying, measure_target_copying

__all__ = [
    "HeadScores", "TargetCopying", "composition_scores", "measure_target_copying", "read_dual_form", "score_heads",
]  # fmt: skip
