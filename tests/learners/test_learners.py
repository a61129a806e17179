"""Learners of points and of tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mechicl import algorithms, analysis
from mechicl.base.settings import settings
from mechicl.learners import (
    AlgorithmFamily,
    AlgorithmLearner,
    Learner,
    TokenAlgorithmLearner,
    Trajectory,
    squared_errors,
    token_log_probabilities,
    token_losses,
)
from mechicl.learners.learners import named_learners
from mechicl.learners.token_learners import LogitsLearner, as_token_learner, named_token_learners, sequence_batches
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import MarkovChains, RepeatedTokens


def some_prompts(n_prompts=3, n_points=4, x_dim=2, y_dim=2):
    generator = torch.Generator().manual_seed(0)
    return Prompts(
        torch.randn(n_prompts, n_points, x_dim, generator=generator),
        torch.randn(n_prompts, n_points, y_dim, generator=generator),
    )


def running_means(prompts, steps=(1,), scale=1.0, at="points"):
    """A toy algorithm: `step * scale` times the mean of the targets so far (0 for none)."""
    n_prompts, n_points, y_dim = prompts.ys.shape
    predictions = torch.zeros(len(steps), n_prompts, n_points, y_dim)
    for s, step in enumerate(steps):
        for t in range(1, n_points):
            predictions[s, :, t] = step * scale * prompts.ys[:, :t].mean(1)
    return Trajectory(tuple(steps), predictions[:, :, -1:] if at == "query" else predictions, "means")


@pytest.mark.parametrize("at", ["points", "query"])
def test_step_errors_are_averaged_over_the_targets_dimensions(at):
    prompts = some_prompts()
    trajectory = running_means(prompts, steps=(1, 3), at=at)
    errors = trajectory.step_errors(prompts)
    n_points = 4 if at == "points" else 1
    assert errors.shape == (2, 3, n_points)
    for step, prompt, point in np.ndindex(2, 3, n_points):
        pairs = zip(trajectory.predictions[step, prompt, point], prompts.ys[prompt, point - n_points], strict=True)
        expected = sum((float(predicted) - float(target)) ** 2 / 2 for predicted, target in pairs)
        assert errors[step, prompt, point].item() == pytest.approx(expected, rel=1e-5)


def test_an_algorithm_with_hyperparameters_is_a_learner():
    prompts = some_prompts()
    learner = AlgorithmLearner(running_means, {"steps": (1, 4), "scale": 0.5})
    assert isinstance(learner, Learner)
    assert not isinstance(running_means, Learner)
    expected = torch.stack([4 * 0.5 * prompts.ys[i, :3].mean(0) for i in range(3)])  # of the last step
    torch.testing.assert_close(learner.predict(prompts), expected)
    prefixes = learner.predict_prefixes(prompts)
    assert prefixes.shape == prompts.ys.shape
    assert prefixes[:, 0].eq(0).all()
    torch.testing.assert_close(prefixes[:, 2], 4 * 0.5 * prompts.ys[:, :2].mean(1))
    torch.testing.assert_close(prefixes[:, -1], expected)
    assert learner.trajectory(prompts).steps == (1, 4)


def test_the_algorithm_only_predicts_the_query_where_that_is_enough():
    calls = []

    def algorithm(prompts, **hyperparameters):
        calls.append(hyperparameters)
        return running_means(prompts, **hyperparameters)

    prompts = some_prompts()
    learner = AlgorithmLearner(algorithm, {"scale": 2.0})
    learner.predict(prompts)
    learner.predict_prefixes(prompts)
    assert calls == [{"scale": 2.0, "at": "query"}, {"scale": 2.0}]
    explicit = AlgorithmLearner(running_means, {"at": "query"})
    assert torch.equal(explicit.predict(prompts), running_means(prompts).predictions[0, :, -1])


def test_a_learners_name_shows_the_algorithm_and_its_hyperparameters():
    assert AlgorithmLearner(running_means, {"steps": (1,), "scale": 0.5}).name == "running_means(steps=(1,), scale=0.5)"
    assert AlgorithmLearner(running_means).name == "running_means()"
    pool = AlgorithmLearner(algorithms.dmmse, {"pool": torch.zeros(3, 4), "noise_std": 0.5})
    assert pool.name == "dmmse(pool=[3 x 4], noise_std=0.5)"


def test_a_function_of_prompts_is_a_learner():
    prompts = Prompts(torch.randn(3, 5, 2), torch.randn(3, 5, 1))
    query_alone = AlgorithmLearner(lambda prompts: prompts.context.ys.sum(1))
    every_point = AlgorithmLearner(lambda prompts: prompts.ys.cumsum(1) - prompts.ys)
    in_numpy = AlgorithmLearner(lambda prompts: prompts.context.ys.numpy().sum(1).astype(np.float64))
    expected = torch.stack([prompts.ys[:, :t].sum(1) for t in range(5)], 1)
    for learner in (query_alone, every_point, in_numpy):
        torch.testing.assert_close(learner.predict(prompts), expected[:, -1])
        torch.testing.assert_close(learner.predict_prefixes(prompts), expected)
        assert learner.trajectory(prompts).steps == (1,)


def test_learners_are_named():
    one, two = (AlgorithmLearner(running_means, {"scale": scale}) for scale in (1.0, 2.0))
    assert named_learners({"a": one, "b": two}) == {"a": one, "b": two}
    assert list(named_learners([one, two, one])) == [f"{one.name} 1", two.name, f"{one.name} 3"]
    assert named_learners(()) == {}
    called = [SimpleNamespace(name=name) for name in ("a", "a", "a 1")]
    with pytest.raises(ValueError, match="names of learners must differ"):
        named_learners(called)


class OnlyPredicts:
    """A learner without prefixes, differentiable in the query."""

    def predict(self, prompts):
        return prompts.query.xs.sum(1, keepdim=True).expand(-1, prompts.y_dim)


def test_a_learner_that_only_predicts_works_where_prefixes_are_not_needed():
    learner, prompts = OnlyPredicts(), some_prompts()
    expected = (learner.predict(prompts).double() - prompts.query.ys.double()).square().mean(-1)
    torch.testing.assert_close(squared_errors(learner, prompts)[:, 0], expected)
    aligned = analysis.align(learner, learner, prompts)
    assert aligned.prediction_distance.max() == 0
    assert named_learners([learner])
    for call in (
        lambda: squared_errors(learner, prompts, at="points"),
        lambda: analysis.match(learner, AlgorithmLearner(algorithms.ols), prompts),
    ):
        with pytest.raises(TypeError, match=r"OnlyPredicts has no method predict_prefixes"):
            call()


SOME = some_prompts()
MEANS = running_means(SOME)
FIVE = Prompts(torch.randn(3, 5, 2), torch.randn(3, 5, 1))


@pytest.mark.parametrize(("call", "words"), [
    *(
        (lambda shape=shape: MEANS.step_errors(some_prompts(**shape)), r"\(1, 3, 4, 2\) do not fit Prompts")
        for shape in ({"n_prompts": 1}, {"n_points": 1}, {"y_dim": 1}, {"n_points": 5}, {"n_prompts": 2})
    ),  # the first three would be broadcast
    (lambda: Trajectory((1, 2, 3), torch.zeros(2, 3, 4, 1)), "3 steps for 2 slices"),
    (lambda: Trajectory((1,), torch.zeros(1, 3, 4, 1), "", torch.zeros(1, 3, 4, 2, 2)), "weights .* do not fit"),
    (lambda: AlgorithmLearner(lambda prompts: prompts.ys).trajectory(SOME, with_weights=True), "gives no weights"),
    (lambda: AlgorithmLearner(lambda prompts: 1.0).predict(FIVE), "predictions .*, got float"),
    (lambda: AlgorithmLearner(lambda prompts: prompts.ys[..., 0]).predict(FIVE), r"got the shape \(3, 5\)"),
    (lambda: AlgorithmFamily(algorithms.ridge, "penalty", ()), "values of penalty"),
    (lambda: named_learners([abs]), r"'builtin_function_or_method'.* is not a learner"),
    (
        lambda: squared_errors(AlgorithmLearner(algorithms.ols), SOME, at="Query"),  # type: ignore[arg-type]
        "at must be 'query' or 'points', got 'Query'",
    ),
])  # fmt: skip
def test_what_is_wrong_is_named(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


# ---- token learners ----
def small_model():
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=9, n_layers=1, n_heads=1, d_model=8, d_head=4,
                            attention="softmax", initializer_range=0.5)  # fmt: skip
    return HookedTransformer(cfg)


def test_a_network_is_a_learner_by_its_logits():
    model, seen = small_model(), MarkovChains(d_vocab=3, n_ctx=9).sample(5, seed=0)
    learner = as_token_learner(model, "net")
    assert isinstance(learner, LogitsLearner)
    assert learner.name == "net"
    expected = torch.nn.functional.cross_entropy(
        model(seen.read).double().flatten(0, 1), seen.ids[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(token_losses(learner, seen).flatten(), expected)


def test_tokens_that_are_not_scored_have_no_loss():
    seen = RepeatedTokens(d_vocab=4, n_ctx=8, min_period=3, max_period=3).sample(2, seed=0)
    losses = token_losses(TokenAlgorithmLearner(algorithms.uniform_tokens, {"d_vocab": 4}), seen)
    assert torch.equal(losses.isnan(), ~seen.predictable[:, 1:])


def test_names_are_numbered_where_learners_share_one():
    bigram = TokenAlgorithmLearner(algorithms.bigram_bayes, {"d_vocab": 3})
    assert list(named_token_learners([bigram])) == ["bigram_bayes(d_vocab=3)"]
    assert list(named_token_learners({"a": bigram, "b": small_model()})) == ["a", "b"]
    assert list(named_token_learners([bigram, bigram])) == [f"{bigram.name} {i}" for i in (1, 2)]
    with pytest.raises(TypeError, match=r"'a' .* log_probabilities"):
        named_token_learners({"a": 3})


def test_bad_distributions_are_refused():
    seen = MarkovChains(d_vocab=3, n_ctx=9).sample(5, seed=0)
    for wrong, message in (
        (lambda s: torch.zeros(5, 9, 3), "of a distribution"),
        (lambda s: torch.full((5, 9, 3), torch.nan), "of a distribution"),
        (lambda s: torch.zeros(5, 8, 3), "prompt read token"),
    ):
        with pytest.raises(ValueError, match=message):
            token_log_probabilities(TokenAlgorithmLearner(wrong), seen)


def test_batches_are_all_the_sequences_and_memory_bounds_them():
    seen = MarkovChains(d_vocab=3, n_ctx=9).sample(5, seed=0)
    with settings(memory=50_000):
        parts = list(sequence_batches(seen, 3))
    assert len(parts) > 1
    assert torch.equal(torch.cat([part.ids for part in parts]), seen.ids)
    with settings(memory=100), pytest.raises(ValueError, match="too little"):
        list(sequence_batches(seen, 3))
