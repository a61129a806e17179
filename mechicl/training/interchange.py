"""Interchange training: a network is trained to do what an algorithm would, also where its state is changed half-way.

So that it contains the algorithm, in layers and subspaces that are known, with weights that nobody wrote.
"""

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.algorithms.stepwise import Hypothesis, Runs
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.algorithms.stepwise.plans import Cell, plan_interventions
from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.base.progress import progress_bar
from mechicl.models import HookedTransformer, build
from mechicl.prompts import Prompts
from mechicl.training.config import TrainingConfig
from mechicl.training.loop import TrainingDivergedError
from mechicl.training.optimizers import make_optimizer
from mechicl.training.results import TrainingResult, hardware_name


@checked
def train_interchange(
    config: TrainingConfig, hypothesis: Hypothesis, *, n_interventions: int = 4, progress: bool = True
) -> TrainingResult:
    """Train a transformer until a hypothesis holds of it: that it runs an algorithm, in these layers and subspaces.

    Each step draws prompts, sources with the same queries (contexts of other tasks) and some of the interventions that
    `analysis.interchange` makes. The loss is the sum over them, and over the prediction without intervention, of the
    squared distance between the model's counterfactual prediction and the algorithm's, as a part of that between both
    ends: an interchange R² of 1 is a loss of 0. The targets of the queries are not used.

    Args:
        config: task, model and training; of its fields for speed, saves and snapshots nothing is read. `loss` and
            `curriculum` must be left out. `eval_prompts` prompts and as many sources are held out.
        hypothesis: algorithm, schedule and subspaces; without subspaces the model may place variables as it likes.
        n_interventions: how many of them a step.
        progress: show a progress bar.

    Returns:
        A model for each seed, and a record as `train` gives it: "loss" is the mean of 1 - R² over all interventions,
        held out, and "eval_loss" the mean squared error of the queries' targets; "interchange" has the hypothesis's
        name, and for each seed the held-out R² of every intervention (`interchange_r2`).

    Raises:
        TrainingDivergedError: a loss is not finite.
        ValueError: a model that is not a transformer on prompts, or whose layers are not those of the schedule; a
            curriculum, more tasks, or n_interventions < 1.

    Source: Geiger et al. 2022, with regression targets.

    Example:
        >>> hypothesis = Hypothesis(ResidualDescent(2, step_size=0.6))
        >>> model = TransformerConfig(x_dim=3, n_context=10, n_layers=2, n_heads=2, d_model=16, read_in="linear")
        >>> config = TrainingConfig(LinearRegression(x_dim=3, n_context=10), model, steps=2000, batch_size=128)
        >>> result = train_interchange(config, hypothesis)
    """
    check_whole(1, n_interventions=n_interventions)
    _check(config, hypothesis)
    models, curves, measured, started = [], [], [], time.perf_counter()
    with progress_bar(total=config.steps * len(config.seeds), progress=progress, unit="step") as bar:
        for seed in config.seeds:
            model = cast(HookedTransformer, build(config.model, seed))
            curves.append(_train(model, config, hypothesis, seed, n_interventions, lambda: bar.update(1)))
            models.append(model.eval())
            measured.append(interchange_r2(model, hypothesis, *_ends(config, config.eval_prompts, config.eval_seed)))
    columns = [[curve[i] for curve in curves] for i in range(len(curves[0]))]  # [log seed]
    record = {
        "seeds": list(config.seeds),
        "training": config.to_dict(),
        "steps_done": config.steps,
        "curve": {
            "eval_step": [step for (step, _, _), *_ in columns],
            "eval_loss": [[error for _, _, error in column] for column in columns],
            "step": [step for (step, _, _), *_ in columns],
            "loss": [[loss for _, loss, _ in column] for column in columns],
        },
        "interchange": {"hypothesis": hypothesis.name, "r2": measured},
        "wall_time_s": round(time.perf_counter() - started, 1),
        "hardware": hardware_name(torch.device("cpu")),
        "processes": 1,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    return TrainingResult(list(models), record, (), {})


@checked
@torch.no_grad()
def interchange_r2(
    model: HookedTransformer, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts
) -> dict[str, float]:
    """The interchange R² of each intervention, by its name, with both ends those of the algorithm.

    It is what training looks at; `analysis.interchange` has intervals, reads other models too, and measures the ends of
    the model.

    Args:
        model: a transformer on prompts of points.
        hypothesis: with as many layers.
        prompts: that are intervened in.
        sources: as many, with the same queries.

    Raises:
        ValueError: sources of other sizes than the prompts, or a hypothesis about another number of layers.
    """
    if sources.xs.shape != prompts.xs.shape or sources.ys.shape != prompts.ys.shape:
        raise ValueError(f"sources must be as many and as long as the prompts, {prompts}, got {sources}")
    if hypothesis.n_layers != model.cfg.n_layers:
        raise ValueError(
            f"{hypothesis.name!r} is about {hypothesis.n_layers} layers, the model has {model.cfg.n_layers}"
        )
    ends = _Ends(model, hypothesis, prompts, sources, point=prompts.n_context // 2)
    return {_title(cell): 1 - ends.loss(i).item() for i, (cell, _, _) in enumerate(ends.plan)}


def _check(config: TrainingConfig, hypothesis: Hypothesis) -> None:
    model = config.model
    if getattr(model, "prompt_format", None) not in ("paired", "interleaved") or not hasattr(model, "n_heads"):
        raise ValueError(f"interchange training needs a transformer on prompts of points, got {type(model).__name__}")
    if hypothesis.n_layers != model.n_layers:
        raise ValueError(f"{hypothesis.name!r} is about {hypothesis.n_layers} layers, the model has {model.n_layers}")
    if config.curriculum is not None or config.more_tasks:
        raise ValueError("interchange training has one task and no curriculum")


def _ends(config: TrainingConfig, n: int, seed: int | torch.Generator) -> tuple[Prompts, Prompts]:
    """Prompts, and sources with their queries."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    prompts, others = (config.task.sample(n, generator=generator, dtype=config.model.torch_dtype) for _ in range(2))
    return prompts, others.with_query(prompts.query.xs)


def _train(
    model: HookedTransformer,
    config: TrainingConfig,
    hypothesis: Hypothesis,
    seed: int,
    n_interventions: int,
    on_step: Callable[[], object],
) -> list[tuple[int, float, float]]:
    """Step, interchange loss and squared error, at every evaluation."""
    generator = torch.Generator().manual_seed(seed)
    weights = list(model.parameters())
    row = torch.nn.utils.parameters_to_vector(weights).detach()[None]  # as optimisers of ensembles take them
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
        optimizer.step()
        torch.nn.utils.vector_to_parameters(row[0], weights)
        on_step()
    return curve


# ---- interventions, twice ----


def _title(cell: Cell) -> str:
    """An intervention, and after, in or from how many layers on."""
    if cell.kind == "prediction":
        return cell.intervention
    word = "after" if cell.kind == "exchange" else "in" if cell.intervention == "query does not read" else "from"
    return f"{cell.intervention} {word} {cell.layer}"


class _Ends:
    """The runs of both on prompts, on sources, and on the prompts with one of the sources' points."""

    def __init__(
        self, model: HookedTransformer, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts, point: int
    ):
        xs, ys = prompts.xs.clone(), prompts.ys.clone()
        xs[:, point], ys[:, point] = sources.xs[:, point], sources.ys[:, point]
        three = [prompts, sources, Prompts(xs, ys)]
        self.plan = list(plan_interventions(hypothesis, point, hears=True, isolates=True))
        states = [hypothesis.algorithm.states(each) for each in three]
        self.algorithms = [Runs(hypothesis.algorithm, states[0], source) for source in states[1:]]
        streams = [_streams(model, model.encode(each)) for each in three]
        self.models = [_Streams(model, streams[0], source) for source in streams[1:]]
        predicted = [hypothesis.algorithm.read({name: v[:, -1:] for name, v in each[-1].items()}) for each in states]
        self.apart = [(end - predicted[0]).square().mean().clamp(min=1e-12) for end in predicted[1:]]

    def loss(self, i: int) -> Tensor:
        """The squared distance of both predictions after intervention i, as a part of that of both ends: 1 - R²."""
        _, told, asked = self.plan[i]
        predicted = asked.answer(self.models)
        expected = told.answer(self.algorithms).to(predicted)
        return (predicted - expected).square().mean() / self.apart[told.on_point].to(predicted)


def _streams(model: HookedTransformer, tokens: Tensor) -> list[Tensor]:
    """The streams before each layer and after the last."""
    streams = [model(tokens, stop_at_layer=0)]
    for layer in range(model.cfg.n_layers):
        streams.append(model(streams[-1], start_at_layer=layer, stop_at_layer=layer + 1))
    return streams


class _Streams:
    """A model's runs on changed streams, through which gradients flow; methods and arguments as those of `Runs`."""

    def __init__(self, model: HookedTransformer, base: Sequence[Tensor], source: Sequence[Tensor]):
        self.model, self.base, self.source = model, base, source
        self.n_layers, self.per_point = model.cfg.n_layers, 1 if model.cfg.prompt_format == "paired" else 2

    def exchange(
        self, after: int, place: Place, basis: Float[Tensor, "d_model dim"] | None = None, point: int | None = None
    ) -> Float[Tensor, "prompt y"]:
        """The streams of a place come from the source."""
        moved = (self.source[after] - self.base[after]) * self._at(place, point)
        if basis is not None:
            moved = moved @ basis.to(moved) @ basis.to(moved).T
        return self._finish(self.base[after] + moved, after)

    def skip(self, layers: range, place: Place) -> Float[Tensor, "prompt y"]:
        """What layers do at a place is taken back."""
        return self.freeze((layers.start, layers.stop), place)

    def repeat(self, layers: range, place: Place) -> Float[Tensor, "prompt y"]:
        """A place goes through layers twice, the second time beside the other's start."""
        before, after, here = self.base[layers.start], self.base[layers.stop], self._at(place)
        again = self._advance(torch.where(here, after, before), layers)
        return self._finish(torch.where(here, again, after), layers.stop)

    def freeze(self, stops: Sequence[int], place: Place) -> Float[Tensor, "prompt y"]:
        """From so many layers on, a place stays as it is."""
        stream = held = self.base[stops[0]]
        for start, stop in itertools.pairwise(stops):
            stream = torch.where(self._at(place), held, self._advance(stream, range(start, stop)))
        return self._finish(stream, stops[-1])

    def stop_reading(self, layers: range) -> Float[Tensor, "prompt y"]:
        """In these layers attention writes nothing at the query."""
        deaf = partial(_without, here=self._at("query"))
        with self.model.hooks([(f"blocks.{layer}.hook_attn_out", deaf) for layer in layers]):
            return self._finish(self.base[layers.start], layers.start)

    def isolate(self, layers: range) -> Float[Tensor, "prompt y"]:
        """In these layers each point of the context attends only to its own tokens."""
        points = torch.arange(self.base[0].shape[1]) // self.per_point
        others = points[:, None] != points
        others[-1] = False
        hooks = []
        for layer in layers:
            masked = -torch.inf if self.model.cfg.for_layer(layer).attention == "softmax" else 0.0
            hooks.append((f"blocks.{layer}.attn.hook_attn_scores", partial(_without, here=others, left=masked)))
        with self.model.hooks(hooks):
            return self._finish(self.base[layers.start], layers.start)

    def _at(self, place: Place, point: int | None = None) -> Tensor:
        """Which positions are meant, `[pos 1]`."""
        positions = torch.arange(self.base[0].shape[1])[:, None]
        if point is not None:
            return positions // self.per_point == point
        return (positions == len(positions) - 1) == (place == "query")

    def _advance(self, stream: Tensor, layers: range) -> Tensor:
        return self.model(stream, start_at_layer=layers.start, stop_at_layer=layers.stop)

    def _finish(self, stream: Tensor, after: int) -> Tensor:
        outputs = self.model(stream, start_at_layer=after)
        return self.model.decode(outputs)[:, -1]


def _without(activation: Tensor, hook: HookPoint, here: Tensor, left: float = 0.0) -> Tensor:
    return activation.masked_fill(here, left)
