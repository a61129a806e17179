"""The lecture text on transformers as meta-optimisers: its theorems, worked examples and coding demonstrations."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.proofs import with_pseudo_examples
from analyses.support.script import Option, script
from mechicl import algorithms, constructions
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import Interval, ratio_interval
from mechicl.tasks import LinearRegression

RATE = 0.1
"""Learning rate of the first demonstration."""
TERMS = (10, 100, 1000)
"""Of the power series; the lecture shows 10."""
NEWTON_STEPS = 20


@script(n_prompts=Option(1000, "random prompts where the lecture shows one"), seed=0)
def compare(args: Any) -> Comparison:
    """Rows for every theorem, example and demonstration."""
    generator = torch.Generator().manual_seed(args.seed)
    w, noise = torch.randn(2, 100_000, generator=generator, dtype=torch.float64)  # the example is x = 1
    damping = ratio_interval(w * (w + noise), (w + noise).square())
    rows = [
        *_one_step(args), *_bayes(args), *_worked_examples(),
        Row("example 2: damping with the least loss on such tasks", 0.5, damping, "tasks", "1 / (1 + λ)"),
        *_power_series(args),
    ]  # fmt: skip
    lead = (
        f"Where the lecture draws one random prompt, {args.n_prompts:,} are drawn here (seed {args.seed}), in float64; "
        f"its own draws have no seed. Errors are relative to the largest expected value."
    )
    return Comparison("The lecture on transformers as meta-optimisers", lead, rows)


def _one_step(args: Any) -> list[Row]:
    """Theorem 2.1, its last sentence, and demonstration 1 (d = 4, five examples, noise of 0.1)."""
    task = LinearRegression(x_dim=4, n_context=5, inputs="gaussian", noise_std=0.1)
    prompts = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    layer = constructions.gradient_descent(x_dim=4, n_context=5, step_size=RATE)
    weights = torch.zeros(args.n_prompts, 4, 1, dtype=torch.float64)
    gradient = torch.zeros_like(weights)
    for i in range(prompts.n_context):  # the demonstration's own loop
        x, y = prompts.xs[:, i, :, None], prompts.ys[:, i, :, None]
        gradient += x * (weights.mT @ x - y)
    by_loop = (prompts.query.xs[:, None] @ (weights - RATE * gradient))[:, 0]
    by_layer = layer.predict(prompts)
    rows = [Row("one linear layer against one step by a loop: largest error", "equal", _error(by_layer, by_loop))]
    unit = constructions.gradient_descent(x_dim=4, n_context=5, step_size=1.0)
    whole = unit.predict(prompts)
    for words, on_query, on_key in (("W_Q alone", 0.5, 0.0), ("W_K alone", 0.0, 0.5), ("both", 0.5, 0.5)):
        scaled = copy.deepcopy(unit)
        attention = scaled.blocks[0].attn
        with torch.no_grad():
            attention.W_Q.mul_(RATE**on_query)
            attention.W_K.mul_(RATE**on_key)
        rate = (scaled.predict(prompts) * whole).sum() / whole.square().sum()
        rows.append(Row(f"learning rate over η = {RATE}, {words} scaled by its root", 1.0, rate.item() / RATE))
    order = torch.randperm(prompts.n_context, generator=torch.Generator().manual_seed(args.seed))
    places = torch.cat([order, torch.tensor([prompts.n_context])])
    shuffled = Prompts(prompts.xs[:, places], prompts.ys[:, places])
    rows.append(Row("change of the layer's prediction when the examples' order changes", "none",
                    _error(layer.predict(shuffled), by_layer)))  # fmt: skip
    return rows


def _bayes(args: Any) -> list[Row]:
    """Theorem 3.1: the Bayes predictor, its dual form, the same in weights; and what an MLP on one token cannot do."""
    task = LinearRegression(x_dim=5, n_context=8, inputs="gaussian", noise_std=0.5)
    prompts = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    penalty = task.noise_std**2
    best = algorithms.bayes(prompts, noise_std=task.noise_std, at="query").query()[0]
    xs, ys = prompts.context.xs, prompts.context.ys
    gram = xs @ xs.mT + penalty * torch.eye(prompts.n_context, dtype=torch.float64)
    dual = (prompts.query.xs[:, None] @ xs.mT @ torch.linalg.solve(gram, ys))[:, 0]
    regularised = with_pseudo_examples(prompts, penalty)
    largest = torch.linalg.eigvalsh(xs.mT @ xs)[:, -1].max().item() + penalty
    model = constructions.newton(x_dim=5, n_context=8 + 5, steps=NEWTON_STEPS, alpha=1.5 / largest**2)
    # two contexts alike in the first point's products with all others: rotate the others around the first point
    rotated = xs.clone()
    first = torch.nn.functional.normalize(xs[:, :1], dim=-1)
    along = (xs[:, 1:] @ first.mT) @ first
    generator = torch.Generator().manual_seed(args.seed + 1)
    turn = torch.randn(args.n_prompts, 7, 5, generator=generator, dtype=torch.float64)
    across = turn - (turn @ first.mT) @ first
    rotated[:, 1:] = along + across
    other = rotated @ rotated.mT + penalty * torch.eye(prompts.n_context, dtype=torch.float64)
    same = _error(other[:, 0, 1:], gram[:, 0, 1:])
    inverse, other_inverse = gram.inverse()[:, 0], other.inverse()[:, 0]
    apart = ((inverse - other_inverse).norm(dim=-1) / inverse.norm(dim=-1)).median().item()
    return [
        Row("Bayes predictor, by points against by dimensions: largest error", "equal", _error(dual, best)),
        Row("Bayes predictor in weights: largest error", "exact", _error(model.predict(regularised), best), "",
            f"{model.cfg.n_layers} layers, {NEWTON_STEPS} iterations of Newton's method"),
        Row("contexts whose first points have the same products: distance of their first rows of G + λ", "equal", same),
        Row("contexts whose first points have the same products: distance of the inverse's first rows", "equal", apart,
            "", "median over pairs of contexts, relative"),
    ]  # fmt: skip


def _worked_examples() -> list[Row]:
    """Examples 1 and 2 at their numbers, by the algorithm and by hand-written weights."""
    first = _prompt([[1.0, 0.0]], [2.0], [0.0, 1.0])
    descent = algorithms.gradient_descent(first, 1, step_size=0.5, with_weights=True, at="query")
    assert descent.weights is not None
    weights = descent.weights[-1].flatten().tolist()
    layer = constructions.gradient_descent(x_dim=2, n_context=1, step_size=0.5)
    second = _prompt([[1.0]], [2.0], [3.0])
    best = algorithms.bayes(second, noise_std=1.0, weight_std=1.0, at="query").query()[0].item()
    model = constructions.newton(x_dim=1, n_context=1 + 1, steps=8, alpha=0.3)
    in_weights = model.predict(with_pseudo_examples(second, 1.0)).item()
    return [
        *(Row(f"example 1: weight {i + 1} after a step", printed, value)
          for i, (printed, value) in enumerate(zip((1.0, 0.0), weights, strict=True))),
        Row("example 1: prediction of the step", 0.0, descent.query()[-1].item()),
        Row("example 1: prediction of the layer", 0.0, abs(layer.predict(first).item())),
        Row("example 2: Bayes prediction", 3.0, best),
        Row("example 2: prediction of hand-written weights", 3.0, in_weights),
    ]  # fmt: skip


def _power_series(args: Any) -> list[Row]:
    """Demonstration 2 (five examples in ten dimensions, λ = 1): the series, and what needs fewer layers."""
    generator = torch.Generator().manual_seed(args.seed)
    xs, x_query = torch.randn(args.n_prompts, 6, 10, generator=generator, dtype=torch.float64).split([5, 1], dim=1)
    ys = torch.randn(args.n_prompts, 5, 1, generator=generator, dtype=torch.float64)
    prompts = Prompts(torch.cat([xs, x_query], 1), torch.cat([ys, torch.zeros_like(ys[:, :1])], 1))
    exact = algorithms.ridge(prompts, penalty=1.0, at="query").query()[0]
    eye = torch.eye(5, dtype=torch.float64)
    gram = xs @ xs.mT
    alpha = 1 / (gram.diagonal(dim1=1, dim2=2).sum(-1) + 1)
    step = eye - alpha[:, None, None] * (gram + eye)
    by_terms, total, term = {}, torch.zeros_like(gram), eye.expand_as(gram)
    for n in range(1, max(TERMS) + 1):
        total, term = total + term, term @ step
        if n in TERMS:
            by_terms[n] = (x_query @ xs.mT @ (alpha[:, None, None] * total) @ ys)[:, 0]
    regularised = with_pseudo_examples(prompts, 1.0)
    descended = torch.stack([
        algorithms.gradient_descent(regularised[i : i + 1], 10, step_size=alpha[i].item(), at="query").query()[-1, 0]
        for i in range(min(50, args.n_prompts))
    ])  # fmt: skip
    largest = torch.linalg.eigvalsh(gram)[:, -1].max().item() + 1
    newton = algorithms.newton(regularised, range(1, 25), alpha=1.5 / largest**2, at="query").query()
    error = (newton - exact).square().mean((1, 2)) / exact.square().mean()
    needed = int((error < 1e-4).nonzero()[0]) + 1
    rows = [
        Row(f"demonstration 2: squared error after {n} terms over the exact predictions' mean square", None,
            ratio_interval((value - exact).square()[:, 0], exact.square()[:, 0]), "prompts")
        for n, value in by_terms.items()
    ]  # fmt: skip
    low, middle, high = (by_terms[10] / exact)[:, 0].quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    draws = Interval(middle.item(), low.item(), high.item(), n=args.n_prompts, level=0.9)
    return [
        *rows,
        Row("demonstration 2: 10 terms over the exact prediction", None, draws, "draws",
            "median, and where nine of ten draws lie"),
        Row("demonstration 2: ten terms against ten steps of gradient descent on the ridge loss: largest error", None,
            _error(by_terms[10][: len(descended)], descended)),
        Row("demonstration 2: iterations of Newton's method to a squared error below 0.01%", None, needed),
    ]  # fmt: skip


def _prompt(xs: list[list[float]], ys: list[float], query: list[float]) -> Prompts:
    points = torch.tensor([*xs, query], dtype=torch.float64)[None]
    return Prompts(points, torch.tensor([*ys, 0.0], dtype=torch.float64)[None, :, None])


def _error(values: Float[Tensor, "..."], expected: Float[Tensor, "..."]) -> float:
    """Largest difference over the largest expected value; what is rounding is 0."""
    error = ((values - expected).abs().max() / expected.abs().max()).item()
    return error if error > 1e-9 else 0.0


if __name__ == "__main__":
    compare.run()
