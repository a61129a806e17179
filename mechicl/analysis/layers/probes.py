"""Linear probes for the quantities of an algorithm, at every layer and position."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.algorithms import ols
from mechicl.algorithms.spectra import sums_before
from mechicl.analysis.layers.layer_learners import Lens
from mechicl.analysis.layers.readouts import RidgeSums, count_sums
from mechicl.base.arguments import calling, checked
from mechicl.base.progress import progress_bar
from mechicl.learners import Trajectory, prompt_batches
from mechicl.models import LayeredModel
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.statistics.results import index_of

Quantity = Callable[[Prompts], Float[Tensor, "prompt point quantity"]]
"""A quantity of each prefix: entry t depends on the points before point t."""

GROUP = 256  # prompts among which the control task exchanges quantities


@checked
def cross_moments(prompts: Prompts) -> Float[Tensor, "prompt point quantity"]:
    """Compute `XᵀY` of each prefix, to probe for: one step of gradient descent from 0 has weights proportional to it.

    Entry t of `point` sums over the t points before point t: zeros for t = 0, the whole context at the query. The axis
    `quantity` is the matrix `[x y]` row by row.
    """
    products = prompts.xs[..., :, None] * prompts.ys[..., None, :]
    return sums_before(products).flatten(2)


@checked
def second_moments(prompts: Prompts) -> Float[Tensor, "prompt point quantity"]:
    """Compute `S = XᵀX` of each prefix, to probe for.

    Entry t of `point` sums over the t points before point t: zeros for t = 0, the whole context at the query. The axis
    `quantity` is the upper triangle of S, the diagonal included, row by row.
    """
    rows, columns = torch.triu_indices(prompts.x_dim, prompts.x_dim)
    return sums_before(prompts.xs[..., :, None] * prompts.xs[..., None, :])[..., rows, columns]


@checked
def algorithm_weights(algorithm: Callable[..., Trajectory], **settings: Any) -> Quantity:
    """Make a quantity to probe for: an algorithm's weights after its last step.

    Args:
        algorithm: an algorithm of `mechicl.algorithms` that takes `with_weights=True`.
        settings: its other arguments, such as `steps`.

    Returns:
        A function of prompts for `probe`, which returns `[prompt point quantity]`: entry t of `point` has the weights
        fitted to the t points before point t, as a matrix `[x y]` row by row.

    Example:
        >>> algorithm_weights(algorithms.newton, steps=[4])(prompts).shape
        torch.Size([64, 21, 5])
    """

    @checked
    def weights(prompts: Prompts) -> Float[Tensor, "prompt point quantity"]:
        by_step = algorithm(prompts, with_weights=True, **settings).weights
        assert by_step is not None
        return by_step[-1].flatten(2)

    return weights


@checked
def ols_weights(prompts: Prompts) -> Float[Tensor, "prompt point quantity"]:
    """Compute the minimum-norm least-squares weights of each prefix, as targets of probes (`probe`).

    Entry t of `point` is fitted to the t points before point t; `quantity` is the matrix `[x y]` row by row.
    """
    return algorithm_weights(ols)(prompts)


@dataclass(frozen=True, eq=False)
class ProbeResult(Result):
    """Errors of linear probes for quantities in the residual stream, on held-out prompts.

    The axis `layer` has the streams before the first layer (0) and after each layer.

    Attributes:
        positions: labels of the token positions.
        squared_errors: errors of the probes, `[quantity layer pos prompt]`, summed over the quantity's entries.
        deviations: squared distance of the quantity from its mean over held-out prompts, `[quantity 1 pos prompt]`.
        control_squared_errors: errors of probes fitted to the quantity of another prompt.
    """

    quantities: tuple[str, ...]
    positions: tuple[str, ...]
    squared_errors: Float[Tensor, "quantity layer pos prompt"]
    deviations: Float[Tensor, "quantity one pos prompt"]
    control_squared_errors: Float[Tensor, "quantity layer pos prompt"]

    def explained(self) -> Float[Tensor, "quantity layer pos"]:
        """Return the explained share of the variance, R²; NaN where a quantity is constant (before the first point)."""
        return self._explained(self.squared_errors)

    def control(self) -> Float[Tensor, "quantity layer pos"]:
        """Return R² of the control task, the result of fitting alone; at least 0, the R² of predicting the mean."""
        return self._explained(self.control_squared_errors).clamp(min=0)

    def selectivity(self) -> Float[Tensor, "quantity layer pos"]:
        """Return R² minus the control's (Hewitt & Liang 2019)."""
        return self.explained() - self.control()

    def best(self, quantity: str, positions: Sequence[int] | None = None) -> tuple[int, int, Interval]:
        """Return layer and position with the largest R², chosen on every other prompt, and the R² there on the rest.

        Args:
            positions: positions to choose from; all by default.
        """
        halves = ({name: values[..., i::2] for name, values in self.samples().items()} for i in (0, 1))
        chosen, measured = (dataclasses.replace(self, **half) for half in halves)
        explained = chosen.explained()[index_of("quantity", quantity, self.quantities)].nan_to_num(-math.inf)
        looked_at = list(range(explained.shape[1]) if positions is None else positions)
        layer, place = divmod(int(explained[:, looked_at].argmax()), len(looked_at))
        position = looked_at[place]
        return layer, position, measured.interval(quantity, layer, position)

    def interval(self, quantity: str, layer: int, position: int, level: float = 0.95) -> Interval:
        """Return R² of one probe with an interval over held-out prompts."""
        i = index_of("quantity", quantity, self.quantities)
        n_layers, n_pos = self.squared_errors.shape[1:3]
        if not (0 <= layer < n_layers and 0 <= position < n_pos):
            raise ValueError(f"layer must be 0 to {n_layers - 1} and position 0 to {n_pos - 1}: {layer}, {position}")
        return 1 - ratio_interval(self.squared_errors[i, layer, position], self.deviations[i, 0, position], level)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per quantity, layer and position: R², the control's R² and selectivity."""
        explained, control = self.explained(), self.control()
        rows = []
        for q, layer, pos in np.ndindex(*explained.shape):
            r2, of_control = explained[q, layer, pos].item(), control[q, layer, pos].item()
            rows.append({
                "quantity": self.quantities[q], "layer": layer, "pos": pos, "token": self.positions[pos],
                "explained": r2, "control": of_control, "selectivity": r2 - of_control,
            })  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        lines = []
        for i, name in enumerate(self.quantities):
            layer, position, best = self.best(name)
            control = self.control()[i, layer, position].item()
            place = f"after layer {layer - 1}" if layer else "of the embedding"
            where = f"in the stream {place} at {self.positions[position]}"
            lines.append((name, f"R² {best} {where} (control {control:.3g})"))
        return lines

    def _explained(self, errors: Tensor) -> Tensor:
        varies = self.deviations.mean(-1)
        # a constant quantity has no R²: 0 / 0 up to rounding, which differs from position to position
        constant = varies <= 1e-12 * varies.amax((1, 2), keepdim=True)
        return 1 - errors.mean(-1) / varies.masked_fill(constant, torch.nan)


