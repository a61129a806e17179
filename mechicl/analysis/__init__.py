"""Analyses, one package per question: functions of learners that return results with one value per prompt.

The most used names are here; each package has more.

- `analysis.behaviour`: which algorithm does it behave like?
- `analysis.layers`: what does each layer represent?
- `analysis.weights`: is it in the weights?
- `analysis.heads`: what do heads do?
- `analysis.interventions`: what does it need?
- `analysis.circuits`: which parts carry it, and along which edges?
- `analysis.causes`: does it run the algorithm, or only reach the same result?
- `analysis.finetuning`: is reading demonstrations like fine-tuning on them?
- `analysis.dynamics`: when does it learn it?
- `analysis.language`: how do language models learn in context?
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechicl.analysis import (
        behaviour,
        causes,
        circuits,
        dynamics,
        finetuning,
        heads,
        interventions,
        language,
        layers,
        weights,
    )
    from mechicl.analysis.behaviour import (
        Identification,
        Match,
        align,
        fingerprint,
        fingerprint_on_tables,
        identify,
        identify_on_tables,
        identify_on_tokens,
        match,
        measure_shifted_losses,
        regret,
    )
    from mechicl.analysis.causes import SubspaceSearch, fit_subspace, interchange, sample_sources, test_hypotheses
    from mechicl.analysis.circuits import Circuit, compare_circuits, find_circuit, measure_circuit, score_edges
    from mechicl.analysis.dynamics import (
        align_over_training,
        find_transitions,
        measure_over_training,
        score_heads_over_training,
    )
    from mechicl.analysis.finetuning import FineTuning, compare_on_prompts, compare_with_finetuning, fine_tune
    from mechicl.analysis.heads import composition_scores, measure_target_copying, read_dual_form, score_heads
    from mechicl.analysis.interventions import (
        InterventionSweep,
        PatchingSession,
        Replacement,
        Site,
        ablate,
        attribute,
        corrupt,
        corrupt_tokens,
        next_token_loss,
        patch,
        patch_paths,
    )
    from mechicl.analysis.layers import Lens, Readouts, fit_readouts, probe
    from mechicl.analysis.weights import connect_modes, fit_construction, interpolate, read_weight_products

__all__ = [
    "Circuit", "FineTuning", "Identification", "InterventionSweep", "Lens", "Match", "PatchingSession", "Readouts",
    "Replacement", "Site", "SubspaceSearch", "ablate", "align", "align_over_training", "attribute", "behaviour",
    "causes", "circuits", "compare_circuits", "compare_on_prompts", "compare_with_finetuning", "composition_scores",
    "connect_modes", "corrupt", "corrupt_tokens", "dynamics", "find_circuit", "find_transitions", "fine_tune",
    "finetuning", "fingerprint", "fingerprint_on_tables", "fit_construction", "fit_readouts", "fit_subspace", "heads",
    "identify", "identify_on_tables", "identify_on_tokens", "interchange", "interpolate", "interventions", "language",
    "layers", "match", "measure_circuit", "measure_over_training", "measure_shifted_losses", "measure_target_copying",
    "next_token_loss", "patch", "patch_paths", "probe", "read_dual_form", "read_weight_products", "regret",
    "sample_sources", "score_edges", "score_heads", "score_heads_over_training", "test_hypotheses", "weights",
]  # fmt: skip
_NAMES = {
    "behaviour": (
        "Identification Match align fingerprint fingerprint_on_tables identify identify_on_tables identify_on_tokens "
        "match measure_shifted_losses regret"
    ),
    "causes": "SubspaceSearch fit_subspace interchange sample_sources test_hypotheses",
    "circuits": "Circuit compare_circuits find_circuit measure_circuit score_edges",
    "dynamics": "align_over_training find_transitions measure_over_training score_heads_over_training",
    "finetuning": "FineTuning compare_on_prompts compare_with_finetuning fine_tune",
    "heads": "composition_scores measure_target_copying read_dual_form score_heads",
    "interventions": (
        "InterventionSweep PatchingSession Replacement Site ablate attribute corrupt corrupt_tokens "
        "next_token_loss patch patch_paths"
    ),
    "language": "",
    "layers": "Lens Readouts fit_readouts probe",
    "weights": "connect_modes fit_construction interpolate read_weight_products",
}
_PLACES = {name: package for package, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Packages load when one of their names is first used: all of them take most of a second."""
    if name not in _NAMES and name not in _PLACES:
        raise AttributeError(f"module 'mechicl.analysis' has no attribute {name!r}")
    package = importlib.import_module(f"mechicl.analysis.{_PLACES.get(name, name)}")
    return package if name in _NAMES else getattr(package, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
