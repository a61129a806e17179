"""One layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Figs. 1, 2, 6, 9 and 10)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import descent_layers, in_float64, query_errors
from mechicl import constructions, viz
from mechicl.algorithms import tuned_step_size
from mechicl.analysis import align, fit_construction, interpolate, measure_shifted_losses
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.behaviour.losses import FOREIGN_INPUTS
from mechicl.analysis.weights import one_step_optimum
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.base.settings import settings
from mechicl.checkpoints import Checkpoint
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.rows import over_seeds_and_prompts, seeds_and_prompts
from mechicl.statistics import Interval, crossed_interval, interval, mean_of_intervals
from mechicl.tasks import LinearRegression

SEED = 1_000_003  # of the held-out prompts
N_TUNING = 100_000  # prompts that the step size is tuned on
N_ALIGNED = 4096  # prompts for derivatives
N_PER_SCALE = 1024  # prompts at each scale of inputs or weights
N_REPEATED = 256  # prompts for the repeated layer
N_SIZES = 4096  # prompts at each number of points
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
DAMPINGS, REPEATS = (0.5, 0.75, 1.0), 50


@script(
    checkpoint="lsa-1l",
    sizes=Option(("lsa-1l-d5", "lsa-1l", "lsa-1l-d20", "lsa-1l-d40"), "models of as many points as dimensions"),
    n_prompts=10_000,
    quiet=False,
)
def compare(args: Any) -> Comparison:
    """Losses, alignment, weights, paths, shifted prompts and roll-outs."""
    layers = Layers(*regression_checkpoint(args.checkpoint), args.n_prompts)
    task, model = layers.task, layers.checkpoint.models[0]
    if model.cfg.n_layers > 1 or task != LinearRegression():
        raise ValueError(f"{args.checkpoint} is not one layer on the task of the paper's figures")
    products = read_weight_products(model).gauge_fixed()
    names = [f"x{i + 1}" for i in range(task.x_dim)] + [f"y{i + 1}" for i in range(task.y_dim)]
    drawn = viz.weight_products_figure(products, read_weight_products(layers.construction), names)
    with settings(progress=not args.quiet):
        rows = [*layers.losses(), *layers.alignment(), *layers.weights(), *layers.paths(), *layers.shifts()]
        rows += [*layers.roll_outs(), *(row for name in args.sizes for row in _size_rows(name))]
    lead = f"{len(layers.models)} seeds of {args.checkpoint}, measured on {args.n_prompts:,} held-out prompts."
    sections = [Section("Weights", "Products of the first seed's weights, and those of Proposition 1.", drawn)]
    data = {"step_size": layers.step_size}
    return Comparison("One layer and one step (section 3, Fig. 2)", lead, rows, sections, data)


@dataclass(frozen=True)
class Layers:
    """Every seed's layer, as its weight products in float64, and gradient descent with a tuned step size as a layer."""

    checkpoint: Checkpoint
    task: LinearRegression
    n_prompts: int

    @cached_property
    def held_out(self) -> Prompts:
        return self.task.sample(self.n_prompts, seed=SEED, dtype=torch.float64)

    @cached_property
    def models(self) -> list[HookedTransformer]:
        return [replace_products(model, read_weight_products(model)) for model in self.checkpoint.models]

    @cached_property
    def step_size(self) -> float:
        return tuned_step_size(self.task.sample(N_TUNING, seed=SEED + 1))

    @cached_property
    def construction(self) -> HookedTransformer:
        sizes = {name: getattr(self.task, name) for name in ("x_dim", "y_dim", "n_context")}
        return constructions.gradient_descent(**sizes, step_size=self.step_size)

    def losses(self) -> list[Row]:
        errors, descent = query_errors(self.models, self.held_out), squared_errors(self.construction, self.held_out)
        ratio, over = crossed_interval(errors, descent.T), seeds_and_prompts(*errors.shape)
        exact = one_step_optimum(self.task).mse  # the sampling error of the prompts cancels in the ratio
        scaled = Interval(ratio.mean * exact, ratio.low * exact, ratio.high * exact, ratio.n)
        note = f"loss ratio times the exact MSE of the best single step, {exact:.5f}"
        return [
            Row("half-MSE, tuned gradient descent", 0.2, interval(descent[:, 0] / 2), "prompts"),
            Row("half-MSE, trained, mean of the seeds", 0.2, interval(errors.mean(0) / 2), "prompts"),
            Row("loss, trained over tuned gradient descent", "1 (Fig. 2)", ratio, over, "on the same prompts"),
            Row("MSE, trained, freed of the prompts' sampling error", None, scaled, over, note),
        ]

    def alignment(self) -> list[Row]:
        alignments = [align(model, self.construction, self.held_out[:N_ALIGNED]) for model in self.models]
        rows = []
        for name, printed in {
            "sensitivity_cosine": "near 1 (Fig. 2)", "prediction_distance": None, "sensitivity_distance": None
        }.items():  # fmt: skip
            values = torch.stack([getattr(each, name) for each in alignments])
            quantity = f"{name.replace('_', ' ')}, trained against gradient descent"
            rows.append(Row(quantity, printed, crossed_interval(values), seeds_and_prompts(*values.shape)))
        return rows

    def weights(self) -> list[Row]:
        fit, n = fit_construction(self.models, "gd", self.task, refine=False), self.task.n_context
        sizes = fit.projected.parameters["step_size"][:, 0]
        note = f"{n} times the step size; tuned: {self.step_size * n:.4f}"
        return [
            Row("η read from the weights", None, interval(sizes * n), "seeds", note),
            Row("η read from the weights over tuned η", None, interval(sizes / self.step_size), "seeds"),
        ]

    def paths(self) -> list[Row]:
        over = seeds_and_prompts(len(self.models), self.n_prompts)

        def excess(kind: Any) -> Interval:
            paths = [interpolate(model, self.construction, self.held_out, kind=kind) for model in self.models]
            return mean_of_intervals([path.midpoint_excess() for path in paths])

        return [
            Row("excess loss at the middle of the rescaled path", "none (Fig. 2)", excess("rescaled"), over,
                "relative to the ends"),
            Row("excess loss at the middle of the path without rescaling", None, excess("raw"), over),
        ]  # fmt: skip

    def shifts(self) -> list[Row]:
        """Losses where inputs or weights are scaled, on the task's inputs and on those that training never showed."""
        foreign = self.task.replace(inputs=FOREIGN_INPUTS, input_scale=1.0)
        learners = {"descent": self.construction, **{f"trained {i}": model for i, model in enumerate(self.models)}}
        rows, n = [], min(self.n_prompts, N_PER_SCALE)
        for inputs, task in (("", self.task), ("foreign inputs, ", foreign)):
            for scaled in ("input_scale", "weight_scale"):
                losses = measure_shifted_losses(learners, task, SCALES, scaled=scaled, n_prompts=n, seed=SEED).mean()
                largest = (losses[1:] / losses[0] - 1).abs().amax(1)
                name = f"{inputs}{scaled.replace('_', ' ')}"
                printed = "equal (Fig. 6)" if name == "input scale" else None
                quantity = f"largest |trained / gradient descent - 1|, {name} 0.5 to 2"
                rows.append(Row(quantity, printed, interval(largest), "seeds"))
        return rows

    def roll_outs(self) -> list[Row]:
        """Losses of the part of the layer that training reaches, and of gradient descent, applied repeatedly."""
        reached = [replace_products(m, read_weight_products(m).without_unread_parts()) for m in self.models]
        rows = []
        for damping in DAMPINGS:
            known = "falls for 50 steps (Fig. 1)" if damping == 0.75 else None
            words = f"loss after 50 repeats over after one, damping {damping:g}"
            trained = torch.stack([self.repeated(model, damping) for model in reached], -1)
            ratios, descent = trained[50] / trained[1], self.repeated(self.construction, damping)
            ratio = (descent[50] / descent[1]).item()
            rows += [
                Row(f"{words}, trained", known, interval(ratios) if ratios.max() < 1 else "diverges", "seeds"),
                Row(f"{words}, gradient descent", known, ratio if ratio < 1 else "diverges", f"{N_REPEATED} prompts"),
            ]
        return rows

    @torch.no_grad()
    def repeated(self, model: HookedTransformer, damping: float) -> Float[Tensor, "step"]:
        """Return the loss after 0, 1, 2, ... repeats of a layer whose updates are scaled."""
        prompts = self.held_out[:N_REPEATED]
        stream, losses = model.embed_tokens(model.encode(prompts)), []
        for step in range(REPEATS + 1):
            if step:
                stream = stream + damping * (model(stream, start_at_layer=0, stop_at_layer=1) - stream)
            predicted = model(stream, start_at_layer=1, at="query")[:, -1]
            losses.append((predicted - prompts.query.ys).square().mean())
        return torch.stack(losses)


def _size_rows(name: str) -> list[Row]:
    """Losses of the trained layer and of what is half-way to gradient descent, over gradient descent's."""
    checkpoint, task = regression_checkpoint(name)
    prompts = task.sample(N_SIZES, seed=1_000_003, dtype=torch.float64)
    tuned = tuned_descent(task.sample(20_000, seed=2**31 + 1, dtype=torch.float64), 1)
    construction = descent_layers(tuned, 1, x_dim=task.x_dim, n_context=task.n_context)
    models = in_float64(checkpoint.models)
    halves = [interpolate(model, construction, prompts[:2]).model(0.5) for model in models]
    descent = squared_errors(construction, prompts)[:, 0]
    rows = [Row(f"{task.x_dim} points in as many dimensions: half-MSE of gradient descent", None, interval(descent / 2),
                "prompts")]  # fmt: skip
    for kind, learners in (("trained", models), ("half-way", halves)):
        rows.append(Row(f"{task.x_dim} points in as many dimensions: loss over gradient descent's, {kind}", "1",
                        *over_seeds_and_prompts(query_errors(learners, prompts), checkpoint, descent)))  # fmt: skip
    return rows


if __name__ == "__main__":
    compare.run()
