"""The training loop: one for every task, model, number of seeds and number of processes."""

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast, broadcast_object_list
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl.base.arguments import checked
from mechicl.base.files import MOST_VALUES
from mechicl.base.locks import locked
from mechicl.base.progress import progress_bar
from mechicl.base.settings import settings
from mechicl.base.tensor_files import write_tensors
from mechicl.base.threads import n_cores, using_threads
from mechicl.base.warning import warn
from mechicl.models import build
from mechicl.models.transformer.fast import fuse_attention
from mechicl.training.clamping import Clamping
from mechicl.training.config import TrainingConfig
from mechicl.training.data import Batch, batches, examples, losses, make_generators, sample_batch, sample_examples
from mechicl.training.ensemble import Ensemble
from mechicl.training.metrics import METRICS_FILE, Metrics
from mechicl.training.optimizers import clip_each_seed, make_optimizer
from mechicl.training.results import TrainingResult, collect_result, snapshot_path
from mechicl.training.routes import Route, choose_route, use_route
from mechicl.training.speed import keep_freed_memory, products_in_tf32
from mechicl.training.state import (
    EARLIER_STATE_FILE,
    STATE_FILE,
    DamagedSaveError,
    RunState,
    digest_of_start,
    optimizer_moments,
    restore_moments,
)
from mechicl.training.whole_steps import StepInputs, WholeStep


class TrainingDivergedError(FloatingPointError):
    """The loss became NaN or infinite."""


@checked
def train(
    config: TrainingConfig,
    folder: str | Path,
    *,
    restart: bool = False,
    stop_diverged: bool = False,
    progress: bool | None = None,
    on_save: Callable[[int], None] | None = None,
) -> TrainingResult:
    """Train the models of a config, one for each seed, resuming from the folder's last save if there is one.

    A run that is killed and called again gives the same weights, bit for bit, as an uninterrupted one. It runs on the
    CPU, a GPU, or several processes started by `accelerate launch` or `torchrun`; only the main process writes files.

    Args:
        config: the run: task, model, seeds, number of steps, optimiser.
        folder: folder of saves, metrics.jsonl and snapshots; made if it does not exist. All processes must see it.
        restart: delete an earlier run from the folder, instead of resuming it.
        stop_diverged: a seed whose loss is NaN or infinite stops there with its last weights, while the others
            continue; the record has the step (`diverged_at`, -1 for the others). By default that is an error.
        on_save: function that is called with the step number after each save, in every process.

    Returns:
        A `TrainingResult`; `checkpoints.save(folder, result.models, result.record)` saves its models for `load`.

    Raises:
        FolderInUseError: another process trains in the folder.
        TypeError: a task that cannot be saved (see `tasks.task_to_dict`).
        TrainingDivergedError: a loss is NaN or infinite.
        DamagedSaveError (a ValueError): a file of the last save is missing or was changed. The message tells you
            whether the save before is intact.
        ValueError: the folder contains a run with another config or from another kind of device, or the config does
            not fit the devices, processes or trackers of this machine.

    Example:
        >>> config = TrainingConfig(seeds=(0, 1), steps=100, batch_size=64)
        >>> result = train(config, "runs/example", progress=False)
    """
    config.to_dict()  # refuses a task that cannot be saved
    n_lines = config.steps // config.log_every + config.steps // config.eval_every + 2
    if n_lines * (len(config.members) + 2) > MOST_VALUES // 2:
        raise ValueError(
            f"the curve would have {n_lines:,} lines of {len(config.members):,} losses, more than a record can hold: "
            f"use a larger log_every (now {config.log_every}) or eval_every (now {config.eval_every})"
        )
    folder = Path(folder)
    accelerator = _accelerator(config, folder)
    with locked(folder) if accelerator.is_main_process else nullcontext():
        if config.tracker:
            _start_tracker(config, accelerator)
        if accelerator.is_main_process:
            _clean_folder(folder, restart)
        accelerator.wait_for_everyone()
        try:
            with products_in_tf32(config.tf32, accelerator.device), using_threads():  # the training sets the number
                shown = progress if accelerator.is_main_process else False
                training = _Training(config, folder, accelerator, stop_diverged, shown)
                training.run(shown, on_save)
                return collect_result(config, folder, training.state, training.ensemble, accelerator)
        finally:
            for tracker in accelerator.trackers:  # end_training() would end the processes' group too
                tracker.finish()


