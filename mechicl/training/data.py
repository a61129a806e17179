"""Training batches, sampled for every seed by its own generator (on a second thread where that is faster), and losses.

The loss is the squared error on points, or the cross entropy of the next token.
"""

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.precision import at_least_float32
from mechicl.base.threads import n_cores
from mechicl.models import PromptedModel, TableTransformer
from mechicl.models.transformer.fast import put_prompts_last
from mechicl.prompts import At, Prompts, Tables, TokenSequences
from mechicl.prompts.prompts import lies_prompts_last
from mechicl.tasks import AnyTask, LinearRegression
from mechicl.tasks.sampling import QuickGenerator
from mechicl.tasks.tables import RandomTables
from mechicl.training.config import TrainingConfig

Data = TypeVar("Data")  # a step's batch, or the random numbers that it is made of
TIMED_BATCHES = 12
NOTABLE = 0.2  # share of a step's time above which sampling may move to a thread
SMALL_PRODUCT = 400  # on a CPU, torch multiplies a row by a matrix of fewer numbers in plain loops, for many prompts


@dataclass(frozen=True, eq=False)
class Batch:
    """The data of one step; the axis `seed` counts the models: each seed of the first task, then of the others."""

    step: int  # number of the step, from 0
    tokens: Float[Tensor, "seed prompt pos d_token"] | Int[Tensor, "seed prompt pos"]
    targets: Float[Tensor, "seed prompt row y"] | Int[Tensor, "seed prompt row"]
    generator_states: Tensor  # state of each model's generator after sampling this batch, `[seed byte]`
    weights: Float[Tensor, "seed"] | None = None  # of each model's mean loss in that over processes; None for one


def make_generators(config: TrainingConfig, device: torch.device) -> list[QuickGenerator]:
    """One generator for each model's prompts; its weights came from another one."""
    if device.type != "cpu":
        return [QuickGenerator(device=device).manual_seed(2**40 + seed) for _, seed in config.members]
    # a model's prompts must not depend on the models that are trained together with it
    small = goes_across(config, device) and numbers_per_prompt(config) < SMALL_PRODUCT
    across = [small and is_plain(task) for task in config.tasks]
    return [QuickGenerator(prompts_last=across[task]).manual_seed(2**40 + seed) for task, seed in config.members]


def goes_across(config: TrainingConfig, device: torch.device) -> bool:
    """True if tokens should be stored with the prompts along the last axis in memory, which makes steps faster.

    For a single model it makes no difference once products of a prompt's rows are large enough for a fast kernel.
    """
    wanted = getattr(config.model, "prefers_prompts_last", False) and config.loss_at == "query"
    alone = len(config.members) == 1
    return wanted and device.type == "cpu" and not (alone and numbers_per_prompt(config) >= SMALL_PRODUCT)


def is_plain(task: AnyTask) -> bool:
    """True if inputs are drawn without matrix products, which need each prompt contiguous in memory."""
    shaping = ("covariance", "condition_number", "eigenvalues")
    return isinstance(task, LinearRegression) and not any(getattr(task, name) for name in shaping)


def numbers_per_prompt(config: TrainingConfig) -> int:
    """Number of values in the tokens of one whole prompt."""
    return config.model.format.n_tokens(config.task.n_context) * config.model.d_token


