"""Grids of interventions: every cell where it belongs, with the number that it has."""

from typing import Any

import pytest
import torch

from mechicl.analysis import InterventionSweep, ablate, corrupt, patch, patch_paths
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.viz import patching_grid
from tests.viz.traces import heatmaps

N = 3  # prompts


def swept(axes: tuple[str, ...], indices: tuple[tuple[int, ...], ...], *, source: bool = False) -> InterventionSweep:
    """A sweep with another effect in every cell and prompt."""
    shape = tuple(map(len, indices))
    effects = torch.randn(*shape, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unpatched = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return InterventionSweep(
        "mean ablation of z", axes, indices, None, torch.zeros(N, 1), torch.zeros(N, 1) if source else None,
        {"loss": unpatched + effects, "other": unpatched - 2 * effects},
        {"loss": unpatched, "other": unpatched},
        {"loss": unpatched - 4, "other": unpatched - 4} if source else {},
    )  # fmt: skip


@pytest.mark.parametrize("axes", [("layer", "head"), ("head", "layer")])
def test_layers_are_rows_and_heads_columns_in_any_order_of_the_axes(axes):
    places = {"layer": (0, 2), "head": (1, 3, 4)}
    sweep = swept(axes, tuple(places[axis] for axis in axes))
    effects = sweep.effect() if axes[0] == "layer" else sweep.effect().transpose(0, 1)
    figure: Any = patching_grid(sweep)
    (heat,) = figure.data
    assert heatmaps(figure)[0].equal(effects.mean(-1))
    assert (heat.y, heat.x) == (("0", "2"), ("1", "3", "4"))
    assert heat.customdata[1][2] == str(interval(effects[1, 2]))
    assert float(heat.text[1][2]) == pytest.approx(heat.z[1][2], rel=0.05)
    assert heat.zmax == -heat.zmin == effects.mean(-1).abs().max()


@pytest.mark.parametrize(
    ("axes", "across", "panel"),
    [(("layer", "pos", "head"), 1, 2), (("layer", "head", "query"), 2, 1), (("layer", "query", "key"), 1, 2)],
)
def test_a_third_axis_has_a_panel_for_each_index(axes, across, panel):
    sweep = swept(axes, ((0, 1), (0, 1, 2), (0, 3)))
    figure: Any = patching_grid(sweep, "other")
    effects = sweep.effect("other").movedim(panel, 0)  # what is left is layer by the axis that runs across
    assert len(figure.data) == len(effects)
    for heat, drawn, expected in zip(figure.data, heatmaps(figure), effects, strict=True):
        assert drawn.equal(expected.mean(-1))
        assert heat.customdata[1][1] == str(interval(expected[1, 1]))
        assert heat.zmax == figure.data[0].zmax
    assert list(figure.data[0].x) == [str(i) for i in sweep.indices[across]]


def test_pairs_of_axes_are_rows_and_columns():
    sweep = swept(("layer", "head", "to_layer", "to_head"), ((0, 1), (0, 1, 2), (1, 2), (0,)))
    figure: Any = patching_grid(sweep)
    assert figure.data[0].y == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")
    assert figure.data[0].x == ("1.0", "2.0")
    assert heatmaps(figure)[0].equal(sweep.effect().mean(-1).reshape(6, 2))
    assert figure.data[0].customdata[4][1] == str(interval(sweep.effect()[1, 1, 1, 0]))


def test_the_share_recovered_is_drawn_where_there_is_one():
    sweep = swept(("layer", "pos"), ((0, 1), (0, 1, 2)), source=True)
    figure: Any = patching_grid(sweep)
    assert heatmaps(figure)[0].allclose(sweep.effect().mean(-1) / -4)
    assert figure.layout.title.text == "Mean ablation of z: share of loss recovered"
    figure = patching_grid(sweep, "other", recovered=False)
    assert heatmaps(figure)[0].equal(sweep.effect("other").mean(-1))
    with pytest.raises(ValueError, match="come from no run"):
        patching_grid(swept(("layer", "pos"), ((0,), (0,))), recovered=True)


def test_equal_labels_keep_their_columns():
    sweep = swept(("layer", "pos"), ((0,), (0, 1, 2)))
    assert patching_grid(sweep, labels=["A", "B", "A"]).data[0].x == ("A (0)", "B", "A (2)")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="2 labels, but the sweep has pos 2"):
        patching_grid(sweep, labels=["A", "B"])
    by_head = swept(("layer", "head"), ((0,), (0, 1, 2)))
    assert patching_grid(by_head, labels=["of positions"]).data[0].x == ("0", "1", "2")  # type: ignore[attr-defined]


@pytest.mark.parametrize("axes", [("layer",), ("layer", "head", "pos", "layer_2", "head_2"), ("head", "pos")])
def test_other_axes_are_refused(axes):
    with pytest.raises(ValueError, match="2 to 4 axes, with layers"):
        patching_grid(swept(axes, tuple((0, 1) for _ in axes)))


def test_effects_that_are_nothing_or_not_finite_are_drawn():
    for values, bound in ((torch.zeros(1, 2, N), 1e-12), (torch.tensor([[[torch.inf] * N, [1.0] * N]]), 1)):
        sweep = InterventionSweep(
            "mean ablation of z", ("layer", "head"), ((0,), (0, 1)), None, torch.zeros(N, 1), None, {"loss": values},
            {"loss": torch.zeros(N)},
        )  # fmt: skip
        assert patching_grid(sweep).data[0].zmax == bound  # type: ignore[attr-defined]


def test_all_sweeps_of_the_package_have_their_picture():
    cfg = TransformerConfig(
        x_dim=2, n_context=3, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax",
        initializer_range=0.4,
    )  # fmt: skip
    model, prompts = HookedTransformer(cfg, seed=0).eval(), LinearRegression(x_dim=2, n_context=3).sample(4, seed=0)
    corrupted = corrupt(prompts, "labels")
    noised: Any = patching_grid(patch(model, prompts, corrupted, "resid_pre", direction="noising"))
    assert noised.layout.title.text.endswith(": share of the way to the corrupted loss")
    shapes = {
        "stream": (patch(model, prompts, corrupted, "resid_pre"), [(2, 7)]),
        "pattern": (patch(model, prompts, corrupted, "pattern", ("layer", "head", "query")), [(2, 7)] * 2),
        "pairs": (ablate(model, prompts, "z", pairs=True), [(4, 4)]),
        "layers in pairs": (ablate(model, prompts, "attn_out", ("layer",), pairs=True), [(2, 2)]),
        "directions at positions": (ablate(model, prompts, "resid_pre", directions=torch.eye(8)[:3]), [(2, 7)] * 3),
        "paths": (patch_paths(model, prompts, corrupted, "q"), [(4, 4)]),
    }
    for name, (sweep, expected) in shapes.items():
        assert [tuple(drawn.shape) for drawn in heatmaps(patching_grid(sweep))] == expected, name
