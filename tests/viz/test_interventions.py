"""Grids of interventions: every cell where it belongs, with the number that it has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.analysis import Sweep, ablate, corrupt, patch, patch_paths
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.viz import patching_grid

N = 3  # prompts


def swept(axes: tuple[str, ...], indices: tuple[tuple[int, ...], ...], *, source: bool = False) -> Sweep:
    """A sweep with another effect in every cell and prompt."""
    shape = tuple(map(len, indices))
    effects = torch.randn(*shape, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unpatched = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return Sweep(
        "mean ablation of z", axes, indices, None, torch.zeros(N, 1), torch.zeros(N, 1) if source else None,
        {"loss": unpatched + effects, "other": unpatched - 2 * effects},
        {"loss": unpatched, "other": unpatched},
        {"loss": unpatched - 4, "other": unpatched - 4} if source else {},
    )  # fmt: skip


def cells(trace: Any) -> Tensor:
    """What a heatmap shows, `[y x]`."""
    return torch.tensor(trace.z, dtype=torch.float64)


def test_layers_are_rows_and_heads_columns():
    sweep = swept(("layer", "head"), ((0, 2), (1, 3, 4)))
    figure: Any = patching_grid(sweep)
    (heat,) = figure.data
    assert cells(heat).equal(sweep.effect("loss").mean(-1))
    assert (heat.y, heat.x) == (("0", "2"), ("1", "3", "4"))
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("head", "layer")
    assert figure.layout.title.text == "Mean ablation of z: change of loss"
    assert heat.zmax == -heat.zmin == sweep.effect("loss").mean(-1).abs().max()
    assert heat.customdata[1][2] == str(interval(sweep.effect("loss")[1, 2]))
    assert float(heat.text[1][2]) == pytest.approx(heat.z[1][2], rel=0.05)
    assert heat.hovertemplate.startswith("layer %{y}, head %{x}<br>change of loss")


def test_axes_in_another_order_are_the_same_picture():
    sweep = swept(("head", "layer"), ((1, 3, 4), (0, 2)))
    (heat,) = patching_grid(sweep).data
    assert cells(heat).equal(sweep.effect().mean(-1).mT)
    assert (heat.y, heat.x) == (("0", "2"), ("1", "3", "4"))
    for row in range(2):
        for column in range(3):
            assert heat.customdata[row][column] == str(interval(sweep.effect()[column, row]))


def test_a_head_has_a_panel_of_layers_by_positions():
    sweep = swept(("layer", "pos", "head"), ((0, 1), (2, 5, 6), (0, 3)))
    figure: Any = patching_grid(sweep, "other", labels=["a", "b", "c", "d", "e", "f", "?"], title="Mine")
    assert len(figure.data) == 2
    for head, heat in enumerate(figure.data):
        assert cells(heat).equal(sweep.effect("other").mean(-1)[:, :, head])
        assert heat.customdata[1][2] == str(interval(sweep.effect("other")[1, 2, head]))
        assert (heat.y, heat.x) == (("0", "1"), ("c", "f", "?"))
        assert heat.showscale == (head == 0)
        assert heat.zmax == figure.data[0].zmax
    assert [text.text for text in figure.layout.annotations] == ["head 0", "head 3"]
    assert (figure.layout.xaxis.title.text, figure.layout.title.text) == ("position", "Mine")


def test_patterns_have_a_panel_a_head_or_a_key():
    by_query = swept(("layer", "head", "query"), ((0, 1), (0, 1, 2), (0, 1)))
    for head, heat in enumerate(patching_grid(by_query).data):
        assert cells(heat).equal(by_query.effect().mean(-1)[:, head])
    by_key = swept(("layer", "query", "key"), ((0,), (0, 1, 2), (0, 1)))
    figure: Any = patching_grid(by_key)
    for key, heat in enumerate(figure.data):
        assert cells(heat).equal(by_key.effect().mean(-1)[:, :, key])
    assert [text.text for text in figure.layout.annotations] == ["key position 0", "key position 1"]
    assert figure.layout.xaxis.title.text == "query position"


def test_pairs_of_axes_are_rows_and_columns():
    sweep = swept(("layer", "head", "to_layer", "to_head"), ((0, 1), (0, 1, 2), (1, 2), (0,)))
    figure: Any = patching_grid(sweep)
    (heat,) = figure.data
    means = sweep.effect().mean(-1)
    assert heat.y == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")
    assert heat.x == ("1.0", "2.0")
    for row, (layer, head) in enumerate((layer, head) for layer in range(2) for head in range(3)):
        for column in range(2):
            assert heat.z[row][column] == means[layer, head, column, 0].item()
            assert heat.customdata[row][column] == str(interval(sweep.effect()[layer, head, column, 0]))
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("to layer.head", "layer.head")


def test_the_share_recovered_is_drawn_where_there_is_one():
    sweep = swept(("layer", "pos"), ((0, 1), (0, 1, 2)), source=True)
    figure: Any = patching_grid(sweep)
    assert cells(figure.data[0]).allclose(sweep.effect().mean(-1) / -4)
    assert figure.layout.title.text == "Mean ablation of z: share of loss recovered"
    figure = patching_grid(sweep, "other", recovered=False)
    assert cells(figure.data[0]).equal(sweep.effect("other").mean(-1))
    assert "change of<br>other" in figure.data[0].colorbar.title.text
    with pytest.raises(ValueError, match="no run that activations were taken from"):
        patching_grid(swept(("layer", "pos"), ((0,), (0,))), recovered=True)


def test_noising_goes_the_way_to_the_corrupted_run():
    task = LinearRegression(x_dim=2, n_context=3)
    cfg = TransformerConfig(x_dim=2, n_context=3, n_layers=2, n_heads=2, initializer_range=0.4)
    model, prompts = HookedTransformer(cfg, seed=0).eval(), task.sample(4, seed=0)
    corrupted = corrupt(prompts, "labels")
    for sweep in (
        patch(model, prompts, corrupted, direction="noising"),
        patch_paths(model, prompts, corrupted, direction="noising"),
    ):
        figure: Any = patching_grid(sweep)
        assert figure.layout.title.text.endswith(": share of the way to the corrupted loss")
        assert "of the way to the corrupted loss" in figure.data[0].hovertemplate
        assert "of the way to the corrupted loss" in figure.data[0].colorbar.title.text.replace("<br>", " ")
    figure = patching_grid(patch(model, prompts, corrupted, direction="noising"), recovered=False)
    assert figure.layout.title.text == "Noising z: change of loss"
    figure = patching_grid(patch(model, prompts, corrupted))
    assert figure.layout.title.text == "Denoising z: share of loss recovered"


def test_equal_labels_keep_their_columns():
    sweep = swept(("layer", "pos"), ((0,), (0, 1, 2)))
    (heat,) = patching_grid(sweep, labels=["A", "B", "A"]).data
    assert heat.x == ("A (0)", "B", "A (2)")
    with pytest.raises(ValueError, match="2 labels, but the sweep has pos 2"):
        patching_grid(sweep, labels=["A", "B"])
    by_head = swept(("layer", "head"), ((0,), (0, 1, 2)))
    assert patching_grid(by_head, labels=["of positions"]).data[0].x == ("0", "1", "2")


@pytest.mark.parametrize(
    ("heads", "positions", "columns"), [(5, 10, 4), (5, 41, 2), (1, 41, 1)], ids=["short", "long", "one head"]
)
def test_the_lowest_panel_of_each_column_has_its_positions_written(heads, positions, columns):
    sweep = swept(("layer", "pos", "head"), ((0, 1), tuple(range(positions)), tuple(range(heads))))
    figure: Any = patching_grid(sweep)
    axes = [figure.layout[trace.xaxis.replace("x", "xaxis")] for trace in figure.data]
    lowest = min(heads, columns)
    assert [axis.title.text == "position" for axis in axes] == [False] * (heads - lowest) + [True] * lowest
    assert all(axis.showticklabels is not False for axis in axes[-columns:])
    assert all(trace.texttemplate is None for trace in figure.data)
    assert figure.layout.height < 800


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("layer",), "2 to 4 axes"),
        (("layer", "head", "pos", "layer_2", "head_2"), "2 to 4 axes"),
        (("head", "pos"), "with layers"),
    ],
)
def test_other_numbers_of_axes_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        patching_grid(swept(axes, tuple((0, 1) for _ in axes)))


def test_a_sweep_without_the_metric_is_refused():
    with pytest.raises(ValueError, match="no metric 'los' was measured"):
        patching_grid(swept(("layer", "head"), ((0,), (0,))), "los")
    bare = Sweep("mean ablation of z", ("layer", "head"), ((0,), (0,)), None, torch.zeros(N, 1))
    with pytest.raises(ValueError, match="has no metric yet"):
        patching_grid(bare)


def test_effects_that_are_nothing_or_not_finite_are_drawn():
    sweep = swept(("layer", "head"), ((0,), (0, 1)))
    silent = Sweep(sweep.what, sweep.axes, sweep.indices, None, sweep.unpatched, None,
                   {"loss": torch.zeros(1, 2, N)}, {"loss": torch.zeros(N)})  # fmt: skip
    (heat,) = patching_grid(silent).data
    assert heat.zmax > 0
    assert [list(row) for row in heat.text] == [["0", "0"]]
    diverged = Sweep(sweep.what, sweep.axes, sweep.indices, None, sweep.unpatched, None,
                     {"loss": torch.tensor([[[torch.inf] * N, [1.0] * N]])}, {"loss": torch.zeros(N)})  # fmt: skip
    assert patching_grid(diverged).data[0].zmax == 1


def test_all_sweeps_of_the_package_have_their_picture():
    task = LinearRegression(x_dim=2, n_context=3)
    cfg = TransformerConfig(
        x_dim=2, n_context=3, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax",
        initializer_range=0.4,
    )  # fmt: skip
    model = HookedTransformer(cfg, seed=0).eval()
    prompts = task.sample(4, seed=0)
    corrupted = corrupt(prompts, "labels")
    shapes = {
        "stream": (patch(model, prompts, corrupted, "resid_pre"), [(2, 7)]),
        "pattern": (patch(model, prompts, corrupted, "pattern", ("layer", "head", "query")), [(2, 7)] * 2),
        "pairs": (ablate(model, prompts, "z", pairs=True), [(4, 4)]),
        "layers in pairs": (ablate(model, prompts, "attn_out", ("layer",), pairs=True), [(2, 2)]),
        "directions": (ablate(model, prompts, "resid_pre", ("layer",), directions=torch.eye(8)[:3]), [(2, 3)]),
        "directions at positions": (ablate(model, prompts, "resid_pre", directions=torch.eye(8)[:3]), [(2, 7)] * 3),
        "paths": (patch_paths(model, prompts, corrupted, "q"), [(4, 4)]),
    }
    for name, (sweep, expected) in shapes.items():
        assert [tuple(cells(trace).shape) for trace in patching_grid(sweep).data] == expected, name
