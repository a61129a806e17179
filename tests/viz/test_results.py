"""`plot` draws every kind of result."""

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch

from mechicl import constructions, viz
from mechicl.analysis import compare_circuits, fit_construction
from mechicl.analysis.circuits import EdgeScores
from mechicl.analysis.weights.paths import ModeConnectivity
from mechicl.constructions import weights_circuit
from mechicl.statistics import Result
from mechicl.tasks import LinearRegression
from tests.analysis.circuits.test_curves import made as curve
from tests.viz.test_behaviour import MATCH, identification, shifted
from tests.viz.test_causes import exchanged, ranked, searched
from tests.viz.test_circuits import EDGES, circuit
from tests.viz.test_interventions import head_scores, swept
from tests.viz.test_weights import path, view
from tests.viz.traces import heatmaps, lines

TASK = LinearRegression(x_dim=2, n_context=3)
MODEL = constructions.gradient_descent(x_dim=2, n_context=3, step_size=0.5)
BY_HAND = {  # results that cannot be made of any numbers
    "Circuit": circuit,
    "CircuitComparison": lambda: compare_circuits(circuit(), circuit(())),
    "CircuitCurve": curve,
    "ConstructionFit": lambda: fit_construction(MODEL, "gd", TASK, refine=False, n_prompts=4),
    "HeadScores": head_scores,
    "HypothesisTest": ranked,
    "Interchange": lambda: exchanged()[0],
    "EdgeScores": lambda: EdgeScores(EDGES, torch.rand(len(EDGES), 3), "loss", "eap", "zero"),
    "FamilyMatch": lambda: identification().best,
    "Identification": identification,
    "KernelView": view,
    "LossPath": lambda: path(3),
    "Match": lambda: MATCH,
    "ModeConnectivity": lambda: ModeConnectivity({"raw": path(3)}, {}),
    "ShiftedLosses": shifted,
    "SubspaceSearch": searched,
    "WeightsCircuit": lambda: weights_circuit(MODEL),
    "InterventionSweep": lambda: swept(("layer", "head"), ((0, 2), (1, 3, 4))),
}
WITHOUT_SAMPLES = {"TaskTexts"}


def kinds() -> list[str]:
    """Return the names of all kinds of results of the analyses, and of other classes with a special figure."""
    results = [kind for kind in Result.__subclasses__() if kind.__module__.startswith("mechicl.analysis.")]
    drawable = [kind for kind in viz.plot.registry if kind not in (object, Result)]
    return sorted({kind.__name__ for kind in [*results, *drawable]} - WITHOUT_SAMPLES)


def example(kind: Any) -> Any:
    """Make a value of a type: random tensors whose axes all have length 3, tuples of 3, dataclasses of such."""
    if hasattr(kind, "dim_str"):
        shape = [3] * len(kind.dim_str.split())
        return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        needed = [field for field in dataclasses.fields(kind) if field.default is field.default_factory]  # both missing
        return kind(**{field.name: example(hints[field.name]) for field in needed})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(example(get_args(kind)[0]) for _ in range(3))
    if get_origin(kind) is dict:
        return {"name": example(get_args(kind)[1])}
    return {str: "name", int: 3, float: 0.5, torch.Tensor: torch.rand(3)}[kind]


@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_result_is_drawn(name):
    every = [*Result.__subclasses__(), *viz.plot.registry]
    result = BY_HAND[name]() if name in BY_HAND else example(next(kind for kind in every if kind.__name__ == name))
    figure = viz.plot(result)
    assert figure.data
    assert figure.to_json()


def test_quantities_are_points_lines_and_heatmaps():
    kind = next(kind for kind in Result.__subclasses__() if kind.__name__ == "FineTuningComparison")
    result = example(kind)
    figure: Any = viz.plot.dispatch(Result)(result, title="Mine")
    points = dict(zip(figure.data[0].y, figure.data[0].x, strict=True))
    assert points["zero shot loss"] == pytest.approx(result.zero_shot_loss.mean().item())
    score = result.intervals()["zero_shot_score"]
    assert figure.data[0].error_x.array[0] == pytest.approx(score.high - score.mean)
    ((x, y),) = lines(figure, "update_similarity")
    assert (x, y) == ([0, 1, 2], pytest.approx(result.update_similarity.mean(-1).tolist()))
    assert heatmaps(figure)[0].allclose(result.head_update_similarity.mean(-1).double())
    assert figure.layout.title.text == "Mine"
