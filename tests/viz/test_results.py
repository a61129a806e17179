"""`plot` draws every kind of result; the errors of figures name the argument."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from mechicl import algorithms, constructions, viz
from mechicl.analysis import compare_circuits, fit_construction
from mechicl.analysis.circuits import EdgeScores
from mechicl.analysis.dynamics import StrategyTracking, track_strategies
from mechicl.analysis.heads import HeadScores
from mechicl.analysis.weights.paths import ModeConnectivity
from mechicl.constructions import weights_circuit
from mechicl.statistics import Result, interval
from mechicl.statistics.grids import GridTable
from mechicl.tasks import LinearRegression, MarkovChains
from mechicl.viz.export import Html
from mechicl.viz.results import FIGURES
from tests.analysis.circuits.test_curves import made as curve
from tests.statistics.test_every_result import build
from tests.viz.test_attention import model_and_prompts
from tests.viz.test_behaviour import MATCH, exchanged, identification, ranked, searched, shifted
from tests.viz.test_circuits import EDGES, circuit
from tests.viz.test_interventions import head_scores, swept
from tests.viz.test_training import path
from tests.viz.traces import heatmaps, lines

TASK = LinearRegression(x_dim=2, n_context=3)
MODEL = constructions.gradient_descent(x_dim=2, n_context=3, step_size=0.5)


def tracked() -> StrategyTracking:
    """Two models that are exactly one of two strategies each."""
    chains = MarkovChains(d_vocab=3, n_ctx=8)
    learners = {name: algorithms.references(chains)[name] for name in ("uniform", "bigram")}
    return track_strategies(list(learners.values()), learners, chains.sample(5, seed=0), n_resamples=2, progress=False)


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
    "LossPath": lambda: path(3),
    "Match": lambda: MATCH,
    "ModeConnectivity": lambda: ModeConnectivity({"raw": path(3)}, {}),
    "ShiftedLosses": shifted,
    "StrategyTracking": tracked,
    "SubspaceSearch": searched,
    "WeightsCircuit": lambda: weights_circuit(MODEL),
    "InterventionSweep": lambda: swept(("layer", "head"), ((0, 2), (1, 3, 4))),
}
WITHOUT_SAMPLES = {"TaskTexts"}


def kinds() -> list[str]:
    """Return the names of all kinds of results of the analyses, and of other classes with a special figure."""
    results = [kind for kind in Result.__subclasses__() if kind.__module__.startswith("mechicl.analysis.")]
    return sorted({kind.__name__ for kind in [*results, *FIGURES] if kind is not Result} - WITHOUT_SAMPLES)


@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_result_is_drawn(name):
    every = [*Result.__subclasses__(), *FIGURES]
    result = (
        BY_HAND[name]() if name in BY_HAND else build(next(kind for kind in every if kind.__name__ == name), [3] * 99)
    )
    figure = viz.plot(result)
    assert figure.data
    assert figure.to_json()


def test_quantities_are_points_lines_and_heatmaps():
    kind = next(kind for kind in Result.__subclasses__() if kind.__name__ == "FineTuningComparison")
    result = build(kind, [3] * 99)
    figure: Any = FIGURES[Result](result)
    points = dict(zip(figure.data[0].y, figure.data[0].x, strict=True))
    assert points["zero shot loss"] == pytest.approx(result.zero_shot_loss.mean().item())
    score = result.intervals()["zero_shot_score"]
    assert figure.data[0].error_x.array[0] == pytest.approx(score.high - score.mean)
    ((x, y),) = lines(figure, "update_similarity")
    assert (x, y) == ([0, 1], pytest.approx(result.update_similarity.mean(-1).tolist()))
    assert heatmaps(figure)[0].allclose(result.head_update_similarity.mean(-1).double())
    assert viz.plot(result, title="Mine").layout.title.text == "Mine"


# ---- faulty arguments of figures: the error names the argument ----
any_viz: Any = viz
FRAME = pd.DataFrame({"n": [1, 2, 1, 2], "m": [1, 1, 2, 2], "seed": [0] * 4, "loss": [2.0, -1.0, 1.0, 3.0]})
ONES = torch.ones(3, 1)
LINE = go.Figure(go.Scatter(x=[0, 1], y=[0, 1]))


def attention(**options: Any) -> Any:
    model, prompts = model_and_prompts()
    return viz.prompt_attention(model, options.pop("prompt", prompts[:1]), **options)


@pytest.mark.parametrize(("call", "named"), [
    (lambda: attention(prompt=model_and_prompts()[1]), "one prompt"),
    (lambda: attention(layer=3), r"no hook 'blocks.3.attn.hook_pattern'"),
    (lambda: attention(layer=[]), "layer"),
    (lambda: attention(labels=["a"]), "label per position"),
    (lambda: viz.attention_figure(torch.eye(2)[None], ["a", "b"], ["h", "i"]), "head_names"),
    (lambda: viz.counterfactual_scatter(exchanged()[0], ["head exchanged"]), "interventions"),
    (lambda: viz.settings_figure({}), "scores"),
    (lambda: viz.update_similarity_figure({}), "comparisons"),
    (lambda: viz.map_similarity_figure({}), "comparisons"),
    (lambda: viz.losses_over_training([0, 1], {"b": [[1.0]]}), "losses"),
    (lambda: viz.losses_over_training([0, 1], {"b": [[1.0], [2.0, 9.0]]}), r"same number of seeds .*\[1, 2\] of 'b'"),
    (lambda: viz.interval_lines("", "", "", [0, 1], {"b": [interval(torch.ones(3))]}), "got 1 of 'b' for 2"),
    (lambda: viz.training_history({"eval_step": [0], "eval_loss": [[1.0], [2.0]]}, {}), "got 2 for 1 steps"),
    (lambda: viz.phase_diagram(FRAME, "n", "m", "loss", log=True), "'loss' has values that are not positive"),
    (lambda: viz.phase_diagram(FRAME, "n", "n", "loss"), "x and y"),
    (lambda: viz.phase_diagram(FRAME, "n", "m", "regret"), "no column 'regret'; it has n, m"),
    (lambda: viz.lines(FRAME.assign(loss="a"), "n", "loss"), "value must be a column of numbers, got 'loss' with 'a'"),
    (lambda: viz.phase_diagram(FRAME.assign(loss="a"), "n", "m", "loss"), "value must be a column of numbers"),
    (lambda: viz.lines(GridTable(FRAME, ("n", "m", "seed")), "n", "loss"), "the table varies in 'm' too"),
    (lambda: any_viz.lines(FRAME, "n", "loss", "m", middle="mode"), "middle"),
    (lambda: viz.head_table(HeadScores({}, {})), "scores"),
    (lambda: viz.composition_figure(torch.zeros(1, 2, 1, 2), "Q"), "scores"),
    (lambda: viz.patching_grid(swept(("layer",), ((0, 1),))), "2 to 4 axes"),
    (lambda: viz.patching_grid(swept(("a", "b", "c", "d", "e"), ((0,),) * 5)), "2 to 4 axes"),
    (lambda: viz.patching_grid(swept(("head", "pos"), ((0, 1), (0, 1)))), "with layers"),
    (lambda: viz.patching_grid(swept(("layer", "pos"), ((0,), (0, 1))), labels=["A"]), "labels"),
    (lambda: viz.patching_grid(swept(("layer", "pos"), ((0,), (0,))), recovered=True), "come from a run"),
    (lambda: viz.connectivity_paths({}), "paths"),
    (lambda: viz.connectivity_paths({"a": path(3), "b": path(5)}), "same alphas"),
    (lambda: viz.plot({}), r"Circuit, .*InterventionSweep.*got dict: pass the object"),
    (lambda: viz.save(LINE, "line.gif"), r"path must end in .*got 'line.gif'"),
    (lambda: viz.save(Html("<p>a box</p>"), "box.png"), "path"),
    (lambda: any_viz.save(LINE, "line.png", width="colum"), "width"),
    *((lambda name=name: any_viz.save(LINE, "line.png", **{name: -1}), name)
      for name in ("width", "height", "font_size", "dpi")),
])  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], Any], named: str):
    with pytest.raises((ValueError, KeyError, TypeError), match=named):
        call()
