"""Models in narrower streams: exact if the stream is wide enough, otherwise trained to imitate the original."""

import pytest
import torch

from mechicl import constructions
from mechicl.constructions import compress
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression
from tests.constructions.reference import random_model

IDS = torch.randint(4, (128, 6), generator=torch.Generator().manual_seed(0))
PROMPTS = LinearRegression(x_dim=3, n_context=8).sample(32, seed=0, dtype=torch.float64)


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