def sample_batch(
    config: TrainingConfig,
    model: PromptedModel,
    generators: Sequence[torch.Generator],
    step: int,
    shard: tuple[int, int] = (0, 1),
    prompts_last: bool | None = None,
) -> Batch:
    """Sample the batch of a step with the generators, and encode it with `model`.

    With several processes each samples the whole batch and keeps its share, so that any number of processes trains on
    the same prompts. `shard` is this process' number and the number of processes; shares differ by one prompt at most.
    `prompts_last` is the layout of the tokens in memory, by default that of `goes_across`.
    """
    rank, world = shard
    tasks = config.tasks_at(step)
    share = slice(rank * config.batch_size // world, (rank + 1) * config.batch_size // world)
    weights = []
    by_model: list[Any] = []  # each model's prompts, or sequences of tokens
    for (task, _), generator in zip(config.members, generators, strict=True):
        prompts = sample_examples(tasks[task], model, config.batch_size, generator=generator)
        if world > 1:
            weights.append(_share_weight(prompts, share, world))
            prompts = prompts[share]
        by_model.append(prompts)
    states = torch.stack([generator.get_state() for generator in generators])
    if len(by_model) > 1 and isinstance(by_model[0], Tables):  # each batch has another number of rows
        raise ValueError("models of tables train one seed at a time: give seeds=(0,), and join the runs (mechicl join)")
    joined = type(by_model[0]).concatenate(by_model) if len(by_model) > 1 else by_model[0]
    tokens, targets = examples(model, joined, config.loss_at)
    sizes = (len(by_model), len(by_model[0]))
    tokens, targets = tokens.unflatten(0, sizes), targets.unflatten(0, sizes)
    if goes_across(config, tokens.device) if prompts_last is None else prompts_last:
        tokens = tokens if lies_prompts_last(tokens[0]) else put_prompts_last(tokens)
    elif prompts_last is False:
        tokens = tokens.contiguous()
    loss_weights = torch.tensor(weights, dtype=config.model.torch_dtype, device=tokens.device) if weights else None
    return Batch(step, tokens, targets, states, loss_weights)


def batches(sample: Callable[[int], Data], first_step: int, steps: int) -> Generator[Data, None, None]:
    """The batches from `first_step` to the last.

    The first few are sampled in turn and timed. If that takes a notable part of a step and a core is free, a second
    thread samples the others ahead. The prompts are the same either way.
    """
    times: list[tuple[float, float]] = []  # of sampling, and of the whole step
    end_of_trial = min(first_step + TIMED_BATCHES, steps)
    for step in range(first_step, end_of_trial):
        started = time.perf_counter()
        batch = sample(step)
        sampled = time.perf_counter()
        yield batch  # returns when the step is done
        times.append((sampled - started, time.perf_counter() - started))
    sampling, whole = map(statistics.median, zip(*times, strict=True)) if times else (0.0, 0.0)
    if end_of_trial < steps and sampling > NOTABLE * whole and torch.get_num_threads() < n_cores():
        yield from batches_ahead(sample, end_of_trial, steps)
    else:
        yield from map(sample, range(end_of_trial, steps))


def batches_ahead(sample: Callable[[int], Data], first_step: int, end: int) -> Generator[Data, None, None]:
    """The batches from `first_step` to `end`, each sampled on a thread while the one before is used."""
    with ThreadPoolExecutor(1, "mechicl-batches") as thread:
        upcoming = thread.submit(copy_context().run, sample, first_step)
        for step in range(first_step, end):
            batch = upcoming.result()
            if step + 1 < end:
                upcoming = thread.submit(copy_context().run, sample, step + 1)
            yield batch


def sample_examples(task: AnyTask, model: PromptedModel, n: int, **source: Any) -> Any:
    """Sample what a model is trained on: prompts, token sequences, or tables with many rows to predict."""
    if isinstance(model, TableTransformer) and isinstance(task, RandomTables):
        return task.sample_tables(n, **source)
    return task.sample(n, **source)


def examples(model: PromptedModel, prompts: Prompts | Tables | TokenSequences, at: At) -> tuple[Tensor, Tensor]:
    """A model's inputs `[prompt pos ...]` and targets: `[prompt row y]`, or ids `[prompt row]`."""
    if isinstance(model, TableTransformer) and not isinstance(prompts, TokenSequences):
        targets = prompts.targets if isinstance(prompts, Tables) else prompts.ys[:, -1:]
        return model.encode(prompts), targets.argmax(-1) if model.cfg.predicts == "classes" else targets
    if isinstance(prompts, TokenSequences):
        return prompts.read, prompts.targets()
    assert isinstance(prompts, Prompts)  # only models of tables are trained on tables
    return model.encode(prompts), prompts.ys if at == "points" else prompts.ys[:, -1:]


def _share_weight(prompts: Prompts | TokenSequences, share: slice, world: int) -> float:
    """Weight with which the mean loss over a share enters the mean over `world` shares; 1 for equal shares."""
    if isinstance(prompts, TokenSequences):
        scored = prompts.predictable[:, 1:]
        return world * int(scored[share].sum()) / max(int(scored.sum()), 1)
    return world * len(prompts.xs[share]) / len(prompts)


def losses(
    outputs: Float[Tensor, "model prompt row d_out"],
    targets: Float[Tensor, "model prompt row d_out"] | Int[Tensor, "model prompt row"],
) -> Float[Tensor, "model"]:
    """Each model's mean squared error, or its cross entropy (nats) over the tokens that are scored."""
    outputs = at_least_float32(outputs)
    if targets.is_floating_point():
        return (outputs - targets).square().mean(dim=(1, 2, 3))
    scored = (targets >= 0).sum(dim=(1, 2))
    if not torch.compiler.is_compiling() and (scored == 0).any():
        raise ValueError(f"no token to predict for model {(scored == 0).nonzero().flatten().tolist()}")
    nats = F.cross_entropy(outputs.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    return torch.where(scored > 0, nats.sum(dim=(1, 2)) / scored.clamp(min=1), torch.nan)
