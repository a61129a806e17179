"""Untrained models in place of trained ones: the control of statements about training."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from mechicl.base.arguments import checked
from mechicl.checkpoints.checkpoint import Checkpoint, Snapshots
from mechicl.checkpoints.stacks import stack_models
from mechicl.models import build

FIRST = 1_000_003
"""Seed of the first model's new weights; no training of ours starts from it."""
_FIRST: ContextVar[int | None] = ContextVar("random_weights", default=None)


@checked
@contextmanager
def random_weights(seed: int = 0) -> Iterator[None]:
    """During a `with` block, replace the models of every loaded checkpoint by untrained ones (see `untrained`).

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
    """Replace a checkpoint's weights by new initial ones, at every snapshot too, and its curve by a flat one.

    Args:
        checkpoint: trained models.
        first: seed of the first model's weights; the next model has the next seed.

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
