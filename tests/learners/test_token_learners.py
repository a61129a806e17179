import pytest
import torch

from mechicl import algorithms
from mechicl.learners import TokenAlgorithmLearner, token_log_probabilities, token_losses
from mechicl.learners.token_learners import LogitsLearner, as_token_learner, named_token_learners, sequence_batches
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import MarkovChains, RepeatedTokens


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
    parts = list(sequence_batches(seen, 3, memory=50_000))
    assert len(parts) > 1
    assert torch.equal(torch.cat([part.ids for part in parts]), seen.ids)
    with pytest.raises(ValueError, match="too little"):
        list(sequence_batches(seen, 3, memory=100))
