"""Interchange training: train a network to predict like an algorithm, also after interventions on both their states."""

import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Runs, query_of
from mechicl.algorithms.stepwise.hypothesis import Cell, plan_interventions
from mechicl.base.arguments import Count, checked
from mechicl.base.progress import progress_bar
from mechicl.base.threads import using_threads
from mechicl.models import HookedTransformer, build
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, compute_streams
from mechicl.prompts import Prompts
from mechicl.training.config import TrainingConfig
from mechicl.training.loop import TrainingDivergedError
from mechicl.training.optimizers import make_optimizer
from mechicl.training.results import TrainingResult, make_record
from mechicl.training.speed import threads_for


@checked
def train_interchange(
    config: TrainingConfig, hypothesis: Hypothesis, *, n_interventions: Count = 4, progress: bool | None = None
) -> TrainingResult:
    """Train a transformer to run an algorithm in given layers and subspaces (a hypothesis).

    The trained model is ground truth for analyses, without hand-written weights. Each step draws prompts, source
    prompts with the same queries and other contexts, and some of the interventions of `analysis.interchange`, which put
    states of the source run into the run on the prompts. For each of them, and for the prediction without intervention,
    the loss has the squared distance between the model's prediction and the algorithm's, divided by that between the
    algorithm's predictions for prompts and sources: 1 - R². The targets of the queries are not used. Source: Geiger et
    al. 2022, with regression targets.

    Args:
        config: task, model and training, without `curriculum`, `more_tasks` and `interventions`; `loss`, `target_loss`
            and fields about speed and saves are ignored. Held out are `eval_prompts` prompts and as many sources.
        hypothesis: `Hypothesis(algorithm, schedule, subspaces)`: which algorithm, which of its steps after each layer,
            and where its variables are in the residual stream; without subspaces the model may place them anywhere.
        n_interventions: number of interventions, drawn at random, in each training step.

    Returns:
        A `TrainingResult` with a model for each seed and a `record` like that of `train`. In its "curve", "loss" is the
        mean of 1 - R² over all interventions on held-out prompts and "eval_loss" the mean squared error on the queries'
        targets. Its "interchange" has "hypothesis" (the name) and "r2": for each seed, R² by intervention.

    Raises:
        TrainingDivergedError: a loss is not finite.
        ValueError: a model that is not a transformer on prompts, or whose number of layers is not that of the
            schedule; a curriculum, more tasks, or interventions (`Clamp`).

    Example:
        >>> hypothesis = Hypothesis(ResidualDescent(2, step_size=0.6))
        >>> model = TransformerConfig(x_dim=3, n_context=10, n_layers=2, n_heads=2, d_model=16, read_in="linear")
        >>> config = TrainingConfig(LinearRegression(x_dim=3, n_context=10), model, steps=2000, batch_size=128)
        >>> result = train_interchange(config, hypothesis)
    """
    shape = config.model
    if getattr(shape, "prompt_format", None) not in ("paired", "interleaved") or not hasattr(shape, "n_heads"):
        raise ValueError(f"interchange training needs a transformer on prompts of points, got {type(shape).__name__}")
    if config.curriculum is not None or config.more_tasks or config.interventions:
        raise ValueError("interchange training has one task, no curriculum and no interventions")
    models, curves, measured, started = [], [], [], time.perf_counter()
    n_steps, threads = config.steps * len(config.seeds), threads_for(config, torch.device("cpu"))
    with using_threads(threads), progress_bar(total=n_steps, progress=progress, unit="step") as bar:
        for seed in config.seeds:
            model = cast(HookedTransformer, build(config.model, seed)).eval()
            curves.append(_train(model, config, hypothesis, seed, n_interventions, lambda: bar.update(1)))
            models.append(model)
            measured.append(interchange_r2(model, hypothesis, *_ends(config, config.eval_prompts, config.eval_seed)))
    by_step = list(zip(*curves, strict=True))
    steps = [each[0][0] for each in by_step]
    losses, errors = ([[entry[i] for entry in each] for each in by_step] for i in (1, 2))  # [log seed]
    curve = {"eval_step": steps, "eval_loss": errors, "step": steps, "loss": losses}
    found = {"hypothesis": hypothesis.name, "r2": measured}
    seconds = time.perf_counter() - started
    record = make_record(config, config.steps, curve, seconds, torch.device("cpu"), interchange=found)
    return TrainingResult(list(models), record, (), {})


