"""Trained descent, against a plain loop of the same training and against a search."""

import math

import pytest
import torch

from mechicl.analysis.behaviour import tuned_descent
from mechicl.learners import squared_errors
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig
from tests.scripts import import_script

trained_descent = import_script("oswald_descent").trained_descent
TASK = LinearRegression(x_dim=3, n_context=5)
TRAINING = TrainingConfig(
    task=TASK, model=TransformerConfig(x_dim=3, n_context=5, n_layers=1), steps=12, batch_size=40, learning_rate=0.05,
    schedule="cosine", warmup_steps=3, gradient_clip=0.1,
)  # fmt: skip


def test_it_is_adam_on_the_step_size():
    """One step of descent: Adam with warm-up, cosine and clip in a plain loop; one batch is the whole pool."""
    pool = TASK.sample(40, seed=0, dtype=torch.float64)
    context, query = pool.context, pool.query
    slopes = (query.xs[:, None] @ context.xs.mT @ context.ys)[:, 0, 0].tolist()  # a step size of 1 predicts these
    targets = query.ys[:, 0].tolist()
    a, first, second = 0.0, 0.0, 0.0
    for step in range(12):
        gradient = sum(2 * (a * p - y) * p for p, y in zip(slopes, targets, strict=True)) / 40
        gradient *= min(1.0, 0.1 / (abs(gradient) + 1e-6))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        rate = 0.05 * ((step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 9)))
        mean, root = first / (1 - 0.9 ** (step + 1)), math.sqrt(second / (1 - 0.999 ** (step + 1)))
        a -= rate * mean / (root + 1e-8)
    learner = trained_descent(pool, 1, TRAINING)
    assert learner.hyperparameters == {"step_size": pytest.approx(a, rel=1e-6)}
    assert learner.name == "gradient descent, 1 step, trained"


def test_long_training_reaches_the_result_of_a_search():
    pool = TASK.sample(400, seed=1, dtype=torch.float64)
    training = TRAINING.replace(steps=600, batch_size=400, gradient_clip=None, learning_rate=0.1)
    best = squared_errors(tuned_descent(pool, 2, gamma=True), pool).mean()
    trained = trained_descent(pool, 2, training, gamma=True)
    assert set(trained.hyperparameters) == {"step_size", "gamma"}
    assert best * 0.999 <= squared_errors(trained, pool).mean() <= best * 1.1


def test_parameters_for_each_step_are_named_and_the_last_gamma_is_0():
    pool = TASK.sample(80, seed=2, dtype=torch.float64)
    learner = trained_descent(pool, 3, TRAINING, gamma=True, per_step=True)
    assert list(learner.hyperparameters) == [*(f"step_size_{i}" for i in (1, 2, 3)), "gamma_1", "gamma_2"]
    first, again = (trained_descent(pool, 3, TRAINING, gamma=True, per_step=True, seed=1) for _ in range(2))
    assert first.hyperparameters == again.hyperparameters != learner.hyperparameters


@pytest.mark.parametrize(("n", "steps", "gamma"), [(39, 2, False), (40, 0, False), (40, 1, True)])
def test_invalid_settings_are_refused(n, steps, gamma):
    with pytest.raises(ValueError, match=r"batch|step"):
        trained_descent(TASK.sample(n, seed=0), steps, TRAINING, gamma=gamma)
