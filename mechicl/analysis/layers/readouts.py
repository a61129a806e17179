"""Linear readouts of every layer, fitted in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import LayerLearner, Lens, check_layer, prediction_rows
from mechicl.analysis.layers.linear_maps import PENALTIES, Folds, RidgeSums, count_sums
from mechicl.base.arguments import NonNegative, check_fields, checked
from mechicl.base.progress import progress_bar
from mechicl.learners import prompt_batches
from mechicl.models import LayeredModel
from mechicl.prompts import Prompts

STREAM_COPIES = 4  # the sums of a fit copy the streams, in float64 and with a column of ones


@dataclass(frozen=True, eq=False)
class Readouts(LayerLearner):
    """A model read after each layer by fitted linear readouts, the result of `fit_readouts`.

    It is a learner whose steps are the layers: `trajectory(prompts)` predicts after each, `errors(prompts)` measures
    their errors. Step 0 is before the first layer.

    Attributes:
        weights: `[layer point d_model y]`; one point where the readout is shared.
        penalties: chosen ridge penalties `[layer point y]`, relative to the mean variance of the stream.
        normalized: for each layer, True if its stream is normalised (layer norm without weights) before it is read.
        shared: True if all points of a layer share one readout.
    """

    model: LayeredModel
    weights: Float[Tensor, "layer point d_model y"]
    bias: Float[Tensor, "layer point y"]
    penalties: Float[Tensor, "layer point y"]
    normalized: tuple[bool, ...]
    shared: bool
    name: str = "layer"

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def read(
        self, layer: int, stream: Float[Tensor, "prompt point query d_model"], first_point: int = 0
    ) -> Float[Tensor, "prompt point query y"]:
        """Apply the readout of a layer to its stream, at the points from `first_point` on."""
        fitted = self.weights.shape[1]
        check_layer(layer, self.model.cfg.n_layers)
        if self.shared or not self.gives_all_points:
            points = torch.zeros(stream.shape[1], dtype=torch.long)
        else:
            points = torch.arange(first_point, first_point + stream.shape[1])
            if points[-1] >= fitted:
                raise ValueError(f"readouts were fitted for {fitted} points, the prompts have {points[-1] + 1}")
        stream = _normalized(self.model, stream) if self.normalized[layer] else stream
        weights, bias = self.weights[layer][points].to(stream), self.bias[layer][points].to(stream)
        read = einsum(stream, weights, "prompt point query model, point model y -> prompt point query y")
        return read + bias[:, None]


@checked
def fit_readouts(
    model: LayeredModel,
    prompts: Prompts,
    *,
    shared: bool = False,
    normalize: bool | None = None,
    penalties: Sequence[NonNegative] = PENALTIES,
    folds: Folds = 4,
    progress: bool | None = None,
) -> Readouts:
    """Fit a linear readout after each layer in closed form, to see what the model could predict from there.

    Ridge regression from the residual stream at a point's position to its target. A model that predicts every prefix in
    one pass gets a readout for each point, any other model one for the query. All layers are fitted in one pass over
    the prompts, and memory does not grow with their number. Source: Fu et al. 2024, B.1 (who train the readouts).

    Args:
        model: a mechicl model, or a module wrapped by `mechicl.wrap`.
        prompts: prompts to fit on, at least as many as folds; measure on others.
        shared: one readout for all points of a layer instead of one per point.
        normalize: read all streams (True) or none (False) through a layer norm without weights. By default, as in the
            paper, only the last stream is, if the model has a final norm: its readout can then equal the model's head.
        penalties: candidate ridge penalties, relative to the mean variance of the stream; cross-validation chooses one
            for each layer, point and target dimension.

    Returns:
        A `Readouts`, a learner whose steps are the layers, from 0 (before the first layer) to n_layers:
        `trajectory(prompts)` has the predictions after each, `errors(prompts)` their squared errors. `match` and other
        comparisons take it too.

    Example:
        >>> readouts = fit_readouts(model, task.sample(1024, seed=0))
        >>> print(readouts.errors(prompts))  # at the query; at="points" for the mean over all prefixes
    """
    normalized = _normalized_layers(model, normalize)
    if len(prompts) < folds:
        raise ValueError(f"{folds}-fold cross-validation of {len(prompts)} prompts: give more prompts")
    sums = RidgeSums(folds)
    n_layers, _, n_points, width = _read_streams(model, prompts[:1], normalized)[0].shape
    held = count_sums((n_layers,) if shared else (n_layers, n_points), width, prompts.y_dim, folds)
    batches = list(prompt_batches(Lens(model), prompts, copies=STREAM_COPIES, reserved=held))
    for part in progress_bar(batches, unit="batch", progress=progress, desc="readouts"):
        streams, targets = _read_streams(model, part, normalized)
        if shared:
            sums.add(streams, targets[None])
        else:
            sums.add(streams.transpose(1, 2)[..., None, :], targets.transpose(0, 1)[None, :, :, None])
    maps = sums.solve(penalties)
    fitted = (part[:, None] if shared else part for part in (maps.weights, maps.bias, maps.penalties))
    weights, bias, chosen = fitted
    return Readouts(model, weights, bias, chosen, normalized, shared)


StreamsAndTargets = tuple[Float[Tensor, "layer prompt point d_model"], Float[Tensor, "prompt point y"]]


@torch.no_grad()
def _read_streams(model: LayeredModel, prompts: Prompts, normalized: tuple[bool, ...]) -> StreamsAndTargets:
    layers = zip(model.layer_streams(prompts, prediction_rows(model, prompts)), normalized, strict=True)
    streams = torch.stack([_normalized(model, s) if norm else s for s, norm in layers])
    return streams, prompts.ys[:, -streams.shape[2] :].to(streams)


def _normalized_layers(model: LayeredModel, normalize: bool | None) -> tuple[bool, ...]:
    n_layers = model.cfg.n_layers
    if normalize and not hasattr(model.cfg, "eps"):
        raise ValueError(f"{type(model).__name__} has no layer norm to read its streams through: normalize=False")
    if normalize is None:
        return (*[False] * n_layers, bool(getattr(model.cfg, "final_norm", False)))
    return (normalize,) * (n_layers + 1)


def _normalized(model: LayeredModel, stream: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(stream, stream.shape[-1:], eps=model.cfg.eps)
