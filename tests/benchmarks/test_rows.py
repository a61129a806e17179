import pytest
import torch

from mechicl.statistics import interval
from tests.scripts import import_script

rows = import_script("benchmarks.rows")


def test_rounds_alternate_and_ratios_are_taken_round_by_round():
    order = []

    def measure(name, values):
        values = iter(values)

        def call():
            order.append(name)
            return next(values)

        return call

    speeds = rows.alternate({"ours": measure("ours", [2.0, 8.0]), "theirs": measure("theirs", [1.0, 2.0])}, 2)
    assert order == ["ours", "theirs", "ours", "theirs"]
    row = rows.row("speed", rows.ratios(speeds["ours"], speeds["theirs"]), ">= 3")
    assert (row.value, row.low, row.high, row.spread) == (3.0, 2.0, 4.0, "median, 2 rounds")


def test_an_interval_is_a_row_of_its_mean_and_ends():
    mean = interval(torch.tensor([1.0, 2.0, 3.0]))
    row = rows.row("loss", mean, over="prompts")
    assert (row.value, row.low, row.high) == pytest.approx((2.0, float(mean.low), float(mean.high)))
    assert row.spread == "mean, 95% over 3 prompts"


@pytest.mark.parametrize(
    ("bar", "value", "met"),
    [
        (">= 4.0", 4.0, True), (">= 4", 3.99, False), ("<= 1e-5", 2e-5, False), ("<= 1e-5", 1e-6, True),
        ("< 60", 60.0, False), ("< 60", 59.0, True), ("0.995 to 1.005", 1.0, True), ("0.99 to 1.01", 1.02, False),
        ("1", 1.0, True), ("1", 0.9, False), ("shown", 3.0, None), ("near chance", 3.0, None),
    ],
)  # fmt: skip
def test_a_bar_is_met_or_missed_or_none(bar, value, met):
    row = rows.row("quantity", [value], bar)
    assert row.is_met is met
    assert ("MISSED" in rows.table([row])) is (met is False)
