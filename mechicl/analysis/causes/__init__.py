"""Does a model run an algorithm, or only end up where it ends up?"""

from mechicl.analysis.causes.candidates import candidate_algorithms
from mechicl.analysis.causes.interchange import interchange, interchange_each, sample_sources
from mechicl.analysis.causes.ranking import HypothesisTest, test_hypotheses
from mechicl.analysis.causes.results import INTERVENTIONS, Cell, Interchange

__all__ = [
    "INTERVENTIONS",
    "Cell",
    "HypothesisTest",
    "Interchange",
    "candidate_algorithms",
    "interchange",
    "interchange_each",
    "sample_sources",
    "test_hypotheses",
]
