"""Growth of costs: fitted slopes, the work that is counted, and the picture of both."""

import numpy as np
import pytest
import torch

from tests.pictures import figure_faults
from tests.scripts import import_script

growth = import_script("benchmarks.growth")


def test_the_slope_on_logarithmic_axes_is_the_power():
    sizes = [1, 2, 4, 8, 16]
    assert growth.power_law(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx((1.5, 3))


def test_straightness_is_1_on_a_line_and_less_on_a_parabola():
    sizes, parabola = [1, 2, 4, 8, 16], [1, 4, 16, 64, 256]
    assert growth.straightness(sizes, [3 + 2 * size for size in sizes]) == pytest.approx(1)
    assert growth.straightness(sizes, parabola) == pytest.approx(np.corrcoef(sizes, parabola)[0, 1] ** 2)


def test_the_work_of_a_product_is_counted():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert growth.work_of(lambda: a @ b, "layers") == pytest.approx(4 * (3 * 5 + 5 * 7 + 3 * 7) / 1e6)
    assert growth.work_of(lambda: a @ b, "width") == pytest.approx(2 * 3 * 5 * 7 / 1e6)


def test_rows_have_the_slope_of_each_round_and_a_bar_of_the_work():
    sizes = [1, 2, 4, 8]
    times = [[5 * size**power for size in sizes] for power in (1.4, 1.2)]
    slope, line = growth.rows_of("predicting", "layers", {"sizes": sizes, "work": sizes, "milliseconds": times})
    assert slope.value == pytest.approx(1.3)
    assert slope.bar == "<= 1.10"
    assert slope.is_met is False
    assert line.value < 1


@pytest.mark.parametrize("what", ["training", "predicting", "all outputs"])
def test_a_longer_batch_moves_proportionally_more_bytes(what):
    with_sizes = [growth.MAKE[what]("prompts", size)[1] for size in (64, 128)]
    few, many = (growth.work_of(call, "prompts") for call in with_sizes)
    assert 1.8 < many / few < 2.2


def test_only_the_query_is_computed_in_the_last_layer_of_predicting():
    layers = {n: growth.predicting("layers", n)[1] for n in (1, 2, 3)}
    one, two, three = (growth.work_of(call, "layers") for call in layers.values())
    assert one < 0.5 * (two - one)
    assert three - two > 1.5 * one


def test_the_picture_shows_every_panel():
    costs = {"work": [1, 2, 4], "milliseconds": [[2, 3, 5], [2, 3, 6]], "sizes": [10, 20, 40]}
    rows = [{"data": {"what": what, "by": by, **costs}} for what, names in growth.GROWING.items() for by in names]
    figure = growth.picture([*rows, {"quantity": "without measurements", "data": None}])
    assert figure_faults(figure) == []
    assert len(figure.data) == 3 * len(rows)
    assert len({trace.name for trace in figure.data if trace.showlegend}) == len(growth.GROWING) + 1
