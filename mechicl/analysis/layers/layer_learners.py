"""Models read after each of their layers: the layers as steps of a learner."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields, checked
from mechicl.learners import Trajectory, prompt_batches
from mechicl.models import LayeredModel
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt
from mechicl.statistics import UNBOUNDED, Interval, Result, interval


@dataclass(frozen=True, eq=False)
class LayerErrors(Result):
    """Squared errors of predictions read after each layer of a model; layer 0 is the stream before the first layer.

    Attributes:
        squared_errors: `[layer point prompt]`, averaged over the target's dimensions.
        points: number of points before each prediction: 0 to n_context, or n_context alone for the query alone.
    """

    squared_errors: Float[Tensor, "layer point prompt"]
    points: tuple[int, ...] = ()

    @classmethod
    @checked
    def of(cls, trajectory: Trajectory, prompts: Prompts, *, at: PointsAt = "query") -> "LayerErrors":
        """Compute the errors of a trajectory on its prompts, at the "query" alone or at all "points" it predicts."""
        errors = trajectory.step_errors(prompts).transpose(1, 2).double().cpu()
        points = tuple(range(prompts.n_context + 1 - errors.shape[1], prompts.n_context + 1))
        return cls(errors[:, -1:], points[-1:]) if at == "query" else cls(errors, points)

    def by_layer(self, level: float = 0.95) -> list[Interval]:
        """Return the mean error over `points`, with an interval over prompts, for each layer from 0 to n_layers."""
        return [interval(errors.mean(0), level, within=UNBOUNDED) for errors in self.squared_errors]

    def _lines(self) -> list[tuple[str, str]]:
        first, last = min(self.points, default=0), max(self.points, default=self.squared_errors.shape[1] - 1)
        over = f"mean over prefixes of {first} to {last} points" if first < last else f"query after {last} points"
        return [("squared error", over), *((f"layer {i}", str(each)) for i, each in enumerate(self.by_layer()))]


class LayerLearner(ABC):
    """A model read after each layer: an iterative learner whose steps are 0 (before the first layer) to n_layers.

    Models that predict every prefix in one pass (interleaved, causal) give all points, others the query alone.
    """

    model: LayeredModel
    name: str = "layer"

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def read(
        self, layer: int, stream: Float[Tensor, "prompt point query d_model"]
    ) -> Float[Tensor, "prompt point query y"]:
        """Read predictions off the stream after `layer` layers."""

    @checked(undefined=True)
    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """Predict after each layer, on the model's device: steps 0 to n_layers.

        Point t is predicted from those before it. With weights, these are the derivatives of each prediction with
        respect to its query, the context fixed, `[step prompt point x y]`.
        """
        # with gradients every layer's activations are kept, where `bytes_per_prompt` counts two layers'
        copies = self.model.cfg.n_layers + 1 if with_weights else 1
        parts, weight_parts = [], []
        for part in prompt_batches(self, prompts, copies=copies):
            parts.append(_predict([self], part)[0])
            if with_weights:
                weight_parts.append(self._weights(part, parts[-1].shape[2]))
        steps = tuple(range(self.model.cfg.n_layers + 1))
        weights = torch.cat(weight_parts, dim=1) if with_weights else None
        return Trajectory(steps, torch.cat(parts, dim=1), self.name, weights)

    @checked(undefined=True)
    def predict_queries(
        self, prompts: Prompts, queries: Float[Tensor, "prompt point query x"]
    ) -> Float[Tensor, "layer prompt point query y"]:
        """Predict other queries than the prompts' own, any number of them after each prefix, and after each layer.

        Entry t of `point` follows the first t points; for models that give the query alone there is one point, after
        the whole context. The context is computed once for all of them. Gradients flow to the queries.
        """
        streams = self.model.query_streams(prompts, queries, prediction_rows(self.model, prompts))
        return torch.stack([self.read(i, stream) for i, stream in enumerate(streams)])

    @checked
    def errors(self, prompts: Prompts, *, at: PointsAt = "query") -> LayerErrors:
        """Measure squared errors `[layer point prompt]` of the predictions after each layer, on (held-out) prompts.

        Args:
            at: "query" for the last point only, "points" for every point, predicted from those before it.
        """
        if at == "query" or prediction_rows(self.model, prompts) == "points":
            return LayerErrors.of(self.trajectory(prompts), prompts, at=at)
        errors = [LayerErrors.of(self.trajectory(each), each).squared_errors for each in _prefixes(prompts)]
        return LayerErrors(torch.cat(errors, dim=1), tuple(range(len(errors))))

    @checked(undefined=True)
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction after the last layer."""
        return self.trajectory(prompts).query()[-1]

    @checked(undefined=True)
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return every point's prediction after the last layer."""
        if prediction_rows(self.model, prompts) == "points":
            return self.trajectory(prompts).predictions[-1]
        return torch.stack([self.predict(each) for each in _prefixes(prompts)], dim=1)

    @checked
    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Estimate the memory of `trajectory` per prompt: the model's pass, and the streams of all layers."""
        passing = self.model.bytes_per_prompt(prompts)  # first: it completes the config of a wrapped module
        cfg = self.model.cfg
        n_points = prompts.n_context + 1 if self.gives_all_points else 1
        return passing + (cfg.n_layers + 1) * n_points * (cfg.d_model or 1) * cfg.torch_dtype.itemsize

    @property
    def gives_all_points(self) -> bool:
        """True if one pass of the model predicts every point, and not the query alone."""
        return self.model.cfg.one_pass

    def _weights(self, prompts: Prompts, n_points: int) -> Float[Tensor, "layer prompt point x y"]:
        # The query of every prefix has its own row that no other row sees, so that the derivative of the sum of all
        # predictions with respect to one query is the derivative of that prediction alone: one pass serves all.
        cfg = self.model.cfg
        queries = prompts.xs[:, -n_points:, None].detach().to(cfg.device, cfg.torch_dtype).clone().requires_grad_()
        rows, at = [], prediction_rows(self.model, prompts)
        with torch.enable_grad(), _frozen(self.model):
            for layer, stream in enumerate(self.model.query_streams(prompts, queries, at)):
                predictions = self.read(layer, stream)
                by_target = [
                    torch.autograd.grad(predictions[..., i].sum(), queries, retain_graph=True)[0][:, :, 0]
                    for i in range(predictions.shape[-1])
                ]
                rows.append(torch.stack(by_target, dim=-1))
        return torch.stack(rows)