@checked
def probe(
    model: LayeredModel,
    quantities: dict[str, Quantity],
    fitting: Prompts,
    held_out: Prompts,
    *,
    progress: bool | None = None,
) -> ProbeResult:
    """Fit linear probes for quantities at every layer and token position, and measure them on held-out prompts.

    Use it to find where a quantity can be read off the residual stream: a probe is a ridge regression from the stream
    to the quantity of the points that the position can see, with a penalty chosen by four-fold cross-validation for
    each layer, position and entry of a quantity. The control task fits the same probes to the quantities of another
    prompt. Source: quantities of Fu et al. 2024, section 3; Akyürek et al. 2023, section 4.3; controls as in
    Hewitt & Liang 2019.

    Args:
        model: a causal model on interleaved prompts, or one from `mechicl.wrap(..., points=...)` in which no position
            sees later points.
        quantities: functions of prompts by name: `cross_moments`, `second_moments`, `ols_weights`,
            `algorithm_weights(newton, steps=[k])`, or your own: `[prompt point quantity]`, whose entry t may depend on
            the t points before point t.
        fitting: prompts to fit on.
        held_out: prompts to measure on, with the same number of points.

    Returns:
        A `ProbeResult`: `explained()` is R² on held-out prompts `[quantity layer pos]` (1 for a perfect probe),
        `control()` that of the control task; `best(quantity)` returns the place with the largest R².

    Example:
        >>> result = probe(model, {"OLS weights": ols_weights}, task.sample(256, seed=0), prompts)
        >>> layer, position, explained = result.best("OLS weights")
    """
    if not quantities:
        raise ValueError("probe() needs at least one quantity")
    if fitting.n_context != held_out.n_context or len(fitting) == 0 or len(held_out) < 2:
        raise ValueError(f"fitting and held_out need the same number of points, got {fitting} and {held_out}")
    names, n_points = tuple(quantities), model.count_points(fitting)
    sums = RidgeSums()
    for streams, targets, _ in _batches(model, quantities, n_points, fitting, progress, with_sums=True):
        sums.add(streams.transpose(1, 2)[..., None, :], targets.transpose(0, 1)[None, :, :, None])
    weights, bias = sums.solve()
    parts, values = [], []
    for streams, targets, sizes in _batches(model, quantities, n_points, held_out, progress):
        predicted = streams.double().transpose(1, 2) @ weights + bias[:, :, None]
        squared = (predicted - targets.transpose(0, 1)).square().split(sizes, dim=-1)
        parts.append(torch.stack([group.sum(-1) for group in squared]))
        values.append(targets.split(sizes, dim=-1)[: len(names)])
    errors = torch.cat(parts, dim=-1)
    wholes = [torch.cat(batches) for batches in zip(*values, strict=True)]
    deviations = torch.stack([(whole - whole.mean(0)).square().sum(-1).T[None] for whole in wholes])
    form = model.cfg.format  # None for a function as encode
    labels = tuple(form.labels(fitting.n_context) if form else map(str, range(len(n_points))))
    return ProbeResult(names, labels, errors[: len(names)], deviations, errors[len(names) :])