def _accelerator(config: TrainingConfig, folder: Path) -> Accelerator:
    if PartialState._shared_state and PartialState().num_processes == 1:
        # accelerate keeps the first run's device and precision for the whole process; this run may want others
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=config.cpu, mixed_precision=config.mixed_precision, log_with=config.tracker, project_dir=str(folder)
    )
    if config.tracker and not accelerator.log_with:
        raise ValueError(f"the tracker {config.tracker!r} is not installed")
    device = accelerator.device.type
    if torch.device(config.model.device).type not in ("cpu", device):  # "cpu" is the default
        raise ValueError(
            f"model.device={config.model.device!r}, but the training is on {device}: leave it out; cpu=True "
            f"(--cpu) uses the CPU even if there is an accelerator"
        )
    if config.batch_size < accelerator.num_processes:
        raise ValueError(f"{accelerator.num_processes} processes cannot share a batch of {config.batch_size} prompts")
    return accelerator


def _start_tracker(config: TrainingConfig, accelerator: Accelerator) -> None:
    # TensorBoard would show the config as a second run, without any curve
    settings = None if config.tracker == "tensorboard" else config.to_dict()
    try:
        accelerator.init_trackers("mechicl", config=settings)
    except Exception as error:  # each tracker has its own errors: no key, no connection, no folder
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the tracker {config.tracker!r} could not be started: {reason[:500]}") from error


def _clean_folder(folder: Path, restart: bool) -> None:
    """Make the folder; remove temporary files of a killed process and, on request, the run itself."""
    (folder / "snapshots").mkdir(parents=True, exist_ok=True)
    stale = [*folder.glob(".*.tmp"), *folder.glob("snapshots/.*.tmp")]
    if restart:  # the state first: a kill after that has the same effect
        states = (folder / STATE_FILE, folder / EARLIER_STATE_FILE)
        stale = [*states, folder / METRICS_FILE, *folder.glob("snapshots/*.safetensors"), *stale]
    for path in stale:
        path.unlink(missing_ok=True)


