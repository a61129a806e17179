"""Where in a model's stream the variables of hypotheses lie: rows, pictures and numbers of learned subspaces."""

from collections.abc import Sequence
from typing import Any

from mechicl import viz
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis import SubspaceSearch, fit_subspace
from mechicl.analysis.causes.subspaces import MODEL
from mechicl.reports.comparison import Measured
from mechicl.reports.rows import Row
from mechicl.tasks import Task
from mechicl.viz.page import Section

TITLE = "Where do its variables lie?"


def subspaces_part(
    model: Any,
    asked: Sequence[tuple[Hypothesis, str]],
    task: Task,
    *,
    layers: Sequence[int] | None = None,
    dims: Sequence[int] = (1, 4, 16),
    **options: Any,
) -> Measured:
    """Learned subspaces of hypotheses' variables at the query, with random targets and an untrained model as controls.

    Args:
        model: that reads prompts of points.
        asked: hypotheses, each with one of its algorithm's variables.
        task: that prompts are drawn from.
        layers: numbers of layers after which to search, as far as they are in a hypothesis's schedule; all by default.
        dims: numbers of dimensions.
        options: of `fit_subspace`.
    """
    rows: list[Row] = []
    sections: list[Section] = []
    data: dict[str, Any] = {"subspaces": []}
    for hypothesis, variable in asked:
        at = [layer for layer, _ in hypothesis.between if layers is None or layer in layers]
        search = fit_subspace(model, hypothesis, variable, task, layers=at, dims=dims, **options)
        rows += [_row(search, layer, dim) for layer in search.layers for dim in search.dims]
        sections.append(Section(f"{TITLE} {variable}: {hypothesis.name}", _words(search), viz.plot(search)))
        numbers = {
            "hypothesis": hypothesis.name,
            "variable": variable,
            "rows": search.to_dataframe().to_dict("records"),
        }
        data["subspaces"].append(numbers)
    return rows, sections, data


def _row(search: SubspaceSearch, layer: int, dim: int) -> Row:
    quantity = f"{', '.join(search.variables)} in {dim} dimensions after {layer} layers: R² of its exchange"
    controls = "; ".join(f"{name} {search.r2(layer, dim, name)}" for name in search.searches if name != MODEL)
    note = f"{search.hypothesis}; of the rest {search.rest_r2(layer, dim)}; {controls}"
    return Row(quantity, None, search.r2(layer, dim), "prompts", note, section=TITLE)


def _words(search: SubspaceSearch) -> str:
    return (
        f"Subspaces were fitted so that exchanging what lies in them at the {search.place} does what exchanging the "
        f"algorithm's variable does, and exchanging the rest what all other variables do; R² on prompts that the "
        f"search has not seen. Controls are searched alike: targets of other prompts, and an untrained model."
    )
