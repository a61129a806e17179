"""Measures of models on alternate tokens (x1, y1, x2, y2, ...): when targets are put beside their inputs."""

from mechicl.analysis.heads import measure_target_copying
from mechicl.checkpoints import Checkpoint
from mechicl.sweeps.measures.general import transition
from mechicl.sweeps.measures.one_model import HELD_OUT, Measured, one_model
from mechicl.tasks import LinearRegression


def target_copying(checkpoint: Checkpoint, *, n_prompts: int = 2000) -> Measured:
    """When the loss leaves that of predicting 0, and whether the first layer copies targets to their inputs' tokens.

    Args:
        checkpoint: with one model on interleaved prompts of linear regression, and a record with a curve.
        n_prompts: held-out prompts.

    Returns:
        What `transition` returns with the loss of predicting 0 as the plateau. And of readouts of the stream after the
        first layer, over the mean square of what they read: `target_error`, that of each target at its input's token,
        and `input_error`, that of each input at its target's: 0 where it is there, 1 where it is not. `paired` is 1
        where either is below 1/2, and 0 otherwise.

    Raises:
        CheckpointError: a record without a curve.
        ValueError: another task, or another prompt format.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.
    """
    task = checkpoint.task
    if not isinstance(task, LinearRegression):
        raise ValueError(f"target_copying is of models of LinearRegression; this one's task is {type(task).__name__}")
    prompts = task.sample(n_prompts, seed=HELD_OUT)
    copied = measure_target_copying(one_model(checkpoint), prompts)
    errors = {
        "target_error": copied.decoding_errors.mean().item(),
        "input_error": copied.decoding_errors_of_inputs.mean().item(),
    }
    fell = transition(checkpoint, plateau=prompts.query.ys.square().mean().item())
    return {**fell, **errors, "paired": float(min(errors.values()) < 0.5)}
