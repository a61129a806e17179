"""What a training run is made of: task, model, optimisation, saving."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mechicl.base.arguments import check_fields
from mechicl.base.checks import check_positive, check_whole, is_finite, is_whole, require_whole
from mechicl.models import LSTMConfig, ModelConfig, TransformerConfig, config_from_dict
from mechicl.prompts import At
from mechicl.tasks import AnyTask, FixedTasks, LinearRegression, task_from_dict, task_to_dict
from mechicl.tasks.sampling import TokenDistribution
from mechicl.training.curriculum import Curriculum, Ramp
from mechicl.training.optimizers import OptimizerName


@dataclass(frozen=True)
class TrainingConfig:
    """A whole training run; two runs with equal configs give the same weights, bit for bit, on the same machine.

    Attributes:
        task: distribution of the prompts.
        model: the network.
        more_tasks: further tasks with prompts of the same shape; every seed gets a model on each, all trained together.
        seeds: one model each (and task), trained together; a seed fixes its initial weights and its prompts.
        steps: number of optimisation steps.
        batch_size: prompts a step and seed, over all processes together.
        optimizer: "adam", or "soap", which is Adam in each weight matrix's own axes: quicker where deep models are
            ill-conditioned (see `training.SOAP`).
        learning_rate: the optimiser's, after warm-up.
        schedule: "constant", or "cosine" down to 0 at the last step.
        warmup_steps: of linear growth of the learning rate from 0.
        gradient_clip: bound on the global norm of each seed's gradient; None for no bound.
        loss: mean squared error of the "query"'s prediction or of all "points"'; by default all points where one pass
            gives them (interleaved, causal), else the query. Token ids have the cross entropy of the next token, in
            nats, over the tokens that can be predicted.
        curriculum: how the prompts grow, up to the task's own size within the run; None for whole prompts throughout.
        eval_every: steps between evaluations on held-out prompts.
        eval_prompts: how many, the same ones every time.
        eval_seed: of those prompts.
        target_loss: a seed whose evaluation loss falls to this stops there; the run ends when all have.
        log_every: steps between lines in metrics.jsonl.
        save_every: steps between saves, from which a killed run resumes.
        n_snapshots: about how many times the weights are kept for the checkpoint (see `snapshot_steps`).
        snapshots_between: keep them at even distances from the first of these two steps to the second, as where a loss
            falls, as far as the run goes; None for geometric distances over the whole run.
        mixed_precision: "no" or "bf16" (where the device has it).
        tf32: let float32 matrix products on a GPU round their factors to TF32.
        fused_attention: torch's fused kernel for softmax attention, for one seed.
        compile: compile the passes with `torch.compile`. Fused or compiled, a resumed run is the same to rounding, and
            not bit for bit.
        tracker: name of a tracker that accelerate knows ("tensorboard", "wandb", ...), if any.
        cpu: use the CPU even where there is an accelerator.

    Raises:
        ValueError: a value out of range, or a task that does not fit the model.
    """

    task: AnyTask = field(default_factory=LinearRegression)
    model: ModelConfig = field(default_factory=lambda: TransformerConfig(x_dim=10, n_context=10))
    more_tasks: tuple[AnyTask, ...] = ()
    seeds: tuple[int, ...] = (0,)
    steps: int = 5000
    batch_size: int = 2048
    optimizer: OptimizerName = "adam"
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    gradient_clip: float | None = 10.0
    loss: Literal["query", "points"] | None = None
    curriculum: Curriculum | None = None
    eval_every: int = 500
    eval_prompts: int = 2000
    eval_seed: int = 2**31
    target_loss: float | None = None
    log_every: int = 100
    save_every: int = 1000
    n_snapshots: int = 0
    snapshots_between: tuple[int, int] | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    tf32: bool = False
    fused_attention: bool = False
    compile: bool = False
    tracker: str | None = None
    cpu: bool = False

    def __post_init__(self):
        check_fields(self)
        require_whole(self, steps=0, batch_size=1, warmup_steps=0, n_snapshots=0)
        require_whole(self, eval_every=1, eval_prompts=1, eval_seed=0, log_every=1, save_every=1)
        choices: dict[str, tuple[str | None, ...]] = {
            "optimizer": ("adam", "soap"),
            "schedule": ("constant", "cosine"),
            "loss": (None, "query", "points"),
            "mixed_precision": ("no", "bf16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("tf32", "fused_attention", "compile", "cpu"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.tracker is not None and not isinstance(self.tracker, str):
            raise ValueError(f"tracker must be a name or None, got {self.tracker!r}")
        check_positive(learning_rate=self.learning_rate)
        if self.gradient_clip is not None:
            check_positive(gradient_clip=self.gradient_clip)
        if self.snapshots_between is not None:
            between = self.snapshots_between
            steps = between if isinstance(between, tuple | list) and all(map(is_whole, between)) else ()
            if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
                raise ValueError(
                    f"snapshots_between must be two whole steps >= 0, the first below the second, got {between!r}"
                )
        if self.target_loss is not None and not is_finite(self.target_loss):
            raise ValueError(f"target_loss must be finite or None, got {self.target_loss!r}")
        if not isinstance(self.model, TransformerConfig | LSTMConfig):
            raise ValueError(f"model must be the config of a model, got {type(self.model).__name__}")
        _check_device(self.model.device)
        if not isinstance(self.seeds, Iterable):
            raise ValueError(f"seeds must be one or more different whole numbers >= 0, got {self.seeds!r}")
        valid = all(is_whole(seed) and 0 <= seed < 2**63 for seed in self.seeds)
        if not self.seeds or not valid or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be one or more different whole numbers >= 0, got {self.seeds}")
        if self.eval_seed >= 2**63:
            raise ValueError(f"eval_seed must be below 2**63, got {self.eval_seed}")
        if not isinstance(self.more_tasks, tuple | list):
            raise ValueError(f"more_tasks must be tasks, got {self.more_tasks!r}")
        if not isinstance(self.curriculum, Curriculum | None):
            raise ValueError(f"curriculum must be a Curriculum or None, got {self.curriculum!r}")
        for task in self.tasks:
            self._check_fit(task)
        if self.loss == "points" and not self.model.one_pass:
            raise ValueError("loss='points' needs interleaved prompts and causal keys: only then does one pass give it")
        if self.curriculum is not None:
            for task in self.tasks:
                self.curriculum.check(task, self.steps)
        longest = _length(self.task)
        length, unit = ("n_ctx", "tokens") if self.on_tokens else ("n_context", "context points")
        # an LSTM, and positions that are computed or absent, go on for ever
        positions = getattr(self.model, "positional_embedding_type", "none")
        if positions in ("standard", "one_hot") and longest > (getattr(self.model, length) or 0):
            raise ValueError(f"prompts of {longest} {unit}, but the model has {length}={getattr(self.model, length)}")

    def _check_fit(self, task: AnyTask) -> None:
        """Refuse a task whose prompts the model cannot read, or that cannot be trained beside the first one."""
        if not hasattr(task, "sample"):
            raise ValueError(f"task must be a task, whose prompts can be sampled, got {task!r}")
        if isinstance(task, TokenDistribution) != self.on_tokens:
            raise ValueError(
                f"{type(task).__name__} does not fit a model with prompt_format="
                f"{getattr(self.model, 'prompt_format', 'interleaved')!r}: token ids need a task of token sequences"
            )
        for name in ("d_vocab",) if isinstance(task, TokenDistribution) else ("x_dim", "y_dim"):
            if getattr(task, name) != getattr(self.model, name):
                raise ValueError(
                    f"the task has {name}={getattr(task, name)}, the model {name}={getattr(self.model, name)}: "
                    f"they must agree"
                )
        if _length(task) != _length(self.task):
            raise ValueError(f"tasks of lengths {_length(self.task)} and {_length(task)} cannot be trained together")
        if self.on_tokens and self.model.keys != "causal":
            raise ValueError(f"keys={self.model.keys!r} shows a model the token that it is to predict: take 'causal'")
        if self.on_tokens and self.loss is not None:
            raise ValueError(f"loss={self.loss!r} is for prompts of points; token models predict every token")

    @property
    def tasks(self) -> tuple[AnyTask, ...]:
        """The task and those beside it."""
        return (self.task, *self.more_tasks)

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """What the models are, in order: number of the task and seed, all seeds of the first task first."""
        return tuple((task, seed) for task in range(len(self.tasks)) for seed in self.seeds)

    @property
    def on_tokens(self) -> bool:
        """Whether the model reads token ids: its loss is then the cross entropy of the next token, in nats."""
        return getattr(self.model, "prompt_format", None) == "token_ids"

    @property
    def loss_at(self) -> At:
        """Which predictions the loss is made of."""
        if self.on_tokens:
            return "positions"
        return self.loss or ("points" if self.model.one_pass else "query")

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """Steps whose weights are kept: 0, then geometrically spaced from a 200th of the run to its end.

        With `snapshots_between` only evenly spaced ones from its first step to its second, up to the run's end.
        """
        if self.n_snapshots == 0:
            return ()
        if self.snapshots_between is not None:
            begin, end = self.snapshots_between
            n = max(2, self.n_snapshots)
            spaced = (round(begin + (end - begin) * i / (n - 1)) for i in range(n))
            return tuple(sorted({step for step in spaced if step <= self.steps}))
        first, n = max(1, self.steps // 200), max(2, self.n_snapshots - 1)
        spaced = (first * (self.steps / first) ** (i / (n - 1)) for i in range(n))
        return tuple(sorted({0, *(min(self.steps, round(step)) for step in spaced)}))

    def tasks_at(self, step: int) -> tuple[AnyTask, ...]:
        """The tasks that step `step` (from 0) draws its prompts from."""
        return tuple(self.curriculum.task_at(task, step) if self.curriculum else task for task in self.tasks)

    @property
    def eval_tasks(self) -> tuple[AnyTask, ...]:
        """Where held-out prompts come from: for fixed tasks, the distribution that those were drawn from."""
        return tuple(task.task if isinstance(task, FixedTasks) else task for task in self.tasks)

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step `step` (from 0).

        Raises:
            ValueError: a step below 0.
        """
        check_whole(0, step=step)
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def resized(
        self, *, x_dim: int | None = None, n_context: int | None = None, steps: int | None = None
    ) -> "TrainingConfig":
        """The same run in another size: tasks, model and curriculum follow.

        Fields of the model that stand as numbers in the config, like the width of its heads, stay what they are. The
        curriculum starts and climbs in proportion and takes as many steps as before or, of fewer steps, the same share.

        Args:
            x_dim: dimension of the inputs.
            n_context: number of context points.
            steps: number of optimisation steps.

        Raises:
            ValueError: a task without that size, or with fields that fit only its old one.

        Example:
            >>> from mechicl.training import PRESETS
            >>> small = PRESETS["gpt2-8l"].resized(x_dim=4, n_context=12, steps=2000)
            >>> small.task.x_dim, small.model.x_dim, small.curriculum.dims.end
            (4, 4, 4)
        """
        tasks = [resize_task(task, x_dim, n_context) for task in self.tasks]
        sizes = {name: size for name, size in (("x_dim", x_dim), ("n_context", n_context)) if size is not None}
        steps = self.steps if steps is None else steps
        return self.replace(
            task=tasks[0],
            more_tasks=tuple(tasks[1:]),
            model=self.model.replace(**sizes),
            steps=steps,
            curriculum=self.curriculum and self.curriculum.resized(tasks[0], min(1.0, steps / max(1, self.steps))),
        )

    def replace(self, **changes: Any) -> "TrainingConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` is the inverse."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {"task": task_to_dict(self.task), "model": self.model.to_dict()}
        data["more_tasks"] = [task_to_dict(task) for task in self.more_tasks]
        if self.curriculum is not None:
            data["curriculum"] = dataclasses.asdict(self.curriculum)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainingConfig":
        """The config that `to_dict` wrote.

        Raises:
            ValueError: unknown or missing fields, or bad values.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a training config must be a mapping of its fields, got {type(data).__name__}")
        fields = dict(data)
        missing = sorted({"task", "model", "seeds"} - set(fields))
        if missing:
            raise ValueError(f"a training config needs {missing}")
        unknown = sorted(map(str, set(fields) - {f.name for f in dataclasses.fields(cls)}))
        if unknown:
            raise ValueError(f"TrainingConfig has no field {unknown}")
        for name in ("seeds", "snapshots_between", "more_tasks"):
            value = fields.get(name)
            if isinstance(value, list | tuple):
                fields[name] = tuple(value)
            elif value is not None or name == "seeds":
                raise ValueError(f"{name} must be a list, got {value!r}")
        fields["more_tasks"] = fields.get("more_tasks") or ()
        readers: dict[str, Callable[[Any], Any]] = {
            "task": task_from_dict, "model": config_from_dict, "curriculum": _curriculum,
        }  # fmt: skip
        for name, read in readers.items():
            try:
                fields[name] = read(fields.get(name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        fields["more_tasks"] = tuple(map(task_from_dict, fields["more_tasks"]))
        return cls(**fields)


def _curriculum(data: Any) -> Curriculum | None:
    if data is None:
        return None
    try:
        return Curriculum(**{name: None if ramp is None else Ramp(**ramp) for name, ramp in data.items()})
    except (TypeError, AttributeError) as error:  # a field is missing or unknown, or it is no mapping
        raise ValueError(str(error)) from error


def _check_device(device: Any) -> None:
    """Refuse what torch has no such device for, and "meta", on which there are no numbers."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"model.device={device!r} is no device of torch's, such as cpu or cuda") from error
    if kind == "meta":
        raise ValueError("model.device='meta' has no numbers to train: leave it out, or take cpu or cuda")


def resize_task(task: AnyTask, x_dim: int | None = None, n_context: int | None = None) -> AnyTask:
    """A task with another number of dimensions or context points; None leaves what it has.

    Raises:
        ValueError: the task has no such size, or fields that fit only its old one.
    """
    if isinstance(task, FixedTasks):
        return task.replace(task=resize_task(task.task, x_dim, n_context))
    for name, size in (("x_dim", x_dim), ("n_context", n_context)):
        if size is None or size == getattr(task, name, None):
            continue
        try:
            task = task.replace(**{name: size})
        except TypeError as error:  # not one of its fields
            raise ValueError(f"{type(task).__name__} has no {name} that can be set to {size}") from error
    return task


def _length(task: AnyTask) -> int:
    """Context points, or tokens, of a task's prompts."""
    return getattr(task, "n_ctx" if isinstance(task, TokenDistribution) else "n_context")
