"""Trained further: a softmax layer with a sink, five separate layers, and twelve layers with MLPs.

python analyses/loose_ends.py --checkpoint softmax-2h-sink
python analyses/loose_ends.py --checkpoint lsa-5l
python analyses/loose_ends.py --checkpoint lsa-12l-mlp
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, vmap

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import by_seed, in_float64, kept_seeds, query_errors
from mechicl.analysis import read_weight_products
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights.construction_families import ConstructionFamily, family_for, project_weights
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer, TransformerConfig, build
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.descent import TRIM, TRIMMED, TUNING_SEED, tuned_references
from mechicl.reports.rows import seeds_and_prompts
from mechicl.statistics import crossed_interval, median_interval, ratio_interval
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS, train
from mechicl.training.optimizers import OptimizerName, clip_each_seed, make_optimizer

Weights = dict[str, Float[Tensor, "seed ..."]]
SCALES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
SINK_SCORES = (0.0, 2.0, 4.0, 6.0)


@script(
    checkpoint=Option("softmax-2h-sink", "the model", kind=Literal["softmax-2h-sink", "lsa-5l", "lsa-12l-mlp"]),
    n_prompts=20_000,
    seed=1_000_003,
    runs=Option(Path("runs/loose_ends"), "folder of the trainings: those that are finished are read from it"),
    share_mlp=Option(False, "train lsa-12l-mlp with one MLP for all layers too, as in the authors' code"),
)
def compare(args: Any) -> Comparison:
    """Train what is missing, and measure on held-out prompts."""
    torch.set_num_threads(1)
    title, lead, measure = {
        "softmax-2h-sink": ("A softmax layer with a sink, scales tied", SOFTMAX, _softmax),
        "lsa-5l": ("Five separate layers, trained further", FIVE, _five),
        "lsa-12l-mlp": ("Twelve layers with MLPs, restarted and more seeds", TWELVE, _twelve),
    }[args.checkpoint]
    _, task = regression_checkpoint(args.checkpoint)
    held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    return Comparison(title, f"{lead} On {args.n_prompts:,} held-out prompts (seed {args.seed}).",
                      measure(args, task, held_out), [], {})  # fmt: skip


# ---- training ----

# `mechicl.training.train` starts from initial weights, trains all of them, and averages all errors of a batch. Here
# trainings start from trained or projected weights, train numbers that several weights share, or leave errors out.


def stacked(models: Sequence[HookedTransformer]) -> Weights:
    by_model = [dict(model.named_parameters()) for model in models]
    return {name: torch.stack([each[name].detach() for each in by_model]) for name in by_model[0]}


def unstacked(template: HookedTransformer, weights: Weights) -> list[HookedTransformer]:
    """The models with these weights, in float64."""
    models = in_float64(template for _ in next(iter(weights.values())))
    for seed, model in enumerate(models):
        model.load_state_dict({name: weight[seed] for name, weight in weights.items()}, strict=False)
    return models


def train_weights(
    template: HookedTransformer, raw: Weights, task: LinearRegression, *, steps: int, rate: float,
    batch_size: int = 512, clip: float | None = None, kept: tuple[float, float] = (0.0, 1.0), absolute: bool = False,
    optimizer: OptimizerName = "soap", as_weights: Callable[[Weights], Weights] = lambda raw: raw,
) -> Weights:  # fmt: skip
    """Train numbers from which a model's weights are computed, all seeds at once, on the query's error.

    Args:
        template: a model of the config.
        raw: where the training starts.
        rate: learning rate after 50 steps of warm-up; it falls to 0 along half a cosine.
        batch_size: new prompts per step and seed.
        clip: largest norm of a seed's gradient.
        kept: quantiles of a batch's squared errors between which errors are in the loss.
        absolute: train on absolute instead of squared errors.
        as_weights: computes the model's weights.
    """
    shapes = [value.shape[1:] for value in raw.values()]
    n_seeds, sizes = len(next(iter(raw.values()))), [shape.numel() for shape in shapes]
    flat = torch.cat([value.flatten(1) for value in raw.values()], 1).requires_grad_()
    descent = make_optimizer(optimizer, flat, shapes, rate)

    def named(flat: Tensor) -> Weights:
        parts = zip(raw, flat.split(sizes, 1), shapes, strict=True)
        return as_weights({name: part.unflatten(1, shape) for name, part, shape in parts})

    def run(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return functional_call(template, weights, (tokens,), {"at": "query"})[..., 0, 0]

    for step in range(steps):
        for group in descent.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        prompts = task.sample(batch_size * n_seeds, seed=2**33 + step)
        tokens = template.encode(prompts).unflatten(0, (n_seeds, batch_size))
        errors = (vmap(run)(named(flat), tokens) - prompts.query.ys.view(n_seeds, batch_size)).square()
        if kept != (0.0, 1.0):
            first, last = (int(share * batch_size) for share in kept)
            errors = errors.sort(1).values[:, first:last]
        if absolute:
            errors = (errors + 1e-12).sqrt()  # with a slope at 0
        flat.grad = None
        errors.mean(1).sum().backward()
        assert flat.grad is not None
        if clip is not None:
            clip_each_seed(flat.grad, clip)
        descent.step()
    return {name: weight.detach().contiguous() for name, weight in named(flat.detach()).items()}


def saved(path: Path, make: Callable[[], Weights]) -> Weights:
    """Weights from a file, or made and saved there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = make()
        torch.save(weights, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        print(f"trained {path.stem}", flush=True)
    return torch.load(path, weights_only=True)


# ---- a softmax layer ----

SOFTMAX = (
    "The gap is the loss over that of one tuned step of gradient descent, minus 1. The scale of a head is the norm of "
    "W_Q W_K' over the square root of d. Tied: both heads have one scale s, and their values are multiplied by (n + "
    "exp(b)) / s, with the sink's score b; the logarithm of s is trained. Five seeds, 1,500 steps of 512 prompts."
)


def softmax_sum(prompts: Prompts, scale: float, sink_score: float | None, *, heads: int = 2) -> Float[Tensor, "prompt"]:
    """The sum of targets that one softmax head makes with W_Q W_K' = scale times 1, or it minus one with -scale.

    Args:
        sink_score: score of the sink; infinity has the limit, in which the sink alone normalises; None for no sink.
    """
    scores = scale * (prompts.context.xs @ prompts.query.xs[..., None])[..., 0]
    total = torch.zeros(len(prompts), dtype=scores.dtype)
    for sign in (1, -1)[:heads]:
        weights = (sign * scores).exp()
        if sink_score != math.inf:
            weights = weights / (weights.sum(1, keepdim=True) + (0 if sink_score is None else math.exp(sink_score)))
        total += sign * (weights * prompts.context.ys[..., 0]).sum(1)
    return total


def best_multiple(outputs: Float[Tensor, "prompt"], targets: Float[Tensor, "prompt"]) -> Float[Tensor, "prompt"]:
    """Squared errors of the multiple of some outputs with the smallest mean."""
    return (outputs * (outputs @ targets / (outputs @ outputs)) - targets).square()


def tied(raw: Weights, cfg: TransformerConfig) -> Weights:
    """The weights of a softmax layer, from matrices up to their size, the logarithm of the scale, and the sink's score.

    Rescaling a head's query and key matrices by `f` and its values by `1 / f²` keeps its effect of first order in the
    scores, and the step size that the layer takes depends on neither the scale nor the sink.
    """
    name, total = "blocks.0.attn.{}".format, torch.tensor(float(cfg.n_context or 0))
    scale = raw["log_scale"].exp()
    size = (raw["W_Q"] @ raw["W_K"].mT).norm(dim=(-2, -1)) / math.sqrt(cfg.x_dim or 0)
    factor = (scale / (size * cfg.score_scale)).sqrt()[..., None, None]
    weights = {name("W_Q"): raw["W_Q"] * factor, name("W_K"): raw["W_K"] * factor, name("W_O"): raw["W_O"]}
    if "sink" in raw:
        total = total + raw["sink"].exp()
        weights[name("sink")] = raw["sink"].expand(-1, cfg.n_heads)
    return weights | {name("W_V"): raw["W_V"] * (total / scale)[..., None, None]}


@torch.no_grad()
def with_sink(model: HookedTransformer, sink_score: float | None, factor: float) -> HookedTransformer:
    """A softmax layer in float64 with another sink score, its values made up for it, and its scores times a factor."""
    model = copy.deepcopy(model).double()
    attention, n = model.blocks[0].attn, float(model.cfg.n_context or 0)
    if sink_score is not None:
        values: Any = attention.W_V
        values.mul_(((n + math.exp(sink_score)) / (n + attention.sink.exp()))[:, None, None])
        attention.sink.fill_(sink_score)
    attention.W_Q.mul_(factor)
    return model


def _trained_softmax(args: Any, name: str, cfg: TransformerConfig, **how: Any) -> list[HookedTransformer]:
    """Five seeds of a softmax layer. `scale` and `sink` are where these two start; `fixed` are not trained."""
    models = [build(cfg.replace(initializer_range=0.2), seed) for seed in range(5)]
    task, attention, fixed = PRESETS["softmax-2h-sink"].task, "blocks.0.attn.", how.pop("fixed", ())
    weights, scale, sink = stacked(models), how.pop("scale", None), how.pop("sink", None)
    if scale is None:
        made = saved(args.runs / f"{name}.pt", lambda: train_weights(models[0], weights, task, **how))
        return unstacked(models[0], made)
    raw = {key.removeprefix(attention): value for key, value in weights.items() if not key.endswith("sink")}
    own = {"log_scale": torch.full((5, 1), math.log(scale))}
    own |= {} if sink is None else {"sink": torch.full((5, 1), sink)}
    constant = {key: own.pop(key) for key in fixed}

    def make() -> Weights:
        return train_weights(models[0], raw | own, task, as_weights=lambda raw: tied(raw | constant, cfg), **how)

    return unstacked(models[0], saved(args.runs / f"{name}.pt", make))


def gap(
    name: str, errors: Float[Tensor, "seed prompt"], reference: Float[Tensor, "#seed prompt"], note: str = ""
) -> Row:
    """A row with the loss over a reference's, minus 1."""
    ratio = ratio_interval(errors[0], reference[0]) if len(errors) == 1 else crossed_interval(errors, reference)
    over = "prompts" if len(errors) == 1 else seeds_and_prompts(*errors.shape)
    return Row(name, None, replace(ratio, mean=ratio.mean - 1, low=ratio.low - 1, high=ratio.high - 1), over, note)


def _softmax(args: Any, task: LinearRegression, held_out: Prompts) -> list[Row]:
    targets = held_out.query.ys[:, 0]
    descent = tuned_descent(task.sample(args.n_prompts, seed=args.seed + 1, dtype=torch.float64), 1)
    reference = squared_errors(descent, held_out)[:, 0][None]

    def exact(scale: float, sink: float | None, heads: int = 2) -> Float[Tensor, "1 prompt"]:
        return best_multiple(softmax_sum(held_out, scale, sink, heads=heads), targets)[None]

    # closed forms, each with its best multiple, as is the step of gradient descent that they are compared with
    step = exact(1e-4, math.inf)
    written = {f"sink of infinite weight, scale {s:g}": exact(s, math.inf) for s in SCALES}
    written |= {f"scale 0.1, sink score {b:g}": exact(0.1, b) for b in SINK_SCORES}
    written["two heads without a sink, scale 0.1"] = exact(0.1, None)
    written |= {f"one head with a sink of infinite weight, scale {s:g}": exact(s, math.inf, 1) for s in (0.1, 1.0)}
    rows = [gap(f"hand-written, {name}: gap", errors, step) for name, errors in written.items()]
    low, high = (math.log(exact(s, math.inf).mean() / step.mean() - 1) for s in (0.1, 1.0))
    rows.append(Row("hand-written: slope of log gap in log scale, from 0.1 to 1", None, (high - low) / math.log(10)))
    preset = PRESETS["softmax-2h-sink"].model
    two, one = preset, preset.replace(n_heads=1)
    shape = {"steps": 1500, "rate": 1e-2}
    small = math.exp(-1)
    arms: dict[str, tuple[TransformerConfig, dict[str, Any]]] = {
        "linear layer": (preset.replace(n_heads=1, attention="linear", sink="none"), {}),
        "two heads and a sink, not tied, Adam": (two, {"optimizer": "adam"}),
        "two heads and a sink, not tied": (two, {}),
        "two heads and a sink, tied, from scale 1 and sink score 0": (two, {"scale": 1.0, "sink": 0.0}),
        "two heads and a sink, tied, from scale 0.37 and sink score 4": (two, {"scale": small, "sink": 4.0}),
        "two heads without a sink, tied": (two.replace(sink="none"), {"scale": small}),
        "one head with a sink, tied": (one, {"scale": small, "sink": 4.0}),
    }
    fixed = {"fixed": ("log_scale", "sink")}
    arms |= {f"scale {s:g}, sink score 6, both fixed": (two, {"scale": s, "sink": 6.0, **fixed}) for s in SCALES[3:]}
    arms |= {f"scale 0.25, sink score {b:g}, both fixed": (two, {"scale": 0.25, "sink": b, **fixed})
             for b in SINK_SCORES[:2]}  # fmt: skip
    checkpoint = load_checkpoint(args.checkpoint)
    kept = in_float64(checkpoint.models[seed] for seed in kept_seeds(checkpoint))
    rows.append(gap("checkpoint, seeds that are not stuck: gap", query_errors(kept, held_out), reference))
    edits: dict[str, tuple[float | None, float]] = {
        "unchanged": (None, 1.0), "scale halved": (None, 0.5), "sink score 6": (6.0, 1.0),
        "sink score 6 and scale halved": (6.0, 0.5),
    }  # fmt: skip
    for name, (sink, factor) in edits.items():
        outputs = [with_sink(model, sink, factor).predict(held_out)[:, 0] for model in kept]
        errors = torch.stack([best_multiple(each, targets) for each in outputs])
        rows.append(gap(f"checkpoint, best multiple of its predictions, {name}: gap", errors, step))
    linear = None
    for name, (cfg, how) in arms.items():
        models = _trained_softmax(args, f"softmax-{name}", cfg, **shape, **how)
        errors = query_errors(models, held_out)
        linear = errors if linear is None else linear
        note = by_seed(errors.mean(1) / reference.mean() - 1, ".4f")
        if cfg.sink == "learned":
            products = torch.stack([read_weight_products(model).W_KQ[0].norm(dim=(-2, -1)) for model in models])
            scale = products.log().mean().exp().item() / math.sqrt(held_out.x_dim)  # geometric mean of the heads'
            sinks = torch.stack([model.blocks[0].attn.sink.detach().mean() for model in models])
            note += f"; scale {scale:.3g}, sink score {sinks.mean():.3g}"
        rows.append(gap(f"trained, {name}: gap", errors, reference, note))
        if errors is not linear:
            rows.append(gap(f"trained, {name}: gap to a linear layer trained alike", errors, linear))
    return rows


# ---- five layers ----

FIVE = (
    "Losses over that of GD++ with its own step size and γ in each of five steps, tuned on the task. Trained on: 300 "
    "steps of 512 prompts, the checkpoint's SOAP and clip of gradients, the rate falling along a cosine. From random "
    "weights: 10,000 such steps, the checkpoint's rate of 1e-2. Four seeds."
)


def balanced(
    model: HookedTransformer, family: ConstructionFamily, values: Float[Tensor, "parameter"]
) -> HookedTransformer:
    """A member of a family of one head, in a model's float32 weights; both products of a layer have one norm."""
    products, model = family.products(values), copy.deepcopy(model)
    with torch.no_grad():
        for block, W_KQ, W_PV in zip(model.blocks, products.W_KQ[:, 0], products.W_PV[:, 0], strict=True):
            ratio = (W_PV.norm() / W_KQ.norm()).sqrt()
            attention = block.attn
            for matrix, first, second in ((W_KQ * ratio, "W_Q", "W_K"), (W_PV / ratio, "W_V", "W_O")):
                left, size, right = torch.linalg.svd(matrix)
                getattr(attention, first)[0] = left * size.sqrt()
                other = size.sqrt()[:, None] * right
                getattr(attention, second)[0] = other.mT if second == "W_K" else other
    return model


def tuned_member(
    family: ConstructionFamily, start: Float[Tensor, "parameter"], prompts: Prompts, iterations: int = 30
) -> Float[Tensor, "parameter"]:
    """The member of a family with the least squared error, from a start with positive numbers; a 0 in it stays 0."""
    free = start > 0
    logs = start[free].log().requires_grad_()
    tokens, targets = family.template.encode(prompts), prompts.query.ys
    search = torch.optim.LBFGS([logs], max_iter=iterations, line_search_fn="strong_wolfe", history_size=20)

    def values() -> Tensor:
        return torch.zeros_like(start).masked_scatter(free, logs.exp())

    def closure() -> Tensor:
        search.zero_grad()
        products = family.products(values())
        factors = (("W_Q", products.W_KQ), ("W_V", products.W_PV))
        weights = {f"blocks.{i}.attn.{name}": each for name, by_layer in factors for i, each in enumerate(by_layer)}
        outputs = functional_call(family.template, weights, (tokens,), {"at": "query"})[:, -1]
        loss = (outputs - targets).square().mean()
        loss.backward()
        return loss

    search.step(closure)
    return values().detach()


def _five(args: Any, task: LinearRegression, held_out: Prompts) -> list[Row]:
    models = load_checkpoint(args.checkpoint).models
    cfg = models[0].cfg
    tuned = tuned_references(task, cfg.n_layers, False, cfg.token_clip)["GD++, 5 steps, each its own"]
    reference = squared_errors(tuned, held_out)[:, 0]
    family = family_for("gd++ per layer", cfg)
    tuning = task.sample(4096, seed=TUNING_SEED, dtype=torch.float64)
    projected = [project_weights(family, model).parameters for model in in_float64(models)]

    def searched() -> Weights:
        return {"values": torch.stack([tuned_member(family, start.clamp(min=0), tuning) for start in projected])}

    found = saved(args.runs / "five-searched.pt", searched)["values"]
    members = [balanced(models[0], family, values) for values in found]

    def trained(name: str, start: Sequence[HookedTransformer], **how: Any) -> list[HookedTransformer]:
        how = {"steps": 300, "clip": 0.1, **how}
        made = saved(args.runs / f"five-{name}.pt", lambda: train_weights(models[0], stacked(start), task, **how))
        return unstacked(models[0], made)

    hardest = trained("hardest", models, rate=1e-3, kept=(0.75, 1.0), batch_size=1024)
    without = trained("without", models, rate=1e-3, kept=(0.0, 0.98))
    losses: dict[str, dict[str, Any]] = {
        "squared errors": {}, "absolute errors": {"absolute": True},
        "squared errors without the hardest 2% of prompts": {"kept": (0.0, 0.98)},
    }  # fmt: skip
    random = [build(cfg, seed) for seed in range(len(models))]
    arms: dict[str, Sequence[HookedTransformer]] = {
        "as trained": models,
        "trained on, rate 1e-2": trained("on-1e-2", models, rate=1e-2),
        "trained on, rate 1e-3": trained("on-1e-3", models, rate=1e-3),
        "trained on, rate 1e-3, the hardest quarter of prompts": hardest,
        "trained on, rate 1e-3, without the hardest 2% of prompts": without,
        "projected on GD++": [balanced(models[0], family, values) for values in projected],
        "projected on GD++, its numbers searched for": members,
        "then all weights trained, rate 1e-3": trained("then-1e-3", members, rate=1e-3),
        "then all weights trained, rate 1e-4": trained("then-1e-4", members, rate=1e-4),
    }
    for name, how in losses.items():
        made = trained(f"random-{name}", random, steps=10_000, rate=1e-2, **how)
        arms[f"trained from random weights on {name}"] = made
    rows = []
    for name, arm in arms.items():
        rows += ratios(name, query_errors(in_float64(arm), held_out), reference)
    steps = torch.tensor([list(tuned.hyperparameters.values())[:5], found[:, :5].mean(0).tolist(),
                          torch.stack(projected)[:, :5].mean(0).tolist()])  # fmt: skip
    names = "tuned GD++", "the projection, searched for", "the projection"
    for name, values in zip(names, steps.tolist(), strict=True):
        rows.append(Row(f"step sizes of {name}", None, ", ".join(f"{value:.4g}" for value in values)))
    return rows


def ratios(name: str, errors: Float[Tensor, "seed prompt"], reference: Float[Tensor, "prompt"]) -> list[Row]:
    """Rows of the loss over a reference's: trimmed, median over median, and mean over mean."""
    over, by_median = seeds_and_prompts(*errors.shape), errors.median(1).values / reference.median()
    trimmed = crossed_interval(errors, reference[None], trim=TRIM)
    return [
        Row(f"{name}: loss over tuned GD++'s, {TRIMMED}", None, trimmed, over),
        Row(f"{name}: median error over tuned GD++'s", None, median_interval(by_median), "seeds"),
        Row(f"{name}: loss over tuned GD++'s", None, crossed_interval(errors, reference[None]), over),
    ]  # fmt: skip


# ---- twelve layers ----

TWELVE = (
    "Twelve layers with four heads and MLPs, trained as the checkpoint (2,500 steps of 256 prompts, SOAP with rate "
    "1e-2, where no other is named). Restarted: a second cosine, for 500 more steps from 3e-3, or 300 from 3e-4."
)


def _twelve(args: Any, task: LinearRegression, held_out: Prompts) -> list[Row]:
    models, preset = load_checkpoint(args.checkpoint).models, PRESETS[args.checkpoint]
    cfg = models[0].cfg
    references = tuned_references(task, cfg.n_layers, False, cfg.token_clip)

    def restarted(rate: float, steps: int) -> list[HookedTransformer]:
        how: dict[str, Any] = {"steps": steps, "batch_size": preset.batch_size, "clip": 0.1, "rate": rate}
        path = args.runs / f"twelve-restarted-{rate:g}.pt"
        return unstacked(models[0], saved(path, lambda: train_weights(models[0], stacked(models), task, **how)))

    def anew(name: str, **changes: Any) -> list[HookedTransformer]:
        made = train(preset.replace(**changes), args.runs / f"lsa-12l-mlp-{name}", progress=False).models
        return in_float64(made)

    groups: dict[str, list[HookedTransformer]] = {
        "as trained, seeds 0 to 2": in_float64(models),
        "restarted from 3e-3, seeds 0 to 2": restarted(3e-3, 500),
        "restarted from 3e-4, seeds 0 to 2": restarted(3e-4, 300),
        "three more seeds, 3 to 5": anew("more", seeds=(3, 4, 5)),
    }
    groups["rate 3e-3, seeds 0 to 2"] = anew("slow", learning_rate=3e-3)
    if args.share_mlp:
        one = {"model": preset.model.replace(share_mlp=True)}
        groups["one MLP for all layers, seeds 0 to 2"] = anew("shared", **one)
        groups["one MLP for all layers, rate 3e-3, seeds 0 to 2"] = anew("shared-slow", **one, learning_rate=3e-3)
    errors = {name: query_errors(group, held_out) for name, group in groups.items()}
    first, _, _, more, *_ = errors
    errors["six seeds, 0 to 5"] = torch.cat([errors[first], errors[more]])
    rows, n_kept = [], int((1 - TRIM) * len(held_out))
    for label, learner in references.items():
        reference = squared_errors(learner, held_out)[:, 0]
        for name, values in errors.items():
            means = values.mean(1) / reference.mean()
            trimmed = values.sort(1).values[:, :n_kept].mean(1) / reference.sort().values[:n_kept].mean()
            for what, each in ((f"loss over {label}", means), (f"loss over {label}, {TRIMMED}", trimmed)):
                rows.append(Row(f"{name}: {what}, median", None, median_interval(each), "seeds", by_seed(each)))
    for name, values in errors.items():
        large = (values > 10).double().mean(1).tolist()
        rows.append(Row(f"{name}: prompts with a squared error above 10", None,
                        ", ".join(f"{100 * share:.3g}%" for share in large)))  # fmt: skip
    return rows


if __name__ == "__main__":
    compare.run()