@torch.no_grad()
def interchange_r2(
    model: HookedTransformer, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts
) -> dict[str, float]:
    """The interchange R² of each intervention by name, relative to the algorithm's predictions on prompts and sources.

    `analysis.interchange` measures the same with intervals, relative to the model's own predictions.
    """
    if sources.xs.shape != prompts.xs.shape or sources.ys.shape != prompts.ys.shape:
        raise ValueError(f"sources must have the shape of the prompts, {prompts}, got {sources}")
    ends = _Ends(model, hypothesis, prompts, sources, point=prompts.n_context // 2)
    return {_title(cell): 1 - ends.loss(i).item() for i, (cell, _, _) in enumerate(ends.plan)}


def _ends(config: TrainingConfig, n: int, seed: int | torch.Generator) -> tuple[Prompts, Prompts]:
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    prompts, others = (config.task.sample(n, generator=generator, dtype=config.model.torch_dtype) for _ in range(2))
    return prompts, others.with_query(prompts.query.xs)


@torch.enable_grad()
def _train(
    model: HookedTransformer,
    config: TrainingConfig,
    hypothesis: Hypothesis,
    seed: int,
    n_interventions: int,
    on_step: Callable[[], object],
) -> list[tuple[int, float, float]]:
    generator = torch.Generator().manual_seed(seed)
    weights = list(model.parameters())
    row = torch.nn.utils.parameters_to_vector(weights).detach()[None]  # the layout that `make_optimizer` expects
    optimizer = make_optimizer(config.optimizer, row, [weight.shape for weight in weights], config.learning_rate)
    held_out = _ends(config, config.eval_prompts, config.eval_seed)
    curve = []
    for step in range(config.steps + 1):
        if step % config.eval_every == 0 or step == config.steps:
            r2 = interchange_r2(model, hypothesis, *held_out)
            with torch.no_grad():
                error = (model.predict(held_out[0]) - held_out[0].query.ys).square().mean().item()
            curve.append((step, sum(1 - value for value in r2.values()) / len(r2), error))
        if step == config.steps:
            break
        point = int(torch.randint(config.task.n_context, (1,), generator=generator))
        ends = _Ends(model, hypothesis, *_ends(config, config.batch_size, generator), point)
        chosen = torch.randperm(len(ends.plan) - 1, generator=generator)[:n_interventions] + 1
        loss = torch.stack([ends.loss(i) for i in (0, *chosen.tolist())]).sum()
        if not loss.isfinite():
            raise TrainingDivergedError(f"the loss of seed {seed} is not finite at step {step}: try a smaller "
                                        f"learning_rate (now {config.learning_rate:g})")  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        model.zero_grad(set_to_none=True)
        loss.backward()
        if config.gradient_clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, config.gradient_clip)
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]
        row.grad = torch.nn.utils.parameters_to_vector(gradients)[None]
        row.mul_(1 - config.learning_rate_at(step) * config.weight_decay)
        optimizer.step()
        torch.nn.utils.vector_to_parameters(row[0], weights)
        on_step()
    return curve


def _title(cell: Cell) -> str:
    if cell.kind == "prediction":
        return cell.intervention
    word = "after" if cell.kind == "exchange" else "in" if cell.intervention == "query does not read" else "from"
    return f"{cell.intervention} {word} {cell.layer}"


class _Ends:
    """Runs of model and algorithm on prompts, on sources, and on the prompts with one point of the sources."""

    def __init__(
        self, model: HookedTransformer, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts, point: int
    ):
        if (n := model.cfg.n_layers) != hypothesis.n_layers:
            raise ValueError(f"{hypothesis.name!r} is about {hypothesis.n_layers} layers, the model has {n}")
        xs, ys = prompts.xs.clone(), prompts.ys.clone()
        xs[:, point], ys[:, point] = sources.xs[:, point], sources.ys[:, point]
        three = [prompts, sources, Prompts(xs, ys)]
        plan = plan_interventions(hypothesis, point, prompts.n_context, stop_reading=True, isolate=True)
        self.plan = [each for each in plan if each[0].kind != "mixture"]
        states = [hypothesis.algorithm.states(each) for each in three]
        self.algorithms = [Runs(hypothesis.algorithm, states[0], source) for source in states[1:]]
        adapter = ModelAdapter(model)
        tokens = [model.encode(each) for each in three]
        streams = [compute_streams(adapter, each) for each in tokens]
        self.models = [StreamRuns(adapter, tokens[0], streams[0], source) for source in streams[1:]]
        predicted = [hypothesis.algorithm.read(query_of(each[-1])) for each in states]
        self.distances = [(end - predicted[0]).square().mean().clamp(min=1e-12) for end in predicted[1:]]

    def loss(self, i: int) -> Tensor:
        _, on_algorithm, on_model = self.plan[i]
        predicted = on_model.run(self.models)
        expected = on_algorithm.run(self.algorithms).to(predicted)
        return (predicted - expected).square().mean() / self.distances[on_model.on_point].to(predicted)
