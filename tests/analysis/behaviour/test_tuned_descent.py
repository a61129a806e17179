"""Tuned descent, also on clipped tokens, against plain loops, layers, and descent without a clip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis import align
from mechicl.analysis.behaviour import tuned_clipped_descent, tuned_descent
from mechicl.analysis.behaviour.tuned_descent import ClippedDescent
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=4)


def in_a_plain_loop(prompts, sizes, gammas, clip):
    predicted = []
    for xs, ys in zip(prompts.xs.tolist(), prompts.ys.tolist(), strict=True):
        tokens = [[*x, y[0]] for x, y in zip(xs, ys, strict=True)]
        tokens[-1][-1] = 0.0
        for a, gamma in zip(sizes, gammas, strict=True):
            moved = []
            for token in tokens:
                changed = list(token)
                for other in tokens[:-1]:
                    score = sum(p * q for p, q in zip(token[:-1], other[:-1], strict=True))
                    for k in range(len(token) - 1):
                        changed[k] -= gamma * score * other[k]
                    changed[-1] -= a * score * other[-1]
                moved.append([min(max(value, -clip), clip) for value in changed])
            tokens = moved
        predicted.append([-tokens[-1][-1]])
    return torch.tensor(predicted, dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=4),
    st.floats(0.05, 20),
)
def test_clipped_descent_is_a_loop_on_tokens(seed, parameters, clip):
    prompts = TASK.sample(3, seed=seed, dtype=torch.float64)
    sizes, gammas = zip(*parameters, strict=True)
    learner = ClippedDescent(sizes, gammas, clip, {})
    torch.testing.assert_close(learner.predict(prompts), in_a_plain_loop(prompts, sizes, gammas, clip))


def test_clipped_descent_is_the_construction_with_a_clip():
    prompts = LinearRegression(x_dim=3, n_context=4, input_scale=4.0).sample(20, seed=0, dtype=torch.float64)
    made = constructions.gd_plus_plus(x_dim=3, n_context=4, step_size=[0.5, 1.0], gamma=[0.2, 0.1], steps=2)
    layers = HookedTransformer(made.cfg.replace(token_clip=2.0))
    layers.load_state_dict(made.state_dict())
    learner = ClippedDescent([0.5, 1.0], [0.2, 0.1], 2.0, {})
    assert (learner.predict(prompts).abs() == 2).any()
    torch.testing.assert_close(learner.predict(prompts), layers.double().predict(prompts))
    assert align(layers.double(), learner, prompts).sensitivity_cosine.nan_to_num(1).min() > 1 - 1e-6
    torch.testing.assert_close(learner.predict_prefixes(prompts)[:, -1], learner.predict(prompts))


@pytest.mark.parametrize("per_step", [False, True])
def test_a_clip_that_nothing_reaches_changes_nothing(per_step):
    prompts = LinearRegression().sample(600, seed=1, dtype=torch.float64)
    with_clip = tuned_clipped_descent(prompts, 2, 1e6, gamma=True, per_step=per_step)
    without = tuned_descent(prompts, 2, gamma=True, per_step=per_step)
    assert squared_errors(with_clip, prompts).mean() <= squared_errors(without, prompts).mean() * 1.01
    assert set(with_clip.hyperparameters) == set(without.hyperparameters)
    plain, expected = tuned_clipped_descent(prompts, 1, 1e6), tuned_descent(prompts, 1)
    a, b = (learner.hyperparameters["step_size"] for learner in (plain, expected))
    assert a == pytest.approx(b, rel=1e-2)
    assert plain.gammas == [0.0]


def test_the_clip_matters_to_ten_steps():
    """Ten steps of GD++ that are best without a clip are worse than predicting 0 with one."""
    prompts = LinearRegression().sample(60, seed=2, dtype=torch.float64)
    best = tuned_descent(prompts, 10, gamma=True).hyperparameters
    clipped = ClippedDescent([best["step_size"]] * 10, [best["gamma"]] * 10, 10.0, best)
    tuned = tuned_clipped_descent(prompts, 10, 10.0, gamma=True)
    assert squared_errors(clipped, prompts).mean() > prompts.query.ys.square().mean()
    assert squared_errors(tuned, prompts).mean() < 0.2 * prompts.query.ys.square().mean()


def test_tuned_deep_descent_does_not_explode_on_contexts_that_it_was_not_tuned_on():
    task = LinearRegression()
    fresh = task.sample(10_000, seed=99, dtype=torch.float64)
    plain = tuned_descent(task.sample(2048, seed=5, dtype=torch.float64), 3)
    deep = tuned_descent(task.sample(2048, seed=5, dtype=torch.float64), 3, gamma=True, per_step=True)
    losses = [(each.predict(fresh) - fresh.query.ys).square().mean().item() for each in (deep, plain)]
    assert losses[0] < losses[1]
