"""Linear readouts of every layer, fitted in closed form: many ridge regressions at once, from running sums."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.layers.layer_learners import LayerLearner, Lens, check_layer, prediction_rows
from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.learners import prompt_batches
from mechicl.models import LayeredModel
from mechicl.models.layered import fast_batch
from mechicl.prompts import Prompts

PENALTIES = tuple(10.0**e for e in range(-12, 3))  # candidates, relative to the mean variance of the features
FOLDS = 4  # of the cross-validation that chooses one
WORK = 8  # matrices per site for solving: sums without a fold, covariances, eigenvectors and their work space


class RidgeSums:
    """Running sums from which maps `features @ weights + bias` follow, one at each site (a layer, a position, ...).

    Samples fall into folds by the number of their prompt, so that all samples of a prompt are validated together.
    """

    n_prompts = 0

    def add(
        self, features: Float[Tensor, "*site prompt sample feature"], targets: Float[Tensor, "*#site prompt sample y"]
    ) -> None:
        """Add a batch of prompts, each with its samples at every site; targets may have sites of size 1."""
        features, targets = features.double(), targets.to(features.device).double()
        if self.n_prompts == 0:
            *site, _, _, n_features = features.shape
            size, n_targets = n_features + 1, targets.shape[-1]
            # about the first batch's means, so that large means cost no digits
            self.shift = features.mean((-3, -2), keepdim=True)
            self.target_shift = targets.mean((-3, -2), keepdim=True)
            self.second = features.new_zeros(FOLDS, *site, size, size)
            self.cross = features.new_zeros(FOLDS, *site, size, n_targets)
            self.targets = features.new_zeros(FOLDS, *site, n_targets)
        targets = targets - self.target_shift
        ones = torch.ones_like(features[..., :1])
        extended = torch.cat([features - self.shift, ones], dim=-1)
        n = features.shape[-3]
        fold_of = (torch.arange(n, device=features.device) + self.n_prompts) % FOLDS
        for fold in range(FOLDS):
            inside = fold_of == fold
            x, y = extended[..., inside, :, :].flatten(-3, -2), targets[..., inside, :, :].flatten(-3, -2)
            self.second[fold] += x.mT @ x
            self.cross[fold] += x.mT @ y
            self.targets[fold] += y.square().sum(-2)
        self.n_prompts += n

    def solve(self) -> tuple[Float[Tensor, "*site feature y"], Float[Tensor, "*site y"]]:
        """Fit weights and biases by ridge regression.

        The penalty is the best one in cross-validation, chosen for every site and target.
        """
        if self.n_prompts < FOLDS:
            raise ValueError(f"{FOLDS}-fold cross-validation of {self.n_prompts} prompts: give more prompts")
        if not all(sums.isfinite().all() for sums in (*self.second, *self.cross)):
            raise ValueError("features or targets have values that are not finite: has the model diverged?")
        weights, bias = zip(*(self._solve_at(i) for i in range(self.targets.shape[1])), strict=True)
        return torch.stack(weights), torch.stack(bias)

    def _solve_at(self, first: int) -> tuple[Tensor, Tensor]:
        """The maps at one entry of the first axis of sites, so that solving needs the memory of one."""
        folds = tuple(sums[:, first] for sums in (self.second, self.cross, self.targets))
        second, cross = folds[0].sum(0), folds[1].sum(0)
        errors = torch.zeros(len(PENALTIES), *folds[2].shape[1:], dtype=torch.float64, device=second.device)
        for held_second, held_cross, held_targets in zip(*folds, strict=True):
            solver = _Solver(second - held_second, cross - held_cross)
            for i, penalty in enumerate(PENALTIES):
                maps = solver.at(torch.full_like(errors[i], penalty))
                # Σ (y - xᵀw)² = Σ y² - 2 wᵀ Σ xy + wᵀ (Σ xxᵀ) w: the fold's error follows from its sums
                explained = 2 * (maps * held_cross).sum(-2) - (maps * (held_second @ maps)).sum(-2)
                errors[i] += held_targets - explained
        chosen = torch.tensor(PENALTIES, dtype=torch.float64, device=second.device)[errors.argmin(0)]
        maps = _Solver(second, cross).at(chosen)
        weights, bias = maps[..., :-1, :], maps[..., -1, :]
        target_shift = self.target_shift.expand(*self.shift.shape[:-1], -1)  # its sites may be of size 1
        bias = bias - (self.shift[first][..., 0, :, :] @ weights)[..., 0, :] + target_shift[first][..., 0, 0, :]
        return weights, bias


def count_sums(sites: Sequence[int], n_features: int, n_targets: int) -> float:
    """Bytes for `RidgeSums` at these sites, and for solving them."""
    n_sites, size = math.prod(sites), n_features + 1
    n_matrices = (FOLDS + 1) * n_sites + WORK * n_sites / sites[0]
    return 8.0 * n_matrices * size * (size + n_targets)


class _Solver:
    """Ridge with an unpenalised bias: one eigendecomposition per site, any number of penalties."""

    def __init__(self, second: Float[Tensor, "*site size size"], cross: Float[Tensor, "*site size y"]):
        n = second[..., -1:, -1:]
        self.mean, self.target_mean = second[..., :-1, -1:] / n, cross[..., -1:, :] / n
        covariance = second[..., :-1, :-1] / n - self.mean @ self.mean.mT
        self.covariance_with_target = cross[..., :-1, :] / n - self.mean @ self.target_mean
        # with C = V diag(λ) Vᵀ, ridge is V diag(1 / (λ + penalty)) Vᵀ c: each further penalty costs two products
        self.eigenvalues, self.vectors = torch.linalg.eigh(covariance)
        self.eigenvalues = self.eigenvalues.clamp(min=0)
        self.rotated = self.vectors.mT @ self.covariance_with_target

    def at(self, penalties: Float[Tensor, "*site y"]) -> Float[Tensor, "*site size y"]:
        eigenvalues = self.eigenvalues[..., None]
        # directions without variance, or with so little that it is rounding noise, get no weight
        floor = 1e-14 * eigenvalues.shape[-2] * eigenvalues.amax(-2, keepdim=True)
        damped = eigenvalues + penalties[..., None, :] * eigenvalues.mean(-2, keepdim=True)
        weights = self.vectors @ (torch.where(eigenvalues > floor, self.rotated / damped, 0.0))
        bias = self.target_mean - einsum(self.mean, weights, "... f one, ... f y -> ... one y")
        return torch.cat([weights, bias], dim=-2)


STREAM_COPIES = 4  # the sums of a fit copy the streams, in float64 and with a column of ones


@dataclass(frozen=True, eq=False)
class Readouts(LayerLearner):
    """A model read after each layer by fitted linear readouts, the result of `fit_readouts`.

    It is a learner whose steps are the layers: `trajectory(prompts)` predicts after each, `errors(prompts)` measures
    their errors. Step 0 is before the first layer.

    Attributes:
        weights: `[layer point d_model y]`; one point where the readout is shared.
        bias: `[layer point y]`.
        shared: True if all points of a layer share one readout.
    """

    model: LayeredModel
    weights: Float[Tensor, "layer point d_model y"]
    bias: Float[Tensor, "layer point y"]
    shared: bool = False
    name: str = "layer"

    @checked
    def read(
        self, layer: int, stream: Float[Tensor, "prompt point query d_model"]
    ) -> Float[Tensor, "prompt point query y"]:
        """Apply the readout of a layer to its stream."""
        fitted = self.weights.shape[1]
        check_layer(layer, self.model.cfg.n_layers)
        if self.gives_all_points and not self.shared and fitted < stream.shape[1]:
            raise ValueError(f"readouts were fitted for {fitted} points, the prompts have {stream.shape[1]}")
        stream = _normed_at_end(self.model, layer, stream)
        weights, bias = (each[layer, : stream.shape[1]].to(stream) for each in (self.weights, self.bias))
        read = einsum(stream, weights, "prompt point query model, point model y -> prompt point query y")
        return read + bias[:, None]


@checked
def fit_readouts(
    model: LayeredModel, prompts: Prompts, *, shared: bool = False, progress: bool | None = None
) -> Readouts:
    """Fit a linear readout after each layer in closed form, to see what the model could predict from there.

    Ridge regression from the residual stream at a point's position to its target; the penalty is chosen by four-fold
    cross-validation for each layer, point and target dimension. A model that predicts every prefix in one pass gets a
    readout for each point, any other model one for the query. If the model has a final norm, the last stream is read
    through a norm of its kind (layer norm or RMS) without weights, so that its readout can equal the model's head. All
    layers are fitted in one pass over the prompts, and memory does not grow with their number. Source: Fu et al. 2024,
    B.1 (who train the readouts).

    Args:
        model: a mechicl model, or a module wrapped by `mechicl.wrap`.
        prompts: prompts to fit on, four or more; measure on others.
        shared: one readout for all points of a layer instead of one per point.

    Returns:
        A `Readouts`, a learner whose steps are the layers; `match` and other comparisons take it too.

    Example:
        >>> readouts = fit_readouts(model, task.sample(1024, seed=0))
        >>> print(readouts.errors(prompts))  # at the query; at="points" for the mean over all prefixes
    """
    return fit_each(model, prompts, {shared: len(prompts)}, progress)[0]


def fit_each(
    model: LayeredModel, prompts: Prompts, numbers: Mapping[bool, int], progress: bool | None = None
) -> list[Readouts]:
    """Fit readouts, by whether points share them, each on the first prompts of a number; the model runs once."""
    sums = {shared: RidgeSums() for shared in numbers}
    n_layers, _, n_points, width = _read_streams(model, prompts[:1])[0].shape
    sites = [(n_layers,) if shared else (n_layers, n_points) for shared in numbers]
    held = sum(count_sums(each, width, prompts.y_dim) for each in sites)
    fast = fast_batch(model.bytes_per_prompt(prompts))
    parts = prompt_batches(Lens(model), prompts, copies=STREAM_COPIES, reserved=held)
    batches = [each for part in parts for each in (part.split(fast) if part.device.type == "cpu" else [part])]
    for part in progress_bar(batches, unit="batch", progress=progress, desc="readouts"):
        streams, targets = _read_streams(model, part)
        for shared, each in sums.items():
            n = max(numbers[shared] - each.n_prompts, 0)
            seen, ys = streams[:, :n], targets[:n]
            if shared and n:
                each.add(seen, ys[None])
            elif n:
                each.add(seen.transpose(1, 2)[..., None, :], ys.transpose(0, 1)[None, :, :, None])
    fitted = []
    for shared, each in sums.items():
        weights, bias = (maps[:, None] if shared else maps for maps in each.solve())
        fitted.append(Readouts(model, weights, bias, shared))
    return fitted


StreamsAndTargets = tuple[Float[Tensor, "layer prompt point d_model"], Float[Tensor, "prompt point y"]]


@torch.no_grad()
def _read_streams(model: LayeredModel, prompts: Prompts) -> StreamsAndTargets:
    layers = enumerate(model.layer_streams(prompts, prediction_rows(model, prompts)))
    streams = torch.stack([_normed_at_end(model, layer, stream) for layer, stream in layers])
    return streams, prompts.ys[:, -streams.shape[2] :].to(streams)


def _normed_at_end(model: LayeredModel, layer: int, stream: Tensor) -> Tensor:
    """The stream, after the last layer of a model with a final norm through one of its kind without weights."""
    if layer < model.cfg.n_layers or not getattr(model.cfg, "final_norm", False):
        return stream
    is_rms = model.cfg.final_rms or str(model.cfg.normalization_type).startswith("RMS")
    norm = torch.nn.functional.rms_norm if is_rms else torch.nn.functional.layer_norm
    return norm(stream, stream.shape[-1:], eps=model.cfg.eps)
