import math

import pytest
import torch

from mechicl.models import HookedTransformer
from mechicl.training.objectives import examples, losses
from tests.training.runs import MODEL, READER, TASK, WORDS

UNSCORED = -100


def random_batch(n_models=3, n_prompts=4, n_rows=5, d_vocab=6, dtype=torch.float64, seed=0):
    """Logits and targets, some of which are not scored, of each model another number."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_models, n_prompts, n_rows)
    outputs = 3 * torch.randn(*shape, d_vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(d_vocab, shape, generator=generator)
    shares = torch.linspace(0.2, 0.6, n_models)[:, None, None]
    targets[torch.rand(shape, generator=generator) < shares] = UNSCORED
    return outputs.to(dtype), targets


def plain_cross_entropies(outputs, targets):
    """Each model's mean over its scored tokens of -log softmax, one token at a time in double precision."""
    entropies = []
    for logits_of_model, targets_of_model in zip(outputs.tolist(), targets.tolist(), strict=True):
        nats = []
        for logits_of_prompt, targets_of_prompt in zip(logits_of_model, targets_of_model, strict=True):
            for logits, target in zip(logits_of_prompt, targets_of_prompt, strict=True):
                if target != UNSCORED:
                    top = max(logits)
                    log_sum = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
                    nats.append(log_sum - logits[target])
        entropies.append(math.fsum(nats) / len(nats))
    return entropies


# ---- cross entropy ----


@pytest.mark.parametrize("n_models", [1, 3])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_cross_entropies_of_several_models_equal_a_plain_loop(n_models, dtype, rel):
    outputs, targets = random_batch(n_models, dtype=dtype)
    assert len({int(n) for n in (targets != UNSCORED).sum(dim=(1, 2))}) == n_models  # else a common mean would do
    result = losses(outputs, targets)
    assert result.shape == (n_models,)
    assert result.dtype == dtype
    assert result.tolist() == pytest.approx(plain_cross_entropies(outputs, targets), rel=rel)


def test_a_model_with_nothing_to_predict_is_an_error_and_no_nan():
    outputs, targets = random_batch()
    targets[1] = UNSCORED
    with pytest.raises(ValueError, match=r"none of the tokens is to be predicted for model \[1\]"):
        losses(outputs, targets)
    with pytest.raises(ValueError, match=r"for model \[0, 1, 2\]"):
        losses(outputs[:, :0], targets[:, :0])
    targets[1, 0, 0] = 2
    assert losses(outputs, targets).isfinite().all()


# ---- squared error ----


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (3, 4, 5, 2)])
def test_losses_of_regression_are_mean_squared_errors(shape):
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = []
    for predicted, target in zip(outputs, targets, strict=True):
        squares = [(a - b) ** 2 for a, b in zip(predicted.flatten().tolist(), target.flatten().tolist(), strict=True)]
        expected.append(math.fsum(squares) / len(squares))
    assert losses(outputs, targets).tolist() == pytest.approx(expected, rel=1e-12)


# ---- examples ----


@pytest.mark.parametrize("rows", ["query", "points"])
def test_examples_of_prompts_are_the_models_tokens_and_the_targets_of_the_rows(rows):
    model = HookedTransformer(MODEL)
    prompts = TASK.sample(6, seed=0)
    tokens, targets = examples(model, prompts, rows)
    assert torch.equal(tokens, model.encode(prompts))
    assert torch.equal(targets, prompts.ys if rows == "points" else prompts.ys[:, -1:])


def test_examples_of_token_sequences_are_ids_and_the_ids_that_come_next():
    model = HookedTransformer(READER, seed=0)
    sequences = WORDS.sample(6, seed=0)
    ids, targets = examples(model, sequences, "positions")
    for i, (whole, predictable) in enumerate(zip(sequences.ids.tolist(), sequences.predictable.tolist(), strict=True)):
        assert ids[i].tolist() == whole[:-1]
        assert targets[i].tolist() == [
            token if marked else UNSCORED for token, marked in zip(whole[1:], predictable[1:], strict=True)
        ]
    with torch.no_grad():
        logits = model(ids)
    assert logits.shape == (*targets.shape, READER.d_vocab)
    expected = plain_cross_entropies(logits[None], targets[None])
    assert losses(logits[None], targets[None]).tolist() == pytest.approx(expected, rel=1e-5)
