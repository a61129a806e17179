"""The time of analyses of layers, compared with plain loops."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.rows import Row, Settings, row, timed
from mechicl import algorithms
from mechicl.analysis import Lens, Readouts, fit_readouts
from mechicl.analysis.behaviour import regressed_weights
from mechicl.analysis.behaviour.alignment import predict_queries_one_by_one
from mechicl.checkpoints import load_checkpoint
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

NEWTON_STEPS = list(range(1, 24))
GD_STEPS = sorted({round(4096 ** (i / 43)) for i in range(44)})  # 40 columns
RESTARTS = (sum(NEWTON_STEPS) + sum(GD_STEPS)) / (len(NEWTON_STEPS) + GD_STEPS[-1])


def loops(xs: torch.Tensor, ys: torch.Tensor, step_size: float) -> torch.Tensor:
    """Run every step of both algorithms for every prefix of one prompt; returns the columns' steps, `[column point]`.

    If each column's learner starts anew, the number of steps grows by the factor `RESTARTS`.
    """
    columns = []
    for t in range(len(xs)):
        second, cross = xs[:t].T @ xs[:t], xs[:t].T @ ys[:t]
        inverse = second / torch.linalg.norm(second @ second.T) if t else second
        predictions = []
        for _ in NEWTON_STEPS:
            inverse = 2 * inverse - inverse @ second @ inverse
            predictions.append((xs[t] @ inverse @ cross).item())
        weights = torch.zeros_like(cross)
        kept_steps = set(GD_STEPS)
        for step in range(1, GD_STEPS[-1] + 1):
            weights = weights - step_size * (second @ weights - cross)
            if step in kept_steps:
                predictions.append((xs[t] @ weights).item())
        columns.append(predictions)
    return torch.tensor(columns, dtype=torch.float64).T


def heatmap_rows(rounds: int, n_prompts: int = 320) -> list[Row]:
    """Both axes of Fu et al.'s Fig. 2 at the paper's size."""
    prompts = LinearRegression(x_dim=20, n_context=40, inputs="gaussian").sample(n_prompts, seed=0, dtype=torch.float64)
    step_size = algorithms.stable_step_size(prompts)
    ratios, kept, ours = [], [], []
    for i in range(rounds):
        newton_time, newton = timed(lambda: algorithms.newton(prompts, NEWTON_STEPS))
        descent_time, descent = timed(lambda: algorithms.gradient_descent(prompts, GD_STEPS, step_size=step_size))
        ours.append(newton_time + descent_time)
        loop_time, plain = timed(partial(loops, prompts.xs[i], prompts.ys[i], step_size))
        kept.append(loop_time * n_prompts / ours[-1])
        ratios.append(kept[-1] * RESTARTS)
        quick = torch.cat([newton.predictions[:, i, :, 0], descent.predictions[:, i, :, 0]])
        difference = ((quick - plain).norm() / plain.norm()).item()
    detail = f"{len(NEWTON_STEPS)} Newton and {len(GD_STEPS)} GD columns, {n_prompts} prompts, 41 points, d = 20"
    return [
        row("both heatmap axes, loops that start over for every column, over ours", ratios, ">= 1000",
            f"{detail}; loops timed on 1 prompt a round and scaled by count"),
        row("both heatmap axes, loops that keep the columns they pass, over ours", kept, "shown", ""),
        row("both heatmap axes, seconds", ours, "< 3", ""),
        row("the same, relative difference of predictions", [difference], "<= 1e-9", ""),
    ]  # fmt: skip


def train_readouts(like: Readouts, prompts: Prompts, steps: int) -> Readouts:
    """Readouts of all layers by Adam on minibatches of 64 prompts, from 0, as in Fu et al. 2024, B.1."""
    weights, bias = (torch.zeros_like(part, dtype=torch.float32) for part in (like.weights, like.bias))
    optimizer = torch.optim.Adam([weights.requires_grad_(), bias.requires_grad_()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = prompts[torch.randint(len(prompts), (64,), generator=generator)]
        with torch.no_grad():
            *streams, last = like.model.layer_streams(batch, "points")
            last = F.layer_norm(last, last.shape[-1:], eps=like.model.cfg.eps) if like.model.cfg.final_norm else last
            streams = torch.stack([*streams, last])
        predictions = (streams[..., None, :] @ weights[:, None])[..., 0, :] + bias[:, None]
        optimizer.zero_grad()
        (predictions - batch.ys).square().mean((1, 2, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return replace(like, weights=weights.detach().double(), bias=bias.detach().double())


def readout_rows(name: str, n_fitting: int, steps: int, timed_steps: int) -> list[Row]:
    """Readouts of all layers in closed form and by Adam on minibatches of the same prompts."""
    checkpoint = load_checkpoint(name)
    model, task = checkpoint.models[0], checkpoint.task
    fitting, held_out = task.sample(n_fitting, seed=0), task.sample(2048, seed=1)
    seconds, closed = timed(lambda: fit_readouts(model, fitting, progress=False))
    of_training, trained = timed(lambda: train_readouts(closed, fitting, timed_steps))
    ratio = of_training * steps / timed_steps / seconds
    errors = [readouts.errors(held_out, at="points").squared_errors.mean((1, 2)) for readouts in (closed, trained)]
    per_layer = (errors[0] / errors[1]).tolist()
    return [
        row("readouts of all layers, seconds of training over closed form", [ratio], ">= 50",
            f"{steps} steps of Adam on 64 of {n_fitting} prompts, {timed_steps} timed; closed form {seconds:.1f} s"),
        row("held-out error of closed form over trained, worst layer", [max(per_layer)], "<= 1",
            f"after {timed_steps} steps; by layer " + ", ".join(f"{r:.3f}" for r in per_layer)),
    ]  # fmt: skip


def induced_weights_rows(name: str, n_prompts: int, n_queries: int) -> list[Row]:
    """Weights regressed on sampled queries: contexts shared, and a forward pass for each query and prefix."""
    checkpoint = load_checkpoint(name)
    lens, task = Lens(checkpoint.models[0]), checkpoint.task
    prompts = task.sample(n_prompts, seed=0)
    queries = torch.randn(n_queries, task.x_dim, generator=torch.Generator().manual_seed(0))
    seconds, shared = timed(lambda: regressed_weights(lens, prompts, queries))
    by_query, predicted = timed(torch.no_grad()(lambda: predict_queries_one_by_one(lens, prompts, queries)))
    apart = torch.linalg.pinv(queries.double()) @ predicted.double()
    difference = ((shared - apart).norm() / apart.norm()).item()
    exact, _ = timed(lambda: lens.trajectory(prompts, with_weights=True))
    return [
        row("induced weights of all layers and prefixes, separate passes over shared", [by_query / seconds], ">= 20",
            f"{n_prompts} prompts, {n_queries} queries, {task.n_context + 1} prefixes; shared {seconds:.2f} s; "
            f"exact by differentiation {exact:.2f} s"),
        row("the same, relative difference", [difference], "<= 1e-4", "float32"),
    ]  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    return [
        *heatmap_rows(min(settings.rounds, 3)),
        *readout_rows("gpt2-8l", n_fitting=4096, steps=5000, timed_steps=5000 if settings.full else 1000),
        *induced_weights_rows("gpt2-8l", n_prompts=32, n_queries=100),
    ]
