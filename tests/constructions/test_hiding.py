"""Disguises leave a model's function as it is, or are refused; what distractors do stays where nothing reads."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.constructions import hide, known_models
from mechicl.tasks import LinearRegression
from tests.constructions.random_models import random_model

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
def test_trained_kinds_of_models_keep_their_function(config, reads_junk):
    model = random_model(**config)
    hidden = hide(model, seed=1, distractors=2, junk_prompts=PROMPTS if reads_junk else None)
    torch.testing.assert_close(hidden.model.predict(PROMPTS), model.predict(PROMPTS), rtol=1e-7, atol=1e-9)
    assert hidden.model.cfg.n_heads == model.cfg.n_heads + 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"d_mlp": 5, "gated_mlp": True}, "gated_mlp"),
        ({"positional_embedding_type": "rotary", "d_head": 4}, "rotary"),
        ({"attn_bias": True}, "attn_bias"),
        ({"read_bias": True}, "read_bias"),
        ({"normalization_type": "RMSPre"}, "normalization_type='RMSPre'"),
        ({"token_clip": 3.0}, "token_clip"),
    ],
)
def test_what_a_disguise_would_break_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=f"{message}.* would not keep its function"):
        hide(random_model(**config))


def test_models_of_token_ids_can_be_hidden():
    model = constructions.induction(d_vocab=5, n_ctx=7)
    ids = torch.randint(0, 5, (4, 7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hide(model, seed=2).model(ids), model(ids))


def test_distractors_that_read_junk_move_what_others_write_and_nothing_else():
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.2, steps=4)
    hidden = hide(model, seed=3, junk_prompts=PROMPTS)
    apart = hide(model, seed=3)
    moved = {}
    for name, each in (("reading", hidden), ("deaf", apart)):
        junk = torch.linalg.qr(each.stream.T, mode="complete").Q[:, model.cfg.d_model :]
        cache = each.model.run_with_cache(PROMPTS)[1]
        stream = cache["blocks.0.hook_resid_post"]
        changed = stream + torch.randn(junk.shape[1], dtype=torch.float64) @ junk.T
        after = [each.model(s, start_at_layer=1, stop_at_layer=4) for s in (stream, changed)]
        torch.testing.assert_close(*(s @ each.stream.T for s in after))  # the model's own stream
        moved[name] = ((after[1] - changed) @ junk - (after[0] - stream) @ junk).abs().max().item()
        if name == "reading":  # never larger than the stream
            for layer in range(4):
                stream = cache[f"blocks.{layer}.hook_resid_post"]
                own = (stream @ each.stream.T).square().mean()
                assert 0 < (stream @ junk).square().mean() <= own
    assert moved["reading"] > 1e-3 > 1e-9 > moved["deaf"]


def test_junk_that_nobody_writes_is_refused():
    with pytest.raises(ValueError, match="junk_prompts are for distractors"):
        hide(random_model(), distractors=0, junk_prompts=PROMPTS)


def test_every_known_model_has_another_disguise():
    first, second = (known_models(hidden=True, seed=seed)[0].model for seed in (0, 1))
    assert not torch.allclose(first.W_Q, second.W_Q)


def test_models_of_token_ids_are_hidden_with_mlps_of_distractors_where_they_have_none():
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


def test_mlps_of_distractors_need_distractors_and_a_model_without_mlps():
    with pytest.raises(ValueError, match="distractor_mlps are for distractors, and distractors=0"):
        hide(random_model(), distractors=0, distractor_mlps=True)
    with pytest.raises(ValueError, match="models without MLPs"):
        hide(random_model(d_mlp=4), distractor_mlps=True)
