"""Hidden and compressed models keep their function; distractors write only where the model does not read."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.constructions import compress, hide, known_models
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression
from tests.constructions.reference import random_model

TASK = LinearRegression(x_dim=3, n_context=8)
PROMPTS = TASK.sample(16, seed=0, dtype=torch.float64)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"attention": "softmax", "d_mlp": 5, "act_fn": "relu"},
        {"attention": "linear,softmax", "score_scale": 2.0, "sink": "none"},
        {"prompt_format": "interleaved", "positional_embedding_type": "sinusoidal", "d_pos": 6},
        {"prompt_format": "interleaved", "positional_embedding_type": "standard", "attention": "softmax"},
        {"positional_embedding_type": "one_hot", "read_in": "identity", "read_out": "identity", "d_model": 13},
        {"recurrent": True, "d_mlp": 4, "damping": 0.5},
        {"share_mlp": True, "d_mlp": 4, "act_fn": "square"},
        {"mlp_location": "input", "d_mlp": 4},
        {"attention": "softmax", "sink": "learned", "keys": "full"},
        {"prompt_format": "interleaved", "momentum": 0.5},
    ],
    ids=lambda config: ", ".join(f"{k}={v}" for k, v in config.items()) or "plain",
)
@pytest.mark.parametrize("reads_junk", [False, True])
def test_all_kinds_of_models_keep_their_function(config, reads_junk):
    model = random_model(**config)
    hidden = hide(model, seed=1, distractors=2, junk_prompts=PROMPTS if reads_junk else None)
    torch.testing.assert_close(hidden.model.predict(PROMPTS), model.predict(PROMPTS), rtol=1e-7, atol=1e-9)
    assert hidden.model.cfg.n_heads == model.cfg.n_heads + 2


def test_distractors_that_read_junk_affect_only_other_distractors():
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.2, steps=4)
    hidden = hide(model, seed=3, junk_prompts=PROMPTS)
    plain = hide(model, seed=3)
    moved = {}
    for name, each in (("reading", hidden), ("not reading", plain)):
        junk = torch.linalg.qr(each.stream.T, mode="complete").Q[:, model.cfg.d_model :]
        cache = each.model.run_with_cache(PROMPTS)[1]
        stream = cache["blocks.0.hook_resid_post"]
        changed = stream + torch.randn(junk.shape[1], dtype=torch.float64) @ junk.T
        after = [each.model(s, start_at_layer=1, stop_at_layer=4) for s in (stream, changed)]
        torch.testing.assert_close(*(s @ each.stream.T for s in after))  # the model's stream
        moved[name] = ((after[1] - changed) @ junk - (after[0] - stream) @ junk).abs().max().item()
        if name == "reading":  # never larger than the stream
            for layer in range(4):
                stream = cache[f"blocks.{layer}.hook_resid_post"]
                own = (stream @ each.stream.T).square().mean()
                assert 0 < (stream @ junk).square().mean() <= own
    assert moved["reading"] > 1e-3 > 1e-9 > moved["not reading"]


def test_known_models_are_hidden_differently_for_each_seed():
    first, second = (known_models(hidden=True, seed=seed)[0].model for seed in (0, 1))
    assert not torch.allclose(first.W_Q, second.W_Q)


def test_models_of_token_ids_may_get_mlps_of_distractors():
    model = constructions.induction(d_vocab=5, n_ctx=6)
    ids = torch.randint(5, (16, 6), generator=torch.Generator().manual_seed(0))
    junk: dict[str, Any] = {"distractor_mlps": True, "junk_prompts": ids, "distractors": 2}
    plain: dict[str, Any] = {"distractor_mlps": True}
    for options in ({}, plain, junk):
        hidden = hide(model, seed=2, **options).model
        torch.testing.assert_close(hidden(ids), model(ids), rtol=0, atol=1e-9)
        assert hidden.cfg.attn_only != ("distractor_mlps" in options)
        assert constructions.weights_circuit(hidden) == constructions.weights_circuit(model)
        if "distractor_mlps" in options:
            written = hidden.run_with_cache(ids)[1]["blocks.0.hook_mlp_out"]
            assert written.abs().max() > 0.01


def test_hiding_changes_every_weight_and_no_prediction():
    model = constructions.newton(x_dim=3, n_context=8, steps=2, alpha=0.01)
    hidden = hide(model, seed=3, distractors=2)
    torch.testing.assert_close(hidden.model.predict(PROMPTS), model.predict(PROMPTS))
    assert hidden.model.cfg.n_heads == model.cfg.n_heads + 2
    torch.testing.assert_close(hidden.stream @ hidden.stream.T, torch.eye(model.cfg.d_model).double())
    # the stream is the old one, rotated, plus what distractors write
    old = model.run_with_cache(PROMPTS)[1]["blocks.1.hook_resid_post"]
    new = hidden.model.run_with_cache(PROMPTS)[1]["blocks.1.hook_resid_post"]
    torch.testing.assert_close(new @ hidden.stream.T, old)
    assert (new - old @ hidden.stream).abs().max() > 1e-3


def test_noise_changes_predictions_a_little():
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.1, steps=2)
    expected = model.predict(PROMPTS)
    error = (hide(model, noise=1e-3).model.predict(PROMPTS) - expected).square().mean() / expected.square().mean()
    assert 1e-9 < error < 1e-3


IDS = torch.randint(4, (128, 6), generator=torch.Generator().manual_seed(0))


def induction() -> HookedTransformer:
    return constructions.induction(d_vocab=4, n_ctx=6)


def rank(model: HookedTransformer, tokens: torch.Tensor) -> int:
    _, cache = model.run_with_cache(tokens)
    streams = torch.cat([value.flatten(0, 1) for name, value in cache.items() if "resid" in name])
    return int(torch.linalg.matrix_rank(streams))


def test_a_stream_as_wide_as_the_used_subspace_is_exact():
    model = induction()
    needed = rank(model, IDS)
    assert needed < model.cfg.d_model
    narrow = compress(model, IDS, d_model=needed, steps=0, progress=False)
    assert narrow.model.cfg.d_model == needed
    torch.testing.assert_close(narrow.model(IDS), model(IDS), rtol=0, atol=1e-10)
    assert narrow.projected == narrow.trained < 1e-20
    torch.testing.assert_close(narrow.stream.T @ narrow.stream, torch.eye(needed).double())
    # the streams are the projected ones
    ours, theirs = (each.run_with_cache(IDS)[1]["blocks.1.hook_resid_post"] for each in (narrow.model, model))
    torch.testing.assert_close(ours, theirs @ narrow.stream, rtol=0, atol=1e-10)
    assert compress(model, IDS, d_model=needed - 1, steps=0, progress=False).projected > 1e-6


def test_training_recovers_what_the_projection_lost():
    model = induction()
    narrow = compress(model, IDS, d_model=rank(model, IDS) - 4, steps=150, learning_rate=3e-3, progress=False)
    assert narrow.trained < 0.3 * narrow.projected
    assert narrow.trained == pytest.approx((narrow.model(IDS) - model(IDS)).square().mean().item())
    again = compress(model, IDS, d_model=rank(model, IDS) - 4, steps=150, learning_rate=3e-3, progress=False)
    assert torch.equal(narrow.model(IDS), again.model(IDS))


def test_training_that_makes_the_model_worse_is_discarded():
    model = induction()
    narrow = compress(model, IDS, d_model=8, steps=3, learning_rate=100.0, progress=False)
    assert narrow.trained == narrow.projected
    assert narrow.trained == pytest.approx((narrow.model(IDS) - model(IDS)).square().mean().item())


@pytest.mark.parametrize(
    "config",
    [
        {"d_mlp": 5, "act_fn": "relu", "attention": "softmax", "sink": "learned"},
        {"mlp_location": "input", "d_mlp": 4},
        {"recurrent": True, "damping": 0.5},
        {"prompt_format": "interleaved", "positional_embedding_type": "sinusoidal", "d_pos": 6},
    ],
    ids=str,
)
def test_a_projection_of_full_width_changes_no_predictions(config):
    model = random_model(**{"d_model": 12, **config})
    narrow = compress(model, PROMPTS, d_model=12, steps=0, progress=False)
    torch.testing.assert_close(narrow.model.predict(PROMPTS), model.predict(PROMPTS))
