"""Known models are what their hypotheses say, plain and hidden; disguises change weights and no prediction."""

import pytest
import torch

from mechicl import constructions
from mechicl.constructions import hide, known_models
from mechicl.models import HookedTransformer, TransformerConfig

PLAIN, HIDDEN = known_models(), known_models(hidden=True)


def test_there_are_enough_of_them_with_names_of_their_own():
    assert len(PLAIN) >= 20
    assert len({known.name for known in PLAIN}) == len(PLAIN)


@pytest.mark.parametrize("known", [*PLAIN, *HIDDEN], ids=lambda known: known.name)
def test_predictions_are_those_of_the_algorithm(known):
    prompts = known.task.sample(32, seed=0, dtype=torch.float64)
    expected = known.hypothesis.algorithm.predict(prompts)
    tolerance = 1e-8 if known.exact else 1e-3
    error = (known.model.predict(prompts) - expected).abs().max()
    assert error < tolerance * expected.abs().max()


def test_a_disguise_moves_every_weight_and_keeps_every_prediction():
    model = constructions.newton(x_dim=3, n_context=8, steps=2, alpha=0.01)
    hidden = hide(model, seed=3, distractors=2)
    prompts = constructions.known_models()[0].task.sample(8, seed=0, dtype=torch.float64)
    prompts = type(prompts)(prompts.xs[:, :9, :3], prompts.ys[:, :9])
    torch.testing.assert_close(hidden.model.predict(prompts), model.predict(prompts))
    assert hidden.model.cfg.n_heads == model.cfg.n_heads + 2
    torch.testing.assert_close(hidden.stream @ hidden.stream.T, torch.eye(model.cfg.d_model).double())
    # the stream is the old one, turned, where no distractor writes
    old = model.run_with_cache(prompts)[1]["blocks.1.hook_resid_post"]
    new = hidden.model.run_with_cache(prompts)[1]["blocks.1.hook_resid_post"]
    torch.testing.assert_close(new @ hidden.stream.T, old)
    assert (new - old @ hidden.stream).abs().max() > 1e-3


def test_noise_moves_predictions_a_little():
    model = constructions.gradient_descent(x_dim=5, n_context=20, step_size=0.1, steps=2)
    prompts = known_models()[0].task.sample(64, seed=0, dtype=torch.float64)
    expected = model.predict(prompts)
    error = (hide(model, noise=1e-3).model.predict(prompts) - expected).square().mean() / expected.square().mean()
    assert 1e-9 < error < 1e-3


def test_what_cannot_be_hidden_is_refused():
    with pytest.raises(ValueError, match="norms"):
        hide(
            HookedTransformer(
                TransformerConfig(x_dim=2, n_context=3, d_model=8, normalization_type="LN", read_in="linear")
            )
        )
    with pytest.raises(ValueError, match="noise"):
        hide(constructions.gradient_descent(x_dim=2, n_context=3, step_size=0.1), noise=-1.0)
    with pytest.raises(ValueError, match="hidden=True"):
        known_models(noise=0.1)
