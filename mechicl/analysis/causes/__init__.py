"""Does a model run an algorithm, or only end up where it ends up?"""

from mechicl.analysis.causes.interchange import INTERVENTIONS, Cell, Interchange, interchange, sample_sources

__all__ = ["INTERVENTIONS", "Cell", "Interchange", "interchange", "sample_sources"]
