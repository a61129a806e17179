"""Does a model run an algorithm, or only end up where it ends up?"""

from mechicl.analysis.causes.interchange import interchange, sample_sources
from mechicl.analysis.causes.ranking import HypothesisTest, candidate_algorithms, fit_hypotheses, test_hypotheses
from mechicl.analysis.causes.results import Interchange
from mechicl.analysis.causes.subspaces import SubspaceSearch, fit_subspace

__all__ = [
    "HypothesisTest",
    "Interchange",
    "SubspaceSearch",
    "candidate_algorithms",
    "fit_hypotheses",
    "fit_subspace",
    "interchange",
    "sample_sources",
    "test_hypotheses",
]
