"""What do heads do? Where they attend, what they copy, what they write as an update of weights.

>>> score_heads(model, prompts=prompts).to_dataframe()      # previous-token, induction, copying, ... scores
>>> dual_form(model, prompts).relative_error                # attention as an update of the query's weights
"""

from mechicl.analysis.heads.composition import composition_scores, prefix_matching
from mechicl.analysis.heads.dual_form import DualForm, dual_form
from mechicl.analysis.heads.scores import HeadScores, score_heads
from mechicl.analysis.heads.target_copying import Copying, TokenSensitivity, copying, token_sensitivity

__all__ = [
    "Copying",
    "DualForm",
    "HeadScores",
    "TokenSensitivity",
    "composition_scores",
    "copying",
    "dual_form",
    "prefix_matching",
    "score_heads",
    "token_sensitivity",
]
