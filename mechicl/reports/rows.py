"""Rows of reports: a measured quantity next to its published value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.checkpoints.study import Models
from mechicl.statistics import Interval, crossed_interval, mean_of_intervals

ROW_ROUNDING = 1e-6
"""An interval this near to a whole number (for 0: a thousandth of it) differs from it by float32 rounding only."""
SLACK = 0.05
"""Relative difference up to which two numbers agree, and absolute difference from 0 or 1 that counts as near."""


class NoNumberError(TypeError):
    """A check needs a number, but the quantity was measured as text."""


@dataclass(frozen=True)
class Row:
    """A line of the table "published / measured / interval".

    Attributes:
        quantity: name of the quantity.
        published: value as printed in the paper; None where the paper prints no number.
        measured: measured value with its interval; a number without one where no samples exist, or text.
        over: samples of the interval: "seeds" or "prompts".
        note: how to read it.
        agrees: True if the paper is right; None where `published` is None, or a number that is compared by `equal`.
        source: the key in sources.bib of the paper that published it.
        section: title of the section that shows it.
        share: True for a share of something, which is shown in percent.
    """

    quantity: str
    published: float | str | None
    measured: Interval | float | str
    over: str = ""
    note: str = ""
    agrees: bool | None = None
    source: str = ""
    section: str = ""
    share: bool = False

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the cells of the line as text: quantity, published, measured, samples, note."""
        published = "—" if self.published is None else str(self.published)
        samples = self.over
        if isinstance(self.measured, Interval):
            samples = f"{100 * self.measured.level:g}%, {self.measured.n:,} {self.over}"
        return self.quantity, published, str(self), samples, self.note

    def __str__(self) -> str:
        """Return the measured value alone."""
        if isinstance(self.measured, str):
            return self.measured
        return percent(self.measured) if self.share else as_text(self.measured)

    @property
    def ends(self) -> tuple[float, float, float]:
        """Lower end, mean and upper end of the measured interval: see `ends`."""
        return ends(self)

    @property
    def verdict(self) -> Literal["agrees", "differs", "not printed"]:
        """Outcome of the comparison with the paper."""
        agrees = self.agrees
        if agrees is None and isinstance(self.published, int | float) and not isinstance(self.measured, str):
            agrees = equal(self, self.published)
        return "not printed" if agrees is None or self.published is None else "agrees" if agrees else "differs"

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data, without fields that have their defaults."""
        saved = asdict(self)
        del saved["agrees"]
        if isinstance(self.measured, Interval) and self.measured.middle == "mean":
            del saved["measured"]["middle"]
        return {name: value for name, value in saved.items() if value or name not in ("source", "section", "share")}


Value = Row | Interval | float | str


def ends(value: Value) -> tuple[float, float, float]:
    """Return the lower end, mean and upper end of an interval, or three times a number that has none."""
    measured = value.measured if isinstance(value, Row) else value
    if isinstance(measured, str):
        raise NoNumberError(f"a check needs a number, and {measured!r} was measured")
    if isinstance(measured, Interval):
        return measured.low, measured.mean, measured.high
    return measured, measured, measured


def near(value: Value, target: float) -> bool:
    """Return True if the mean is within 0.05 of a number and the interval is at most that wide on each side."""
    low, mean, high = ends(value)
    return abs(mean - target) <= SLACK and high - low <= 2 * SLACK


def equal(value: Value, target: Value) -> bool:
    """Return True if a value is within 5% of a number, or its interval covers it and is at most half of it wide."""
    low, mean, high = ends(value)
    number = ends(target)[1]
    return high - low <= abs(number) / 2 and (low <= number <= high or abs(mean - number) <= SLACK * abs(number))


def below(value: Value, other: Value) -> bool:
    """Return True if the whole interval lies below another, or below a number."""
    return ends(value)[2] < ends(other)[0]


def above(value: Value, other: Value) -> bool:
    """Return True if the whole interval lies above another, or above a number."""
    return ends(value)[0] > ends(other)[2]


def without_stuck(measured: Callable[[list[int]], Interval], checkpoint: Models) -> str:
    """Return a note with the interval that `measured` returns for the seeds that are not stuck; empty if none is."""
    stuck, n = checkpoint.stuck, len(checkpoint.models)
    if not stuck:
        return ""
    return f"without {len(stuck)} of {n} stuck seeds: {as_text(measured([i for i in range(n) if i not in stuck]))}"


def over_seeds_and_prompts(
    values: Float[Tensor, "seed prompt"], checkpoint: Models, over: Tensor | None = None, *, trim: float = 0.0
) -> tuple[Interval, str, str]:
    """Return `measured`, `over` and `note` of a row: an interval over seeds and prompts; with and without stuck seeds.

    `values` has one per model and prompt; `over` (a divisor) and `trim` are as in `crossed_interval`. With one model
    the interval is over prompts.
    """
    reference = None if over is None else over.reshape(-1, values.shape[1])

    def measured(kept: Sequence[int]) -> Interval:
        own = reference[kept] if reference is not None and len(reference) > 1 else reference
        return crossed_interval(values[kept], own, trim=trim)

    found, note = measured([*range(len(values))]), without_stuck(measured, checkpoint)
    if len(values) > 1:
        return found, seeds_and_prompts(*values.shape), note
    return replace(found, n=int(values.isfinite().sum())), "prompts", note


def seeds_and_prompts(n_seeds: int, n_prompts: int) -> str:
    """Return the samples of an interval over seeds and prompts, for the row's `over`: its number of seeds is `n`."""
    return f"seed{'s' if n_seeds != 1 else ''} and {n_prompts:,} prompts"


