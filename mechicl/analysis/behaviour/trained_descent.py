"""Gradient descent and GD++ whose step sizes and γ are trained as a model is, not searched for."""

from functools import partial
from math import isfinite

import torch
from torch import Tensor

from mechicl.algorithms.gradient_descent import gd_plus_plus_filters
from mechicl.analysis.behaviour.spectral import SpectralLearner, SpectralProblem
from mechicl.prompts import Prompts
from mechicl.training import TrainingConfig
from mechicl.training.loop import clip_each_seed
from mechicl.training.optimizers import make_optimizer


def trained_descent(
    prompts: Prompts,
    steps: int,
    training: TrainingConfig,
    *,
    gamma: bool = False,
    per_step: bool = False,
    seed: int = 0,
) -> SpectralLearner:
    """Gradient descent or GD++ with parameters from a model's training: its optimiser, rate, batches and clipping.

    A search (`tuned_descent`) finds better parameters than a training does where the loss has a narrow valley or is
    made by rare prompts; this is what a model that was trained the same way may be held against as well.

    Args:
        prompts: the pool that batches are drawn from, each prompt once before any comes again.
        steps: number of steps of descent.
        training: the model's. The task, the model and the seeds in it are not used, nor a clip of tokens.
        gamma: GD++ instead of gradient descent; more than one step.
        per_step: a step size (and γ) for each step instead of one for all; the last γ, which does nothing, is left out.
        seed: of the order of the prompts.

    Returns:
        The learner at the end of the training, which begins with all parameters at 0.

    Raises:
        ValueError: fewer prompts than a batch, fewer than one step, or GD++ of one step.

    Source: von Oswald et al. 2023, A.12: "an identical training setup" for η and γ.

    Example:
        >>> training = TrainingConfig.from_dict(load_checkpoint("lsa-5l").record["training"])
        >>> pool = LinearRegression().sample(50_000, seed=0)
        >>> trained_descent(pool, 5, training, gamma=True, per_step=True).name
        'GD++, 5 steps, parameters for each step, trained'
    """
    if steps < 1 or (gamma and steps == 1):
        raise ValueError(f"descent needs a step, and GD++ two: its last γ does nothing; got steps={steps}")
    if len(prompts) < training.batch_size:
        raise ValueError(f"a batch has {training.batch_size:,} prompts, and the pool only {len(prompts):,}: draw more")
    count = steps if per_step else 1
    n_gammas = (steps - 1 if per_step else 1) if gamma else 0
    problem = SpectralProblem.from_prompts(prompts, prompts.query.ys)
    values = torch.zeros(1, count + n_gammas, dtype=torch.float64, requires_grad=True)
    optimizer = make_optimizer(training.optimizer, values, [torch.Size([values.shape[1]])], training.learning_rate)
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    for step in range(training.steps):
        if len(order) < training.batch_size:
            order = torch.randperm(len(prompts), generator=generator)
        batch, order = order[: training.batch_size], order[training.batch_size :]
        drawn = SpectralProblem(problem.eigenvalues[batch], problem.contributions[batch], problem.targets[batch])
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate_at(step)
        optimizer.zero_grad()
        loss = drawn.error(_filtered(values[0], drawn.eigenvalues, steps=steps, count=count))
        loss.backward()
        assert values.grad is not None
        if not isfinite(loss.item()):
            values.grad.zero_()
        if training.gradient_clip is not None:
            clip_each_seed(values.grad, training.gradient_clip)
        optimizer.step()
    final = values.detach()[0]
    numbered = [f"_{i + 1}" for i in range(steps)] if per_step else [""]
    labels = [f"step_size{end}" for end in numbered] + [f"gamma{end}" for end in numbered]
    name = f"{'GD++' if gamma else 'gradient descent'}, {steps} step{'s' if steps > 1 else ''}"
    name += f"{', parameters for each step' if per_step else ''}, trained"
    parameters = dict(zip(labels, final.tolist(), strict=False))
    return SpectralLearner(partial(_filtered, final, steps=steps, count=count), name, parameters)


def _filtered(values: Tensor, eigenvalues: Tensor, *, steps: int, count: int) -> Tensor:
    """The filter after the last step: step sizes first among the values, then γ; one that is not there is 0."""
    sizes, gammas = values[:count], values[count:]
    if count == 1:
        each = [gammas[0] if len(gammas) else values.new_zeros(())] * steps
        return gd_plus_plus_filters(eigenvalues, [sizes[0]] * steps, each)[-1]
    each = [gammas[i] if i < len(gammas) else values.new_zeros(()) for i in range(steps)]
    return gd_plus_plus_filters(eigenvalues, list(sizes), each)[-1]