def _at_positions(
    name: str, quantity: Quantity, n_points: Int[Tensor, "pos"], prompts: Prompts
) -> Float[Tensor, "prompt pos quantity"]:
    """The quantity at each token position: that of the points that the position can depend on."""
    with calling(f"quantity {name!r} (called with prompts in float64)"):
        values = torch.as_tensor(quantity(prompts.to(torch.float64))).cpu()
    if values.ndim != 3 or values.shape[:2] != prompts.xs.shape[:2]:
        raise ValueError(f"quantity {name!r} must give [prompt point quantity] for {prompts}, got {list(values.shape)}")
    return values[:, n_points]


def _batches(
    model: LayeredModel,
    quantities: dict[str, Quantity],
    n_points: Int[Tensor, "pos"],
    prompts: Prompts,
    progress: bool | None,
    with_sums: bool = False,
) -> Iterator[tuple[Float[Tensor, "layer prompt pos d_model"], Float[Tensor, "prompt pos quantity"], list[int]]]:
    """Yield streams at all positions; all quantities side by side, then those of each prompt's partner; their sizes.

    The partner in the control task is the next prompt of a group, drawn independently. The size of groups does not
    depend on the memory, so that results do not either. The sums of a fit need memory too.
    """
    groups, sums = torch.arange(len(prompts)).chunk(-(-len(prompts) // GROUP)), 0.0
    for index in progress_bar(groups, unit="batch", progress=progress, desc="probes"):
        group = prompts[index.to(prompts.device)]
        values = [_at_positions(name, quantity, n_points, group) for name, quantity in quantities.items()]
        targets = torch.cat([*values, *(each.roll(1, 0) for each in values)], dim=-1)
        sizes = [each.shape[-1] for each in values] * 2
        if with_sums and not sums:
            with torch.no_grad():
                shapes = [stream.shape for stream in model.layer_streams(group[:1], "positions")]
            sums = count_sums((len(shapes), shapes[0][-2]), shapes[0][-1], targets.shape[-1])
        # all positions, twice as many as points, and again in float64 for the sums
        for part in prompt_batches(Lens(model), group, copies=8, reserved=sums):
            with torch.no_grad():
                streams = torch.stack(list(model.layer_streams(part, "positions"))).cpu()
            yield streams, targets[: len(part)], sizes
            targets = targets[len(part) :]
