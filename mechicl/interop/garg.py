"""Models of the `in-context-learning` code of Garg et al. 2022, on which Fu et al. 2024 build, and their tasks."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import GPT2Config

from mechicl.base.arguments import ArgumentError, Count, checked, fits
from mechicl.base.files import read_bytes
from mechicl.base.tensor_files import read_torch_file
from mechicl.base.warning import warn
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.pretrained.conversion import convert_weights
from mechicl.models.pretrained.families import find_family
from mechicl.models.pretrained.loading import open_weights
from mechicl.tasks import DecisionTrees, LinearRegression, QuadraticRegression, ReluNetworks, SparseLinearRegression
from mechicl.tasks.sampling import PromptDistribution

FAMILY = dataclasses.replace(
    find_family(GPT2Config()),
    blocks="_backbone.h",
    ends={
        "_read_in": "embed.E",
        "_backbone.wpe": "pos_embed.pos",
        "_backbone.ln_f": "ln_final",
        "_read_out": "unembed.U",
    },
    biases={},
)
"""Their GPT-2 between two linear maps, in terms of ours."""


@checked
def from_garg(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> HookedTransformer:
    """Convert a model trained by the code of Garg et al. 2022 (their repository `in-context-learning`).

    Its predictions agree with those of the original up to float precision. Source: Garg et al. 2022, section 3; Fu et
    al. 2024, section 4.

    Args:
        state_dict: state dict of its `TransformerModel` (`_read_in`, `_backbone`, `_read_out`), which its checkpoint
            `state.pt` contains under "model_state_dict".
        config: its `config.yaml` as a mapping, or the "model" section: n_dims, n_positions, n_embd, n_layer, n_head.

    Returns:
        A float32 model in eval mode on interleaved prompts with up to `n_positions - 1` context points.

    Raises:
        ValueError: a family other than gpt2, a missing entry, or weights that do not fit the config.

    Example:
        >>> config = {"n_dims": 5, "n_positions": 11, "n_embd": 32, "n_layer": 3, "n_head": 4}
        >>> model = from_garg(state_dict, config)
    """
    fields = config.get("model", config)
    if (family := fields.get("family", "gpt2")) != "gpt2":
        raise ArgumentError(f"family must be 'gpt2', got {family!r}")
    for name in ("n_dims", "n_positions", "n_embd", "n_layer", "n_head"):
        if not fits(fields.get(name), Count):
            raise ArgumentError(f"{name} must be an int of at least 1, got {fields.get(name)!r}")
    width = fields["n_embd"]
    expected = {
        "_read_in.weight": (width, fields["n_dims"]),
        "_backbone.wpe.weight": (2 * fields["n_positions"], width),
    }
    for name, shape in expected.items():
        if name not in state_dict or tuple(state_dict[name].shape) != shape:
            found = tuple(state_dict[name].shape) if name in state_dict else "no such weight"
            raise ValueError(f"{name} must be {shape} by the config, got {found}")
    n_layers = fields["n_layer"]
    cfg = TransformerConfig(
        x_dim=fields["n_dims"], n_context=fields["n_positions"] - 1, prompt_format="interleaved", n_layers=n_layers,
        n_heads=fields["n_head"], d_model=width, d_mlp=4 * width, act_fn="gelu_new", attention="softmax",
        keys="causal", normalization_type="LN", device="meta",
    )  # fmt: skip
    # without a vocabulary that is not used; the last of its 2 n_positions positions is the query's y, which our prompts
    # never contain
    weights = {name: each.detach().float() for name, each in state_dict.items() if not name.endswith("wte.weight")}
    weights["_read_in.weight"] = weights["_read_in.weight"].T

    def convert(cfg: TransformerConfig, outline: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted = convert_weights(FAMILY, cfg, weights, outline, n_layers=n_layers, lacks=set())
        return {name: each.clone(memory_format=torch.contiguous_format) for name, each in converted.items()}

    return open_weights(HookedTransformer, cfg, convert, torch.float32)


@checked
def load_garg(folder: str | Path, *, step: int | None = None) -> tuple[HookedTransformer, PromptDistribution | None]:
    """Load a model that the code of Garg et al. 2022 (`in-context-learning`) trained, and the task of its training.

    Nothing in the files is executed.

    Args:
        folder: the run's folder, with `config.yaml` and `state.pt`.
        step: training step of the snapshot `model_{step}.pt`; by default the final weights, `state.pt`.

    Returns:
        The model, in float32 and eval mode, on interleaved prompts; and the task, to draw prompts with `sample` (with
        the sizes that its curriculum had at `step`), or None if the config does not define it or, with a warning, if
        this package does not have it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: as for `from_garg`; the config is not a mapping; `state.pt` contains anything but tensors and plain
            data.
    """
    folder = Path(folder)
    config = _read_yaml(folder / "config.yaml")
    if not isinstance(config, Mapping) or not isinstance(config.get("model", config), Mapping):
        raise ValueError(f"{folder / 'config.yaml'} has no model section")
    path = folder / ("state.pt" if step is None else f"model_{step}.pt")
    if not path.is_file():
        steps = sorted(int(each.stem[6:]) for each in folder.glob("model_*.pt") if each.stem[6:].isdigit())
        raise FileNotFoundError(f"no file {path}" + (f"; there are snapshots of step= {steps}" if steps else ""))
    state = load_garg_state(path)
    try:
        return from_garg(state, config), garg_task(config, step=step)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(read_bytes(path).decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not plain YAML: {error}") from error


def load_garg_state(path: Path) -> dict[str, Tensor]:
    """Load the state dict in a checkpoint `state.pt` or a snapshot `model_{step}.pt`; raises like `load_garg`."""
    checkpoint = read_torch_file(path)
    state = None
    if isinstance(checkpoint, Mapping):
        state = checkpoint if "_read_in.weight" in checkpoint else checkpoint.get("model_state_dict")
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path} has no 'model_state_dict' of named weights")
    return dict(state)


# ---- the task in a run's config ----


GAUSSIAN = partial(LinearRegression, inputs="gaussian")
TASKS: dict[str, tuple[Any, dict[str, str]]] = {
    "linear_regression": (GAUSSIAN, {"scale": "weight_scale"}),
    "noisy_linear_regression": (GAUSSIAN, {"scale": "weight_scale", "noise_std": "noise_std"}),
    "sparse_linear_regression": (partial(SparseLinearRegression, sparsity=3), {"sparsity": "sparsity"}),
    "quadratic_regression": (QuadraticRegression, {}),
    "relu_2nn_regression": (partial(ReluNetworks, n_hidden=4), {"hidden_layer_size": "n_hidden"}),
    "decision_tree": (partial(DecisionTrees, depth=4), {"depth": "depth"}),
}
"""Our task for each of theirs, with their defaults, and the fields for its `task_kwargs`."""


def garg_task(config: Mapping[str, Any], *, step: int | None = None) -> PromptDistribution | None:
    """Return the task in a run's config, with the numbers of points and of non-zero inputs that its curriculum reached.

    Supported are the `TASKS` on Gaussian inputs. `config` is the run's `config.yaml` as a mapping, `step` a snapshot's
    (default: the end). None without a training section or, with a warning, for another task, other inputs, or a pool of
    `num_tasks` tasks, which those runs do not save.
    """
    training, model = config.get("training"), config.get("model")
    if not isinstance(training, Mapping) or not isinstance(model, Mapping) or "task" not in training:
        return None
    try:
        return _task(training, model["n_dims"], step)
    except (TypeError, ValueError) as reason:
        warn(f"the task of the run is not supported: {reason}")
        return None


def _task(training: Mapping[str, Any], x_dim: int, step: int | None) -> PromptDistribution:
    if training.get("data", "gaussian") != "gaussian":
        raise ValueError(f"its inputs are {training['data']!r}, not 'gaussian'")
    if training.get("num_tasks") is not None:
        raise ValueError(f"it has a pool of num_tasks={training['num_tasks']} tasks, which runs do not save")
    points, dims = (_last_value(training, kind, step) for kind in ("points", "dims"))
    if points is None:
        raise ValueError("training.curriculum.points has no 'end', a number of points")
    active = None if dims is None or dims >= x_dim else dims
    name, arguments = training["task"], dict(training.get("task_kwargs") or {})
    if name not in TASKS or (name == "decision_tree" and active):
        raise ValueError(f"task={name!r}" + (f" with {active} of {x_dim} inputs non-zero" if active else ""))
    kind, names = TASKS[name]
    options = {ours: arguments.pop(theirs) for theirs, ours in names.items() if theirs in arguments}
    neutral = {"scale": 1, "renormalize_ys": False, "valid_coords": active or x_dim}
    if others := {key: value for key, value in arguments.items() if value not in (None, neutral.get(key))}:
        raise ValueError(f"task={name!r} with task_kwargs={others}")
    return kind(x_dim=x_dim, n_context=points - 1, active_dims=active, **options)


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
