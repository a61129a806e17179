"""The configuration of a training run: task, model, optimisation, saving."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch

from mechicl.base.annotations import parts_of
from mechicl.base.arguments import Count, Natural, NonNegative, Positive, check_fields, checked, strictly_between
from mechicl.models import ModelConfig, TransformerConfig, config_from_dict
from mechicl.prompts import At
from mechicl.tasks import AnyTask, FixedTasks, LinearRegression, task_from_dict, task_to_dict
from mechicl.tasks.sampling import TokenDistribution
from mechicl.training.clamp import Clamp
from mechicl.training.curriculum import Curriculum, Ramp
from mechicl.training.optimizers import OptimizerName


@dataclass(frozen=True)
class TrainingConfig:
    """A whole training run; two runs with equal configs and routes give the same weights, bit for bit, on one machine.

    Attributes:
        task: distribution of the prompts, an object of `mechicl.tasks`.
        model: config of the network, a `TransformerConfig` or `LSTMConfig`.
        more_tasks: further tasks with prompts of the same shape; every seed gets a model on each, all trained together.
        seeds: one model for each (and for each task), trained together; a seed fixes its initial weights and prompts.
            On a CPU, its first batch can be `task.sample(batch_size, seed=seed)`: evaluate on other seeds.
        steps: number of optimisation steps.
        batch_size: prompts per step and seed, over all processes together.
        optimizer: "adam", or "soap", which is Adam in each weight matrix's own axes: faster where deep models are
            ill-conditioned (see `training.SOAP`).
        learning_rate: learning rate after warm-up.
        schedule: change of the learning rate after warm-up: "constant", or "cosine", half a wave that would
            reach 0 at step `steps`, one after the last.
        warmup_steps: steps in which the learning rate grows linearly from 0.
        gradient_clip: bound on the global norm of each seed's gradient; None for no bound.
        weight_decay: decoupled weight decay, as in AdamW: each step also multiplies all weights, biases and norms by
            1 - learning rate x weight_decay.
        loss: "query" for the mean squared error of the query's prediction, "points" for that of all points; by default
            all points if one pass predicts them (interleaved, causal), else the query. For token ids the loss is the
            cross entropy of the next token, in nats, over the tokens that can be predicted.
        curriculum: schedule by which prompts grow up to the task's own size; None for whole prompts throughout.
        eval_every: steps between evaluations on held-out prompts.
        eval_prompts: number of held-out prompts, the same ones every time.
        eval_seed: seed of the held-out prompts.
        target_loss: held-out loss at which a seed stops; the run ends when all seeds have stopped. None for no bound.
        log_every: steps between lines of training losses in metrics.jsonl.
        save_every: steps between saves, from which a killed run resumes.
        n_snapshots: approximate number of snapshots of the weights for the checkpoint (see `snapshot_steps`).
        snapshots_between: space snapshots evenly from the first of these two steps to the second; None for geometric
            distances over the whole run.
        mixed_precision: "no" or "bf16" (where the device has it).
        tf32: let float32 matrix products on a GPU round their factors to TF32.
        fused_attention: torch's fused kernel for softmax attention, for one seed.
        compile: compile whole steps with `torch.compile`: sampling (where it can be traced), passes, clipping and Adam;
            on a GPU with CUDA graphs. On a CPU it needs a C++ compiler. A resumed run is the same bit for bit, with a
            fused pass or on a GPU to rounding. It takes seconds to a few minutes before the first step. None compiles
            only where a run on the CPU is long enough to profit and compiled steps prove faster at its start; never
            with `routes="rule"`, a curriculum or interventions. With a `target_loss`, an eighth of the steps counts.
        routes: how a run on the CPU chooses between routes that compute the same steps to rounding (number of threads,
            order of products, layout in memory): "measured" times them at the start, "rule" decides by sizes alone, so
            that the same config gives the same bits again; None measures only for runs that are long enough to profit.
            A resumed run keeps its route, which is in the record ("route").
        tracker: name of a tracker that accelerate knows ("tensorboard", "wandb", ...), if any.
        cpu: use the CPU even if there is an accelerator.
        interventions: clamps, which set, copy or freeze parts of activations in some steps (see `Clamp`).
    """

    task: AnyTask = field(default_factory=LinearRegression)
    model: ModelConfig = field(default_factory=lambda: TransformerConfig(x_dim=10, n_context=10))
    more_tasks: tuple[AnyTask, ...] = ()
    seeds: tuple[int, ...] = (0,)
    steps: Natural = 5000
    batch_size: Count = 2048
    optimizer: OptimizerName = "adam"
    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Natural = 0
    gradient_clip: Positive | None = 10.0
    weight_decay: NonNegative = 0.0
    loss: Literal["query", "points"] | None = None
    curriculum: Curriculum | None = None
    eval_every: Count = 500
    eval_prompts: Count = 2000
    eval_seed: int = 2**31
    target_loss: Annotated[float, strictly_between(-math.inf, math.inf)] | None = None
    log_every: Count = 100
    save_every: Count = 1000
    n_snapshots: Natural = 0
    snapshots_between: tuple[Natural, Natural] | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    tf32: bool = False
    fused_attention: bool = False
    compile: bool | None = None
    routes: Literal["measured", "rule"] | None = None
    tracker: str | None = None
    cpu: bool = False
    interventions: tuple[Clamp, ...] = ()

    def __post_init__(self):
        check_fields(self)
        if self.snapshots_between is not None and self.snapshots_between[0] >= self.snapshots_between[1]:
            raise ValueError(f"snapshots_between must be two steps, the lower first, got {self.snapshots_between}")
        if self.snapshots_between is not None and self.n_snapshots == 0:
            raise ValueError("snapshots_between spaces the snapshots, and there are none: give n_snapshots=, too")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be one or more different numbers, got {self.seeds}")
        if torch.device(self.model.device).type == "meta":
            raise ValueError("model.device='meta' has no numbers to train: leave it out, or use cpu or cuda")
        for task in self.tasks:
            self._check_fit(task)
        if self.interventions and (self.compile or self.fused_attention):
            raise ValueError("interventions need hooks, which compile=True and fused_attention=True leave out")
        for i, clamp in enumerate(self.interventions):
            if clamp.steps is not None and clamp.steps[1] > self.steps:
                raise ValueError(f"interventions[{i}]: steps={clamp.steps} is outside the run of {self.steps} steps")
        if self.loss == "points" and not self.model.one_pass:
            raise ValueError("loss='points' needs interleaved prompts and causal keys: only then does one pass give it")
        if self.curriculum is not None:
            for task in self.tasks:
                self.curriculum.check(task, self.steps)
        longest = _length(self.task)
        length, unit = ("n_ctx", "tokens") if self.on_tokens else ("n_context", "context points")
        # an LSTM, and a transformer with computed positions or none, read prompts of any length
        positions = getattr(self.model, "positional_embedding_type", "none")
        if positions in ("standard", "one_hot") and longest > (getattr(self.model, length) or 0):
            raise ValueError(f"prompts of {longest} {unit}, but the model has {length}={getattr(self.model, length)}")

    def _check_fit(self, task: AnyTask) -> None:
        if not hasattr(task, "sample"):
            raise ValueError(f"task must have a method sample, got {task!r}")
        if isinstance(task, TokenDistribution) != self.on_tokens:
            raise ValueError(
                f"{type(task).__name__} does not fit a model with prompt_format="
                f"{getattr(self.model, 'prompt_format', 'interleaved')!r}: token ids need a task of token sequences"
            )
        for name in ("d_vocab",) if isinstance(task, TokenDistribution) else ("x_dim", "y_dim"):
            if getattr(task, name) != getattr(self.model, name):
                raise ValueError(
                    f"the task has {name}={getattr(task, name)}, the model {name}={getattr(self.model, name)}: "
                    "they must agree"
                )
        if _length(task) != _length(self.task):
            raise ValueError(f"tasks of lengths {_length(self.task)} and {_length(task)} cannot be trained together")
        if self.on_tokens and self.model.keys != "causal":
            raise ValueError(f"keys={self.model.keys!r} shows a model the token that it must predict: use 'causal'")
        if self.on_tokens and self.loss is not None:
            raise ValueError(f"loss={self.loss!r} is for prompts of points; token models predict every token")

    @property
    def tasks(self) -> tuple[AnyTask, ...]:
        """The task and `more_tasks`."""
        return (self.task, *self.more_tasks)

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """A pair (index of the task, seed) for each model, in order: all seeds of the first task first."""
        return tuple((task, seed) for task in range(len(self.tasks)) for seed in self.seeds)

    @property
    def on_tokens(self) -> bool:
        """True if the model reads token ids; the loss is then the cross entropy of the next token, in nats."""
        return getattr(self.model, "prompt_format", None) == "token_ids"

    @property
    def loss_at(self) -> At:
        """Where the loss is taken: "query", all "points", or for token ids all "positions"."""
        if self.on_tokens:
            return "positions"
        return self.loss or ("points" if self.model.one_pass else "query")

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """Training steps of the snapshots, in ascending order; empty with n_snapshots=0 and nothing frozen.

        By default these are 0 and geometrically spaced steps from a 200th of the run to its end; with
        `snapshots_between` evenly spaced ones. The steps that activations are frozen at come in addition.
        """
        frozen = {clamp.snapshot for clamp in self.interventions if clamp.method == "freeze" and clamp.snapshot}
        if self.n_snapshots == 0:
            return tuple(sorted(frozen))
        if self.snapshots_between is not None:
            begin, end = self.snapshots_between
            n = max(2, self.n_snapshots)
            spaced = (round(begin + (end - begin) * i / (n - 1)) for i in range(n))
            return tuple(sorted({*frozen, *(step for step in spaced if step <= self.steps)}))
        first, n = max(1, self.steps // 200), max(2, self.n_snapshots - 1)
        spaced = (first * (self.steps / first) ** (i / (n - 1)) for i in range(n))
        return tuple(sorted({0, *frozen, *(min(self.steps, round(step)) for step in spaced)}))

    @checked
    def tasks_at(self, step: int) -> tuple[AnyTask, ...]:
        """Return the tasks that training step `step` (from 0) draws its prompts from, sized by the curriculum."""
        return tuple(self.curriculum.task_at(task, step) if self.curriculum else task for task in self.tasks)

    @property
    def eval_tasks(self) -> tuple[AnyTask, ...]:
        """Distributions of held-out prompts.

        For `FixedTasks` the distribution that their tasks were drawn from; for tables of varied sizes the largest.
        """
        varied = (task.replace(varied=False) if getattr(task, "varied", False) else task for task in self.tasks)
        return tuple(task.task if isinstance(task, FixedTasks) else task for task in varied)

    @checked
    def learning_rate_at(self, step: Natural) -> float:
        """Return the learning rate of training step `step` (from 0)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    @checked
    def resized(
        self, *, x_dim: int | None = None, n_context: int | None = None, steps: int | None = None
    ) -> "TrainingConfig":
        """Return the config of the same run in another size; tasks, model and curriculum change together.

        Other fields of the model, like the width of its heads, stay unchanged. The curriculum starts and climbs in
        proportion and takes the same number of steps as before or, if `steps` is smaller, the same share of them.

        Args:
            x_dim: new dimension of the inputs; by default unchanged.
            n_context: new number of context points; by default unchanged.
            steps: new number of training steps; by default unchanged.

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
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Convert the config to plain JSON data; `from_dict` is the inverse."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {"task": task_to_dict(self.task), "model": self.model.to_dict()}
        data["more_tasks"] = [task_to_dict(task) for task in self.more_tasks]
        if self.curriculum is not None:
            data["curriculum"] = dataclasses.asdict(self.curriculum)
        # without either, records and the names of cells in sweeps are those of earlier versions
        if clamps := data.pop("interventions"):
            data["interventions"] = [dataclasses.asdict(clamp) for clamp in clamps]
        for name in ("routes", "compile"):
            if data[name] is None:
                del data[name]
        return data

    @classmethod
    @checked
    def from_dict(cls, data: dict[str, Any]) -> "TrainingConfig":
        """Make the config that `to_dict` wrote."""
        fields = dict(data)
        if missing := sorted({"task", "model", "seeds"} - set(fields)):
            raise ValueError(f"a training config needs {missing}")
        if unknown := sorted(set(fields) - {f.name for f in dataclasses.fields(cls)}):
            raise ValueError(f"TrainingConfig has no field {unknown}")
        readers: dict[str, Callable[[Any], Any]] = {
            "task": task_from_dict, "model": config_from_dict,
            "curriculum": lambda ramps: None if ramps is None else Curriculum(
                **{name: None if ramp is None else Ramp(**ramp) for name, ramp in ramps.items()}
            ),
            "more_tasks": lambda tasks: tuple(map(task_from_dict, tasks or ())),
            "interventions": lambda clamps: tuple(Clamp(**clamp) for clamp in clamps or ()),
        }  # fmt: skip
        for name, read in readers.items():
            try:
                fields[name] = read(fields.get(name))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{name}: {error}") from error
        return cls(**fields)


def resize_task(task: AnyTask, x_dim: int | None = None, n_context: int | None = None) -> AnyTask:
    """A task with another number of dimensions or context points; None leaves the number unchanged."""
    if isinstance(task, FixedTasks):
        return task.replace(task=resize_task(task.task, x_dim, n_context))
    for name, size in (("x_dim", x_dim), ("n_context", n_context)):
        if size is None or size == getattr(task, name, None):
            continue
        fields = getattr(task, "__dataclass_fields__", (name,))
        if name not in fields:
            raise ValueError(f"{type(task).__name__} has no {name} that can be set to {size}")
        task = task.replace(**{name: size})
    return task


def change(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """A config with fields changed by their paths, all at once, so that fields that must agree can change together.

    "x_dim" and "n_context" change the size of task, model and curriculum.
    """
    sizes = {name: changes[name] for name in ("x_dim", "n_context") if name in changes}
    if sizes:
        config = config.resized(**sizes)
    return _changed(config, {path: value for path, value in changes.items() if path not in sizes}, "config")


def _changed(part: Any, changes: Mapping[str, Any], path: str) -> Any:
    fields = [field.name for field in dataclasses.fields(part) if field.init]
    values: dict[str, Any] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in fields:
            raise ValueError(f"{path} ({type(part).__name__}) has no field {first!r}; it has {', '.join(fields)}")
        if rest:
            values.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    hints = get_type_hints(type(part))
    for name, value in values.items():
        inner = getattr(part, name)
        if value is None and any("none" in get_args(each) for each in parts_of(hints[name])):
            values[name] = "none"  # a value of the field; None would mean its default
        if isinstance(value, dict) and dataclasses.is_dataclass(inner):
            values[name] = _changed(inner, value, name if path == "config" else f"{path}.{name}")
    return getattr(part, "replace", lambda **new: dataclasses.replace(part, **new))(**values)


def _length(task: AnyTask) -> int:
    return getattr(task, "n_ctx" if isinstance(task, TokenDistribution) else "n_context")