def trajectories(learners: Sequence[LayerLearner], prompts: Prompts) -> list[Trajectory]:
    """Return the trajectories of several readings of one model, which runs once for all of them."""
    first = learners[0]
    parts = [_predict(learners, part) for part in prompt_batches(first, prompts)]
    steps = tuple(range(first.model.cfg.n_layers + 1))
    predicted = zip(learners, torch.cat(parts, dim=2), strict=True)
    return [Trajectory(steps, predictions, learner.name) for learner, predictions in predicted]


@torch.no_grad()
def _predict(learners: Sequence[LayerLearner], prompts: Prompts) -> Float[Tensor, "learner layer prompt point y"]:
    model = learners[0].model
    streams = enumerate(model.layer_streams(prompts, prediction_rows(model, prompts)))
    read = [torch.stack([each.read(i, stream[:, :, None])[:, :, 0] for each in learners]) for i, stream in streams]
    return torch.stack(read, dim=1)


def _prefixes(prompts: Prompts) -> list[Prompts]:
    return [prompts.prefix(t) for t in range(prompts.n_context + 1)]


def check_layer(layer: int, n_layers: int) -> None:
    """Raise ValueError for a number of layers that the model does not have."""
    if not 0 <= layer <= n_layers:
        raise ValueError(f"layer must be 0 to {n_layers}, got {layer}")


@contextmanager
def _frozen(model: torch.nn.Module) -> Generator[None]:
    thawed = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in thawed:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in thawed:
            weight.requires_grad_(True)


def prediction_rows(model: LayeredModel, prompts: Prompts) -> PointsAt:
    """The rows whose streams see only the points before them."""
    model.encode(prompts[:1])  # completes the config of a wrapped module
    return "points" if model.cfg.one_pass else "query"


@dataclass(frozen=True, eq=False)
class Lens(LayerLearner):
    """A model read after each layer by its own final norm and read-out: the logit lens of regression models.

    It is a learner whose steps are the layers: `trajectory(prompts)` predicts after each, `errors(prompts)` measures
    their errors. Step 0 is before the first layer; the last step is the model's own prediction.

    Example:
        >>> Lens(load("gpt2-8l")).trajectory(prompts).predictions.shape
        torch.Size([9, 64, 21, 1])
    """

    model: LayeredModel
    name: str = "layer (lens)"

    @checked
    def read(
        self, layer: int, stream: Float[Tensor, "prompt point query d_model"]
    ) -> Float[Tensor, "prompt point query y"]:
        """The model's prediction if the remaining layers did nothing."""
        check_layer(layer, self.model.cfg.n_layers)
        return self.model.read_out(stream.flatten(1, 2)).unflatten(1, stream.shape[1:3])
