"""Kind of learner and nearest algorithm: comparisons of predictions, sensitivities and errors.

>>> print(fingerprint(model, task))                 # what kind of learner is it? no list of algorithms is needed
>>> align(model, gradient_descent, prompts)         # how alike two learners are, prompt by prompt
>>> match(readouts, newton, prompts).best()         # which iteration each layer resembles
>>> print(identify(model, task))                    # which family of algorithms fits best on held-out prompts
>>> print(identify_on_tables(estimator, task))      # the same for learners of tables
>>> plot(regret(model, task))                       # how far from the best known learner of its task
"""

from mechicl.algorithms.spectral_fit import SpectralLearner
from mechicl.analysis.behaviour.alignment import Alignment, align, induced_weights, regressed_weights, sensitivities
from mechicl.analysis.behaviour.families import Identification
from mechicl.analysis.behaviour.fingerprints import Fingerprint, fingerprint
from mechicl.analysis.behaviour.identification import identify
from mechicl.analysis.behaviour.losses import Regret, measure_shifted_losses, regret
from mechicl.analysis.behaviour.matching import Match, match, rank_families
from mechicl.analysis.behaviour.table_fingerprints import TableFingerprint, fingerprint_on_tables
from mechicl.analysis.behaviour.table_learners import identify_on_tables
from mechicl.analysis.behaviour.token_identification import identify_on_tokens
from mechicl.analysis.behaviour.tuned_descent import tuned_clipped_descent, tuned_descent

__all__ = [
    "Alignment", "Fingerprint", "Identification", "Match", "Regret", "SpectralLearner", "TableFingerprint", "align",
    "fingerprint", "fingerprint_on_tables", "identify", "identify_on_tables", "identify_on_tokens",
    "induced_weights", "match", "measure_shifted_losses", "rank_families", "regressed_weights", "regret",
    "sensitivities", "tuned_clipped_descent", "tuned_descent",
]  # fmt: skip
