"""Does a model run an algorithm, or only predict the same? Interchange interventions, and learned subspaces."""

from mechicl.analysis.causes.hypotheses import HypothesisTest, fit_hypotheses, test_hypotheses
from mechicl.analysis.causes.interchange import INTERVENTIONS, Interchange, interchange, sample_sources
from mechicl.analysis.causes.patterns import PatternExchange, exchange_patterns
from mechicl.analysis.causes.subspaces import SubspaceFit, SubspaceSearch, fit_subspace

__all__ = [
    "INTERVENTIONS", "HypothesisTest", "Interchange", "PatternExchange", "SubspaceFit", "SubspaceSearch",
    "exchange_patterns", "fit_hypotheses", "fit_subspace", "interchange", "sample_sources", "test_hypotheses",
]  # fmt: skip
