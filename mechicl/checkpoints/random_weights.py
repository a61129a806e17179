"""Untrained models in place of trained ones: the control of statements about training."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from mechicl.base.arguments import checked
from mechicl.checkpoints.checkpoint import Checkpoint, Snapshots, stack_models
from mechicl.models import build

FIRST = 1_000_003
"""Seed of the first model's new weights; no training of ours starts from it."""
_FIRST: ContextVar[int | None] = ContextVar("random_weights", default=None)


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