def over_models(
    quantity: str, values: Sequence[Interval], checkpoint: Models | None = None,
    printed: float | str | None = None, note: str = "", check: Callable[[Value], bool] | None = None, source: str = "",
) -> Row:  # fmt: skip
    """Make a row of a quantity over the models of a checkpoint and the prompts, or over prompts if there is one model.

    `values` is by model, with intervals over prompts; the `checkpoint` is None if some have none. `printed` is the
    published value of the paper `source`, and `check` decides from the measured one if the paper is right.
    """
    measured, over = values[0], "prompts"
    if len(values) > 1:
        known = [value for value in values if math.isfinite(value.mean)]
        measured = mean_of_intervals(known) if known else Interval(math.nan, math.nan, math.nan, 0)
        over = seeds_and_prompts(len(known), min((value.n for value in known), default=0))
        if checkpoint is not None and len(known) == len(checkpoint.models):
            without = without_stuck(lambda kept: mean_of_intervals([values[i] for i in kept]), checkpoint)
            note = "; ".join(filter(None, (note, without)))
    return Row(quantity, printed, measured, over, note, check and check(measured), source)


def as_text(value: Interval | float) -> str:
    """Format a number or interval to the known digits; name differences that are only rounding: "1 (to rounding)"."""
    if not isinstance(value, Interval):
        large = abs(value) >= 1000
        return "rounding" if 0 < abs(value) < ROW_ROUNDING / 1000 else f"{value:,.0f}" if large else f"{value:.4g}"
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return f"{value.mean:.4g}"  # of one sample
    whole = round(value.mean)
    if max(value.high - whole, whole - value.low) < (ROW_ROUNDING if whole else ROW_ROUNDING / 1000):
        if value.half_width or value.mean != whole:
            return f"{whole} (to rounding)" if whole else "rounding"
        return f"{whole}"
    return f"{value.mean:.6g}" if value.half_width < ROW_ROUNDING * abs(value.mean) else str(value)


def percent(value: Interval | float) -> str:
    """Format a share in percent, with half the width of its interval."""
    mean = value.mean if isinstance(value, Interval) else value
    if isinstance(value, Interval) and value.cut:
        return f"{mean:.0%} ({value.low:.0%} to {value.high:.0%})"
    if abs(mean) < 1e-9:
        return "0% (to rounding)"
    if mean > 10:
        return "more than 1,000%"
    large = abs(mean) >= 0.1
    number = f"{100 * mean:.0f}%" if large else f"{_plain(100 * mean, 2)}%"
    half = value.half_width if isinstance(value, Interval) else 0.0
    if not half > 0 or (large and half < 0.005):
        return number
    return f"{number} ± {100 * half:.0f}%" if large or half > 0.095 else f"{number} ± {_plain(100 * half, 1)}%"


def _plain(value: float, digits: int) -> str:
    """Format to significant digits, without an exponent."""
    return f"{Decimal(f'{value:.{digits}g}'):f}"