class _Training:
    def __init__(
        self, config: TrainingConfig, folder: Path, accelerator: Accelerator, stop_diverged: bool, progress: bool | None
    ):
        self.config, self.folder, self.accelerator, self.stop_diverged = config, folder, accelerator, stop_diverged
        device = accelerator.device
        models = [build(config.model.replace(device=str(device)), seed) for _, seed in config.members]
        self.encoder = models[0]
        self.ensemble = Ensemble(models).to(device)
        if config.fused_attention:
            if len(models) > 1:
                raise ValueError(
                    f"fused_attention=True is for one seed at a time, got {len(models)} models: run each separately "
                    f"(--seeds 0, with another --run folder)"
                )
            fuse_attention(self.ensemble.template)
        if device.type == "cpu":
            keep_freed_memory()
        self.optimizer = self._optimizer(self.ensemble.flat)
        self.generators = make_generators(config, device)
        never = torch.full((len(config.members),), -1)
        self.state = RunState(
            step=0, weights={}, moments={}, stopped_at=never, diverged_at=never.clone(), wall_time=0.0,
            generators=torch.stack([generator.get_state() for generator in self.generators]),
            route=Route(),
        )  # fmt: skip
        self.last_save: int | None = None
        self.shard = (accelerator.process_index, accelerator.num_processes)
        self.whole_step: WholeStep | None = None
        if (folder / STATE_FILE).is_file():
            self._resume()
        else:
            several = config.replace(routes="rule") if accelerator.num_processes > 1 else config
            timed = partial(self._compiled_seconds, progress)
            self.state.route = choose_route(several, self.ensemble, device, compiled_seconds=timed)
        use_route(self.ensemble, self.state.route)
        if broadcast_object_list([self.last_save])[0] != self.last_save:
            raise ValueError(f"{folder} must be a folder that all processes see: this one finds another save there")
        # torch's own optimiser: without loss scaling (bf16 needs none) accelerate's wrapper only adds overhead
        self.step_model: Callable[..., Tensor] = accelerator.prepare(self.ensemble)
        if not (config.compile or self.state.route.compiled):
            if self.whole_step is not None:  # it was tried, and is slower
                self.whole_step = None
                self.optimizer.state.clear()
        elif self.whole_step is None:
            self.whole_step = self._make_whole_step(self.state.route.threads)
        self.eval_tokens, self.eval_targets = self._eval_batch()
        tokens = self.eval_tokens[0, :1]
        self.clamping = Clamping(config, folder, self.encoder, tokens) if config.interventions else None
        sources = {} if self.clamping is None else self.clamping.digests
        if self.last_save is not None and sources != self.state.sources:
            name = min({*sources.items()} ^ {*self.state.sources.items()})[0]
            raise ValueError(f"{folder} has a run in which the source of {name} had other weights: use another folder")
        self.state.sources = sources

    def _optimizer(self, weights: torch.nn.Parameter) -> torch.optim.Optimizer:
        return make_optimizer(self.config.optimizer, weights, self.ensemble.shapes, self.config.learning_rate)

    def _make_whole_step(self, threads: int) -> WholeStep:
        return WholeStep(self.config, self.encoder, self.ensemble, self.optimizer, self.generators, self.shard, threads)

    def _compiled_seconds(self, progress: bool | None, threads: int) -> float:
        """The time of a compiled step that changes no model's weights; moments and generators are reset."""
        if self.whole_step is None:
            if settings.progress if progress is None else progress:
                tqdm.write("compiling the steps, because that is expected to save time in this run", file=sys.stderr)
            self.whole_step = self._make_whole_step(threads)
        moments, states = list(self.whole_step.moments.values()), [each.get_state() for each in self.generators]
        kept, started = [each.clone() for each in moments], time.perf_counter()
        nobody = torch.zeros(len(self.generators), dtype=torch.bool)
        try:
            self.whole_step(self.whole_step.sample(max(self.config.steps - 1, 0)), nobody)
            return time.perf_counter() - started
        finally:  # also if torch cannot compile it
            self.ensemble.flat.grad = None
            for moment, before in zip(moments, kept, strict=True):
                moment.copy_(before)
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)

    def _resume(self) -> None:
        state, fresh, device = RunState.load(self.folder, self.config), self.state, self.accelerator.device.type
        self._check_shapes(state)
        if state.generators.shape != fresh.generators.shape:
            raise ValueError(
                f"{self.folder} has a run from another kind of device than {device}, with other random numbers; "
                f"continue there, use another folder or restart it"
            )
        self.ensemble.load(state.weights)
        restore_moments(self.optimizer, state.moments)
        for generator, saved in zip(self.generators, state.generators, strict=True):
            generator.set_state(saved.clone())  # a row of a tensor would crash torch
        if device == "cpu" and state.route.threads > n_cores():
            warn(
                f"{self.folder} was started with {state.route.threads} threads, on which its last bits depend, and "
                f"continues with the same number; this machine has {n_cores()} cores, so it will be slow"
            )
        self.state, self.last_save = state, state.step

    def _check_shapes(self, state: RunState) -> None:
        """Refuse a save whose tensors have other shapes than this run's: an optimiser would write beyond their ends."""
        twin = torch.nn.Parameter(torch.zeros_like(self.ensemble.flat))
        twin.grad = torch.zeros_like(twin)
        optimizer = self._optimizer(twin)
        optimizer.step()
        pairs = {
            "weights": (state.weights, self.ensemble.state()),
            "moments": (state.moments, optimizer_moments(optimizer)),
        }
        for group, tensors in pairs.items():
            saved, expected = ({n: (t.shape, t.dtype) for n, t in each.items()} for each in tensors)
            if wrong := sorted(name for name in {**saved, **expected} if saved.get(name) != expected.get(name)):
                path = self.folder / STATE_FILE
                raise DamagedSaveError(f"{path} has other {group} than this run: {wrong}; use another folder")

    @torch.enable_grad()
    def run(self, progress: bool | None, on_save: Callable[[int], None] | None) -> None:
        config, state, accelerator = self.config, self.state, self.accelerator
        # a run without a save starts over and logs its lines again
        n_bytes = state.files.get(METRICS_FILE, (0,))[0]
        metrics = Metrics(self.folder, n_bytes) if accelerator.is_main_process else None
        bar = progress_bar(total=config.steps, initial=state.step, progress=progress, unit="step")
        started = time.perf_counter() - state.wall_time
        sample = self._sample if self.whole_step is None else self.whole_step.sample
        stream: Generator[Batch | StepInputs, None, None] = batches(sample, state.step, config.steps)
        snapshot_steps, window_start, window_step = set(config.snapshot_steps), time.perf_counter(), state.step
        try:
            if self.last_save is None:
                if 0 in snapshot_steps:
                    self._snapshot(0)
                self._log(metrics, 0, None, self._evaluate(), 0.0)
            while not self._done():
                batch = next(stream)
                step_losses = self._step(batch)
                step = state.step = batch.step + 1
                state.generators = batch.generator_states
                if step in snapshot_steps:
                    self._snapshot(step)
                evaluation = None
                if self._done() or step % config.save_every == 0 or step % config.eval_every == 0:
                    evaluation = self._evaluate()  # the loss of the step was that of the weights before it
                    self._check_finite(step, evaluation)
                if step % config.eval_every and not self._done():  # the curve ends with the losses of the last weights
                    evaluation = None
                if evaluation is not None and config.target_loss is not None:
                    reached = (state.stopped_at < 0) & (evaluation <= config.target_loss)
                    state.stopped_at[reached] = step
                if evaluation is not None or step % config.log_every == 0:
                    now = time.perf_counter()
                    speed = (step - window_step) / max(now - window_start, 1e-9)
                    window_start, window_step = now, step
                    self._log(metrics, step, step_losses, evaluation, speed)
                    bar.set_postfix({"loss": f"{step_losses.mean().item():.4g}"}, refresh=False)
                bar.update(1)
                if step % config.save_every == 0 or self._done():
                    state.wall_time = time.perf_counter() - started
                    self._save(metrics)
                    if on_save is not None:
                        on_save(step)
        finally:
            stream.close()
            bar.close()
            if metrics is not None:
                metrics.close()
        accelerator.wait_for_everyone()  # every process reads what the main one wrote

    def _done(self) -> bool:
        return self.state.step >= self.config.steps or bool((self.state.stopped_at >= 0).all())

    def _sample(self, step: int) -> Batch:
        prompts_last = self.state.route.prompts_last
        return sample_batch(self.config, self.encoder, self.generators, step, self.shard, prompts_last)

    def _step(self, batch: Batch | StepInputs) -> Float[Tensor, "seed"]:
        if isinstance(batch, Batch):
            step_losses = self._passes(batch)
        else:
            assert self.whole_step is not None
            step_losses = self.whole_step(batch, self.state.stopped_at < 0)
        weights = self.ensemble.flat
        if self.accelerator.num_processes > 1:
            step_losses = cast(Tensor, self.accelerator.reduce(step_losses, "mean"))
            if self.whole_step is not None:  # torch's wrapper averages the gradients of other passes
                weights.grad = cast(Tensor, self.accelerator.reduce(weights.grad, "mean"))
        self._check_finite(batch.step + 1, step_losses)
        if self.whole_step is None or not self.whole_step.updates:
            self._update(batch.step)
        return step_losses

    def _passes(self, batch: Batch) -> Float[Tensor, "seed"]:
        outputs = self.step_model(batch.tokens, self.config.loss_at, *self._clamps(batch.step))
        step_losses = losses(outputs, batch.targets)
        if batch.weights is not None:
            step_losses = step_losses * batch.weights
        self.ensemble.flat.grad = None
        step_losses.sum().backward()
        return step_losses.detach()

    def _update(self, step: int) -> None:
        weights, learning_rate = self.ensemble.flat, self.config.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        diverged = self.state.diverged_at >= 0
        if self.stop_diverged and weights.grad is not None and diverged.any():
            weights.grad[diverged] = 0
        if self.config.gradient_clip is not None and weights.grad is not None:
            clip_each_seed(weights.grad, self.config.gradient_clip)
        stopped = self.state.stopped_at >= 0
        kept = weights.detach()[stopped].clone() if stopped.any() else None
        if self.config.weight_decay:
            weights.detach().mul_(1 - learning_rate * self.config.weight_decay)
        self.optimizer.step()
        if kept is not None:  # the weights of finished seeds are fixed
            with torch.no_grad():
                weights[stopped] = kept

    def _clamps(self, step: int) -> list[Any]:
        """The clamps of a training step as an argument of the ensemble, if there are any."""
        active = [] if self.clamping is None else self.clamping.at(step)
        return [active] if active else []

    def _check_finite(self, step: int, losses: Tensor) -> None:
        values = losses.tolist()
        if all(map(math.isfinite, values)):
            return
        running = self.state.stopped_at < 0
        bad = [i for i, value in enumerate(values) if not math.isfinite(value) and running[i]]
        if bad and self.stop_diverged:
            self.state.stopped_at[bad] = self.state.diverged_at[bad] = step
        elif bad:
            seeds = ", ".join(f"{self._member_text(i)} ({values[i]})" for i in bad)
            saved = "no save yet" if self.last_save is None else f"last good save: step {self.last_save}"
            raise TrainingDivergedError(
                f"the loss is not finite at step {step} for seed {seeds}; {saved} in {self.folder}. Try a smaller "
                f"learning_rate (now {self.config.learning_rate:g}), warmup_steps, a smaller gradient_clip (now "
                f"{self.config.gradient_clip}), or token_clip in the model."
            )

    def _member_text(self, index: int) -> str:
        task, seed = self.config.members[index]
        return f"{seed} of task {task}" if self.config.more_tasks else str(seed)

    def _eval_batch(self) -> tuple[Tensor, Tensor]:
        config, device = self.config, self.accelerator.device
        n, source = config.eval_prompts, {"seed": config.eval_seed, "device": device}
        prompts = [sample_examples(task, self.encoder, n, **source) for task in config.eval_tasks]
        tokens, targets = zip(*(examples(self.encoder, p, config.loss_at) for p in prompts), strict=True)

        def by_member(by_task: tuple[Tensor, ...]) -> Tensor:
            stacked = torch.stack(by_task)[:, None]
            return stacked.expand(-1, len(config.seeds), *stacked.shape[2:]).flatten(0, 1)  # a view for one task

        return by_member(tokens), by_member(targets)

    @torch.no_grad()
    def _evaluate(self) -> Float[Tensor, "seed"]:
        clamps = self._clamps(max(self.state.step - 1, 0))  # those of the last training step
        evaluation = losses(self.ensemble(self.eval_tokens, self.config.loss_at, *clamps), self.eval_targets)
        # the main process' value: a difference in the last bit must not stop some processes and not others
        return broadcast(evaluation).cpu()

    def _log(
        self, metrics: Metrics | None, step: int, losses: Tensor | None, evaluation: Tensor | None, speed: float
    ) -> None:
        if metrics is None:
            return
        line: dict[str, Any] = {"step": step, "learning_rate": self.config.learning_rate_at(max(step - 1, 0))}
        if losses is not None:
            line |= {"loss": losses.tolist(), "steps_per_second": round(speed, 2)}
        if evaluation is not None:
            line["eval_loss"] = evaluation.tolist()
        metrics.write(line)
        if self.config.tracker:
            self.accelerator.log(self._tracked(line), step=step)

    def _tracked(self, line: dict[str, Any]) -> dict[str, float]:
        """A line of the metrics for trackers: the mean over all models, and each value if there are several."""
        values = {name: line[name] for name in ("learning_rate", "steps_per_second") if name in line}
        for name in {"loss", "eval_loss"} & line.keys():
            each = line[name]
            values[name] = sum(each) / len(each)
            if len(each) > 1:
                values |= {f"{name}/seed {self._member_text(i)}": loss for i, loss in enumerate(each)}
        return values

    def _save(self, metrics: Metrics | None) -> None:
        state = self.state
        state.weights = self.ensemble.state()
        state.moments = optimizer_moments(self.optimizer)
        if metrics is not None:  # the main process
            state.files[METRICS_FILE] = metrics.sync()
            state.save(self.folder, self.config)
        self.accelerator.wait_for_everyone()
        self.last_save = state.step

    def _snapshot(self, step: int) -> None:
        if self.accelerator.is_main_process:
            path = snapshot_path(self.folder, step)
            write_tensors(path, self.ensemble.state())
            n_bytes = path.stat().st_size
            name = path.relative_to(self.folder).as_posix()
            self.state.files[name] = n_bytes, cast(str, digest_of_start(path, n_bytes))
        self.accelerator.wait_for_everyone()  # clamps may read it
