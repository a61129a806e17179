"""Training batches: sampled for every seed by its own generator, on a second thread where that is quicker."""

import statistics
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.models import PromptedModel
from mechicl.models.transformer.fast import put_prompts_last
from mechicl.prompts import lies_prompts_last
from mechicl.tasks import AnyTask, LinearRegression
from mechicl.tasks.sampling import QuickGenerator
from mechicl.training.config import TrainingConfig
from mechicl.training.objectives import examples, weight_of_share

TIMED_BATCHES = 12
NOTABLE = 0.2  # part of a step that sampling takes, from which on it may move to a thread
SMALL_PRODUCT = 400  # torch multiplies a row with a matrix of fewer numbers in plain loops, for many prompts on a CPU


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains on; the axis `seed` counts the models: each seed of the first task, then of the others.

    Attributes:
        step: its number, from 0.
        tokens: `[seed prompt pos d_token]`, or ids `[seed prompt pos]`.
        targets: `[seed prompt row y]`, or ids `[seed prompt row]`.
        generator_states: of each model's generator after sampling this batch, `[seed byte]`.
        weights: of each model's mean loss in the mean over processes, `[seed]`; None for one process.
    """

    step: int
    tokens: Float[Tensor, "seed prompt pos d_token"] | Int[Tensor, "seed prompt pos"]
    targets: Float[Tensor, "seed prompt row y"] | Int[Tensor, "seed prompt row"]
    generator_states: Tensor
    weights: Float[Tensor, "seed"] | None = None


def make_generators(config: TrainingConfig, device: torch.device) -> list[torch.Generator]:
    """One generator a model for its prompts, apart from the one that made its weights."""
    if device.type != "cpu":
        return [torch.Generator(device=device).manual_seed(2**40 + seed) for _, seed in config.members]
    # whatever a model is trained beside, its prompts are the same
    small = goes_across(config, device) and numbers_per_prompt(config) < SMALL_PRODUCT
    across = [small and is_plain(task) for task in config.tasks]
    return [QuickGenerator(prompts_last=across[task]).manual_seed(2**40 + seed) for task, seed in config.members]


def goes_across(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a run's tokens are wanted with the prompts along the last axis in memory, which makes steps quicker.

    One model alone is as quick without, where torch's products of a prompt's rows are no plain loops any more.
    """
    wanted = getattr(config.model, "prefers_prompts_last", False) and config.loss_at == "query"
    alone = len(config.members) == 1
    return wanted and device.type == "cpu" and not (alone and numbers_per_prompt(config) >= SMALL_PRODUCT)


def is_plain(task: AnyTask) -> bool:
    """Whether a task's inputs are drawn without products of matrices, which want each prompt in one place in memory."""
    shaping = ("covariance", "condition_number", "eigenvalues")
    return isinstance(task, LinearRegression) and not any(getattr(task, name) for name in shaping)


def numbers_per_prompt(config: TrainingConfig) -> int:
    """How many numbers the tokens of one whole prompt are."""
    return config.model.format.n_tokens(config.task.n_context) * config.model.d_token


def shard_slice(n_prompts: int, rank: int, world: int) -> slice:
    """The share of process `rank` of `world` in a batch; shares differ by one prompt at most."""
    return slice(rank * n_prompts // world, (rank + 1) * n_prompts // world)


def sample_batch(
    config: TrainingConfig,
    model: PromptedModel,
    generators: list[torch.Generator],
    step: int,
    shard: tuple[int, int] = (0, 1),
) -> Batch:
    """The batch of a step, encoded by `model`; the generators move on.

    With several processes each samples the whole batch and keeps its share, so that any number of processes trains on
    the same prompts. `shard` is this process' number and the number of processes.
    """
    rank, world = shard
    tasks = config.tasks_at(step)
    share, weights = shard_slice(config.batch_size, rank, world), []
    by_model: list[Any] = []  # each model's prompts, or sequences of tokens
    for (task, _), generator in zip(config.members, generators, strict=True):
        prompts = tasks[task].sample(config.batch_size, generator=generator)
        if world > 1:
            weights.append(weight_of_share(prompts, share, world))
            prompts = prompts[share]
        by_model.append(prompts)
    states = torch.stack([generator.get_state() for generator in generators])
    joined = type(by_model[0]).concatenate(by_model) if len(by_model) > 1 else by_model[0]  # no copy for one model
    tokens, targets = examples(model, joined, config.loss_at)
    sizes = (len(by_model), len(by_model[0]))
    tokens, targets = tokens.unflatten(0, sizes), targets.unflatten(0, sizes)
    if goes_across(config, tokens.device) and not lies_prompts_last(tokens[0]):
        tokens = put_prompts_last(tokens)
    loss_weights = torch.tensor(weights, dtype=config.model.torch_dtype, device=tokens.device) if weights else None
    return Batch(step, tokens, targets, states, loss_weights)


def batches(
    config: TrainingConfig,
    model: PromptedModel,
    generators: list[torch.Generator],
    first_step: int,
    shard: tuple[int, int] = (0, 1),
) -> Generator[Batch, None, None]:
    """The batches from `first_step` to the last, sampled in the quicker of two ways.

    A second thread that samples ahead is faster if sampling takes a notable part of a step and a core is free for it.
    So the first few batches are sampled in turn and timed; if that part is notable, the next few ahead; the rest in the
    faster way. The prompts are the same either way: each batch carries the generator states after it.
    """
    sampling_seconds: list[float] = []
    seconds: list[float] = []  # of whole steps
    end_of_trial = min(first_step + TIMED_BATCHES, config.steps)
    for step in range(first_step, end_of_trial):
        started = time.perf_counter()
        batch = sample_batch(config, model, generators, step, shard)
        sampling_seconds.append(time.perf_counter() - started)
        yield batch  # comes back when the step is done
        seconds.append(time.perf_counter() - started)
    step = end_of_trial
    if step < config.steps and statistics.median(sampling_seconds) > NOTABLE * statistics.median(seconds):
        end_of_trial = min(step + TIMED_BATCHES, config.steps)
        seconds_ahead: list[float] = []
        started = time.perf_counter()
        with closing(batches_ahead(config, model, generators, step, shard, end=end_of_trial)) as trial:
            for batch in trial:
                yield batch
                seconds_ahead.append(time.perf_counter() - started)
                started = time.perf_counter()
        step = end_of_trial
        if step < config.steps and statistics.median(seconds_ahead) < statistics.median(seconds):
            yield from batches_ahead(config, model, generators, step, shard)
            return
    for later in range(step, config.steps):
        yield sample_batch(config, model, generators, later, shard)


def batches_ahead(
    config: TrainingConfig,
    model: PromptedModel,
    generators: list[torch.Generator],
    first_step: int,
    shard: tuple[int, int] = (0, 1),
    end: int | None = None,
) -> Generator[Batch, None, None]:
    """The batches from `first_step` to `end` (or the last), each sampled on a thread while the one before is used."""
    end = config.steps if end is None else end
    with ThreadPoolExecutor(1, "mechicl-batches") as thread:
        upcoming = thread.submit(sample_batch, config, model, generators, first_step, shard)
        for step in range(first_step, end):
            batch = upcoming.result()
            if step + 1 < end:
                upcoming = thread.submit(sample_batch, config, model, generators, step + 1, shard)
            yield batch
