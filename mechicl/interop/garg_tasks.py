"""Tasks of the `in-context-learning` code of Garg et al. 2022, read from a run's config."""

from collections.abc import Mapping
from typing import Any

from mechicl.base.arguments import Count, NonNegative, fits
from mechicl.base.warning import warn
from mechicl.tasks import DecisionTrees, LinearRegression, QuadraticRegression, ReluNetworks, SparseLinearRegression
from mechicl.tasks.sampling import PromptDistribution


class _NoTask(Exception):
    """The library has no such task; the message is the reason."""


def garg_task(config: Mapping[str, Any], *, step: int | None = None) -> PromptDistribution | None:
    """Return the task in a run's config, with the numbers of points and of non-zero inputs that its curriculum reached.

    Supported on Gaussian inputs, with their `task_kwargs`: "linear_regression", "noisy_linear_regression",
    "sparse_linear_regression", "quadratic_regression", "relu_2nn_regression" and "decision_tree". `config` is the run's
    `config.yaml` as a mapping, `step` a snapshot's (default: the end). None without a training section or, with a
    warning, for another task, other inputs, or a pool of `num_tasks` tasks, which those runs do not save.
    """
    training, model = config.get("training"), config.get("model")
    if not isinstance(training, Mapping) or not isinstance(model, Mapping) or "task" not in training:
        return None
    try:
        return _task(training, model["n_dims"], step)
    except _NoTask as reason:
        warn(f"the task of the run is not supported: {reason}")
        return None


def _task(training: Mapping[str, Any], x_dim: int, step: int | None) -> PromptDistribution:
    if training.get("data", "gaussian") != "gaussian":
        raise _NoTask(f"its inputs are {training['data']!r}, not 'gaussian'")
    if training.get("num_tasks") is not None:
        raise _NoTask(f"it has a pool of num_tasks={training['num_tasks']} tasks, which runs do not save")
    name, arguments = training["task"], training.get("task_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise _NoTask(f"task_kwargs={arguments!r}")
    arguments = dict(arguments)
    points, dims = (_last_value(training, kind, step) for kind in ("points", "dims"))
    if points is None or points < 1:
        raise _NoTask("training.curriculum.points has no 'end', a number of points")
    active = None if dims is None or dims >= x_dim else dims
    sizes: dict[str, Any] = {"x_dim": x_dim, "n_context": points - 1, "active_dims": active}
    scale = float(_pop(arguments, "scale", 1.0, NonNegative))
    task: PromptDistribution
    if name in ("linear_regression", "noisy_linear_regression"):
        noise_std = 0.0
        if name == "noisy_linear_regression":
            noise_std = float(_pop(arguments, "noise_std", 0.0, NonNegative))
            if arguments.pop("renormalize_ys", False):
                raise _NoTask("renormalize_ys=True divides targets by their standard deviation over the batch")
        task = LinearRegression(**sizes, inputs="gaussian", weight_scale=scale, noise_std=noise_std)
    elif scale != 1:
        raise _NoTask(f"task_kwargs.scale={scale} of task={name!r}")
    elif name == "sparse_linear_regression":
        if arguments.pop("valid_coords", None) not in (None, active or x_dim):
            raise _NoTask("task_kwargs.valid_coords differs from the number of non-zero inputs")
        task = SparseLinearRegression(**sizes, sparsity=_pop(arguments, "sparsity", 3, Count))
    elif name == "quadratic_regression":
        task = QuadraticRegression(**sizes)
    elif name == "relu_2nn_regression":
        task = ReluNetworks(**sizes, n_hidden=_pop(arguments, "hidden_layer_size", 4, Count))
    elif name == "decision_tree" and active is None:
        task = DecisionTrees(**sizes, depth=_pop(arguments, "depth", 4, Count))
    else:
        raise _NoTask(f"task={name!r}" + (f" with {active} of {x_dim} inputs non-zero" if active else ""))
    if arguments:
        raise _NoTask(f"task_kwargs={arguments}")
    return task


def _pop(arguments: dict[str, Any], name: str, default: float, kind: Any) -> Any:
    value = arguments.pop(name, default)
    if not fits(value, kind):
        raise _NoTask(f"task_kwargs.{name}={value!r}")
    return value


def _last_value(training: Mapping[str, Any], kind: str, step: int | None) -> int | None:
    curriculum = training.get("curriculum")
    schedule = curriculum.get(kind) if isinstance(curriculum, Mapping) else None
    if not isinstance(schedule, Mapping) or not fits(schedule.get("end"), int):
        return None
    n_steps = training.get("train_steps")
    if step is None and isinstance(n_steps, int) and n_steps > 0:
        step = n_steps - 1  # steps are counted from 0
    start, growth, interval = (schedule.get(name) for name in ("start", "inc", "interval"))
    if step is None or not (fits(start, int) and fits(growth, int) and fits(interval, Count)):
        return schedule["end"]
    return min(schedule["end"], start + growth * (step // interval))  # type: ignore[operator]
