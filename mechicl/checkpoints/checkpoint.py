"""The contents of a checkpoint: the models of all seeds, their training record, their weights during training."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, check_fields, checked, fits
from mechicl.models import Model, ModelConfig, TransformerConfig, build
from mechicl.models.architectures import build_unfilled, outline
from mechicl.models.transformer.lens_config import current_names
from mechicl.tasks import AnyTask, task_from_dict

STUCK = 1.1
"""A seed is stuck if its held-out loss at the end of training is above this many times the best seed's."""
FIRST = 1_000_003
"""Seed of the first model's new weights; no training of ours starts from it."""
_FIRST: ContextVar[int | None] = ContextVar("random_weights", default=None)
OF_EACH_MODEL = ("seeds", "stopped_at", "diverged_at")
"""Entries of a record with one value per model."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or does not match its record."""


class UnknownSeedError(CheckpointError):
    """A checkpoint has no model of that seed."""


@dataclass(frozen=True, eq=False)
class Snapshots:
    """Weights at some steps of training.

    Attributes:
        steps: the training steps, in ascending order.
        weights: for each weight's name, a tensor `[step seed ...]`: its values at each step in each model.
    """

    steps: tuple[int, ...]
    weights: dict[str, Tensor]

    def __post_init__(self):
        if not fits(self.weights, dict[str, Tensor]):  # on any device, "meta" too
            raise ArgumentError(f"weights must be a dictionary of tensors by name, got {described(self.weights)}")
        if any(one >= other for one, other in itertools.pairwise(self.steps)):
            raise ValueError(f"steps must ascend, got {self.steps}")
        for name, tensor in self.weights.items():
            if tensor.shape[:1] != (len(self.steps),):
                raise ValueError(f"{name} of shape {list(tensor.shape)} does not contain {len(self.steps)} snapshots")

    @checked
    def select(self, models: slice | Int[Tensor, "model"] | Bool[Tensor, "model"] | list[int]) -> "Snapshots":
        """Select the snapshots of some models, by a slice or their indices."""
        return Snapshots(self.steps, {name: weights[:, models] for name, weights in self.weights.items()})


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything in a checkpoint folder.

    Attributes:
        name: name of the folder.
        models: one per seed, in eval mode; of several tasks trained at once, all seeds of the first come first.
        record: how they were trained, as plain data: "training" (the config), "seeds", "curve" (losses), ...
        snapshots: the models' weights at some steps of training; None if none were saved.
    """

    name: str
    models: list[Model]
    record: dict[str, Any] = field(default_factory=dict)
    snapshots: Snapshots | None = None

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    @property
    def task(self) -> AnyTask:
        """The task that the models were trained on (the first of several), by the record."""
        try:
            return task_from_dict(self.record["training"]["task"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.name}: no usable task in its record: {error!r}") from error

    def by_task(self) -> "list[Checkpoint]":
        """Split a checkpoint of several tasks into one checkpoint per task, as if each had been trained alone."""
        self.task  # noqa: B018 - raises if there is none
        training = self.record["training"]
        tasks = [training["task"], *training.get("more_tasks", [])]
        n_seeds, remainder = divmod(len(self.models), len(tasks))
        if remainder or n_seeds != len(training.get("seeds", range(n_seeds))):
            raise CheckpointError(
                f"{self.name}: {len(self.models)} models for {len(tasks)} tasks and the seeds {training.get('seeds')}"
            )
        parts = [self.select(range(i * n_seeds, (i + 1) * n_seeds)) for i in range(len(tasks))]
        return [replace(part, name=f"{self.name}, task {i}") for i, part in enumerate(parts)]

    @property
    def final_losses(self) -> list[float]:
        """The held-out loss of each model at the end of its training, by the record's curve; empty without one."""
        losses = (self.record.get("curve") or {}).get("eval_loss") or [[]]
        return [math.inf if loss is None or math.isnan(loss) else float(loss) for loss in losses[-1]]

    @property
    def best(self) -> Model:
        """The model of the first task with the least held-out loss at the end; the first one if there is no curve."""
        losses = self.final_losses[: self._n_seeds]
        return self.models[losses.index(min(losses)) if losses else 0]

    @property
    def stuck(self) -> list[int]:
        """Indices of the models that are stuck: more than 10% above the held-out loss of their task's best seed.

        Models without a finite loss are stuck, too.
        """
        losses, n = self.final_losses, self._n_seeds
        limits = [STUCK * min(losses[i : i + n]) for i in range(0, len(losses), n)]
        return [i for i, loss in enumerate(losses) if loss > limits[i // n] or loss == math.inf]

    @property
    def _n_seeds(self) -> int:
        return len(self.models) // (1 + len(self.record.get("training", {}).get("more_tasks", ()))) or 1

    @property
    def seeds(self) -> list[int]:
        """The training seeds, of one task if there are several."""
        return list(self.record.get("seeds", range(len(self.models))))

    @checked
    def select(self, indices: Iterable[int]) -> "Checkpoint":
        """Make a checkpoint of the models with these indices, and of their part of the record and the snapshots.

        The record keeps the tasks of these models; it has none if models of several tasks differ in their seeds.
        """
        chosen, n_models = list(indices), len(self.models)
        if outside := [i for i in chosen if not -n_models <= i < n_models]:
            raise IndexError(f"{self.name} has the models 0 to {n_models - 1}, got index {outside[0]}")
        chosen = [i % n_models for i in chosen]  # -1 is the last one
        models, record = [self.models[i] for i in chosen], dict(self.record)
        record |= {name: [record[name][i] for i in chosen] for name in OF_EACH_MODEL if name in record}
        if "curve" in record:
            curve = record["curve"]
            losses = {n: [[line[i] for i in chosen] for line in curve[n]] for n in ("loss", "eval_loss") if n in curve}
            record["curve"] = {**curve, **losses}
        if chosen and "training" in record:
            record["training"] = self._training_of(chosen)
        return Checkpoint(self.name, models, record, self.snapshots and self.snapshots.select(chosen))

    def _training_of(self, chosen: list[int]) -> dict[str, Any]:
        """The training config of some models: their seeds and tasks; without tasks, if these have different seeds."""
        training, n = self.record["training"], self._n_seeds
        tasks = [training.get("task"), *training.get("more_tasks", ())]
        seeds: dict[int, list[int]] = {}
        for index in chosen:
            seeds.setdefault(index // n, []).append(index % n)
        first = next(iter(seeds.values()))
        kept = dict(training)
        if len(training.get("seeds", ())) == n:
            kept["seeds"] = [training["seeds"][i] for i in first]
        if len(tasks) == 1:
            return kept
        if any(each != first for each in seeds.values()) or chosen != [n * i + j for i in seeds for j in first]:
            return {name: value for name, value in kept.items() if name not in ("task", "more_tasks", "seeds")}
        task, *more = (tasks[i] for i in seeds)
        return {**kept, "task": task, "more_tasks": more}

    @checked
    def model(self, seed: int | None = None) -> Model:
        """Return the model of a training seed (of the first task, if there are several); by default that is `best`."""
        if seed is None:
            return self.best
        if seed not in self.seeds:
            raise UnknownSeedError(f"{self.name} has no seed {seed}; it has {self.seeds}")
        return self.models[self.seeds.index(seed)]

    @checked
    def models_at(self, snapshot: int) -> list[Model]:
        """Return the models, one per seed, with their weights at a snapshot (an index into `snapshots.steps`)."""
        if self.snapshots is None:
            raise CheckpointError(f"{self.name} was saved without snapshots")
        n = len(self.snapshots.steps)
        if not -n <= snapshot < n:
            raise IndexError(f"{self.name} has the snapshots 0 to {n - 1}, got {snapshot}: give an index, not a step")
        return models_from_stack(self.models[0].cfg, {n: t[snapshot] for n, t in self.snapshots.weights.items()})

    @checked
    def iterate_snapshots(self, dtype: torch.dtype | None = None) -> Iterator[list[Model]]:
        """Yield the models at each snapshot: the same objects each time, with other weights, which is quicker."""
        models = [model if dtype is None else model.to(dtype) for model in self.models_at(0)]
        assert self.snapshots is not None
        for i in range(len(self.snapshots.steps)):
            fill_models(models, {name: weights[i] for name, weights in self.snapshots.weights.items()})
            yield models


# ---- weights of several models as stacked tensors, with a leading axis for seeds ----


@checked(locks=True)
def stack_models(models: Sequence[Model]) -> dict[str, Tensor]:
    """Stack the parameters and buffers of models with one config on a leading seed axis."""
    states = [_named_tensors(model) for model in models]
    kinds = [{name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in state.items()} for state in states]
    configs = [model.cfg.to_dict() for model in models]
    if not kinds or any(each != kinds[0] for each in kinds) or any(each != configs[0] for each in configs):
        raise ValueError(f"models must be one or more with one config, dtype and device, got {len(models)} models")
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def models_from_stack(cfg: ModelConfig, stacked: Mapping[str, Tensor]) -> list[Model]:
    """Build models from weights with a leading seed axis, as `stack_models` returns; errors as for `check_stack`."""
    n_models = check_stack(cfg, stacked)
    models = [build_unfilled(cfg).eval() for _ in range(n_models)]
    fill_models(models, stacked)
    return models


@torch.no_grad()
def fill_models(models: Sequence[Model], stacked: Mapping[str, Tensor]) -> None:
    """Copy weights with a leading seed axis into models, and convert them to the models' dtype."""
    cfg = models[0].cfg
    if isinstance(cfg, TransformerConfig):
        stacked = current_names(cfg, stacked)
    for i, model in enumerate(models):
        tensors = _named_tensors(model)
        for name, tensor in stacked.items():
            tensors[name].copy_(tensor[i])


def check_stack(cfg: ModelConfig, stacked: Mapping[str, Tensor]) -> int:
    """Check a stack against an untrusted config, without memory of their size; return the number of models."""
    if isinstance(cfg, TransformerConfig):
        stacked = current_names(cfg, {name: tensor.to("meta") for name, tensor in stacked.items()})
    layers = {name.split(".")[1] for name in stacked if name.startswith("blocks.")}
    n_layers = min(cfg.n_layers, 1) if getattr(cfg, "recurrent", False) else cfg.n_layers
    if len(layers) != n_layers:
        raise ValueError(f"the weights are those of {len(layers)} layers, n_layers={cfg.n_layers} requires {n_layers}")
    n_models = {tensor.shape[0] for tensor in stacked.values() if tensor.ndim}
    try:
        expected = _named_tensors(outline(cfg))
    except (RuntimeError, OverflowError, TypeError) as error:  # the number of elements overflows
        raise ValueError(f"no model has the sizes in the config: {str(error).splitlines()[0]}") from error
    if set(stacked) != set(expected):
        missing, extra = sorted(set(expected) - set(stacked)), sorted(set(stacked) - set(expected))
        raise ValueError(f"the weights do not fit the config: missing {missing[:9]}, not expected {extra[:9]}")
    for name, tensor in stacked.items():
        if tensor.ndim == 0 or tensor.shape[1:] != expected[name].shape:
            raise ValueError(
                f"{name} must be [seed, {', '.join(map(str, expected[name].shape))}], got {list(tensor.shape)}"
            )
        if tensor.dtype != expected[name].dtype:
            raise ValueError(f"{name} must be {expected[name].dtype} as in the config, got {tensor.dtype}")
    if len(n_models) != 1 or n_models == {0}:
        raise ValueError(f"the weights need one leading axis for all, the seeds; theirs have sizes {sorted(n_models)}")
    return n_models.pop()


def _named_tensors(model: Model) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# ---- untrained models in place of trained ones: the control of statements about training ----


@checked
@contextmanager
def random_weights(seed: int = 0) -> Iterator[None]:
    """Make `load` and `load_checkpoint` return untrained models during a `with` block (see `untrained`).

    This is the control of statements about training: what an analysis also finds in untrained models is not a result
    of training.

    Args:
        seed: selects the random weights; each value gives other ones.

    Example:
        >>> with random_weights():
        ...     model = load("lsa-1l")  # as it could have been before training
    """
    token = _FIRST.set(FIRST + 1000 * seed)
    try:
        yield
    finally:
        _FIRST.reset(token)


def are_weights_random() -> bool:
    """Return True within `random_weights`, for code that opens models in other ways."""
    return _FIRST.get() is not None


@checked
def untrained(checkpoint: Checkpoint, first: int = FIRST) -> Checkpoint:
    """Make a checkpoint like another one whose models were never trained.

    Args:
        checkpoint: checkpoint of trained models, which is not changed.
        first: seed of the first model's initial weights; the next model has the next seed. No checkpoint that comes
            with the package was trained from the default.

    Returns:
        A checkpoint of models with the same configs and new initial weights. All its snapshots contain these weights,
        and every entry of its loss curve is the original's first one.

    Example:
        >>> untrained(load_checkpoint("lsa-1l")).models[0].cfg.n_layers
        1
    """
    models = [build(model.cfg, first + i).eval() for i, model in enumerate(checkpoint.models)]
    record, snapshots = dict(checkpoint.record), checkpoint.snapshots
    if "curve" in record:
        curve = record["curve"]
        flat = {name: [curve[name][0]] * len(curve[name]) for name in ("loss", "eval_loss") if curve.get(name)}
        record["curve"] = {**curve, **flat}
    if snapshots is not None:
        n, stacked = len(snapshots.steps), stack_models(models)
        weights = {name: stacked[name].expand(n, *stacked[name].shape).clone() for name in snapshots.weights}
        snapshots = Snapshots(snapshots.steps, weights)
    return replace(checkpoint, models=models, record=record, snapshots=snapshots)


def replaced(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint, or untrained models within `random_weights`."""
    first = _FIRST.get()
    return checkpoint if first is None else untrained(checkpoint, first)
