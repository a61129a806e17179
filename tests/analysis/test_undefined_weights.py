"""A model whose predictions are NaN gives NaN or an error in every analysis, never only plausible numbers."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mechicl import algorithms, analysis
from mechicl.algorithms.least_squares import LEAST_SQUARES
from mechicl.analysis.circuits import EdgeScores
from mechicl.analysis.heads import HeadScores
from mechicl.analysis.language.vectors import strongest_heads
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.sites import list_edges
from mechicl.tasks import LinearRegression, MarkovChains
from tests.comparing import has_nan
from tests.strategies import random_model

TASK = LinearRegression(x_dim=2, n_context=4)
PROMPTS = TASK.sample(32, seed=0)
RIDGE = AlgorithmLearner(algorithms.ridge, {"penalty": 0.1})
PAIRED = TransformerConfig(x_dim=2, n_context=4, n_layers=2)
CHAINS = MarkovChains(d_vocab=3, n_ctx=8)
TOKENS = TransformerConfig(
    prompt_format="token_ids", d_vocab=3, n_ctx=8, n_layers=2, n_heads=2, d_model=8, attention="softmax"
)
QUIET: dict[str, Any] = {"progress": False}
CALLS: list[tuple[TransformerConfig, Callable[[Any], Any]]] = [
    (PAIRED, lambda model: analysis.align(model, RIDGE, PROMPTS, **QUIET)),
    (PAIRED, lambda model: analysis.match(model, LEAST_SQUARES, PROMPTS, **QUIET)),
    (PAIRED, lambda model: analysis.identify(model, TASK, n_prompts=32, with_limits=False, steps=1, **QUIET)),
    (PAIRED, lambda model: analysis.regret(model, TASK, n_prompts=16, **QUIET)),
    (PAIRED, lambda model: analysis.fit_readouts(model, PROMPTS, **QUIET)),
    (TOKENS, lambda model: analysis.identify_on_tokens(model, CHAINS, n_prompts=16, **QUIET)),
    (TOKENS, lambda model: analysis.regret(model, CHAINS, n_prompts=16, **QUIET)),
    (TOKENS, lambda model: analysis.score_heads(model, sequences=CHAINS.sample(4, seed=0), **QUIET)),
]


def spoiled(cfg: TransformerConfig) -> HookedTransformer:
    model = copy.deepcopy(random_model(cfg))
    with torch.no_grad():
        model.blocks[-1].attn.W_V.fill_(torch.nan)
        model.blocks[-1].attn.W_Q[0, 0, 0] = torch.nan
    return model


@pytest.mark.parametrize(("cfg", "call"), CALLS)
def test_predictions_of_nan_are_never_plausible(cfg: TransformerConfig, call: Callable[[Any], Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is not trained
        call(random_model(cfg))  # a valid call
        try:
            found = call(spoiled(cfg))
        except (ValueError, RuntimeError):
            return
    assert has_nan(found), found


def test_nan_ranks_last():
    effects = torch.tensor([[0.1, torch.nan], [0.3, -2.0]])
    assert strongest_heads(effects, 2) == ((1, 0), (0, 0))
    assert HeadScores({"a": effects[..., None]}, {"a": 0.0}).best("a")[:2] == (1, 0)
    edges = tuple(list_edges(random_model(PAIRED))[:4])
    scores = EdgeScores(edges, effects.view(4, 1), "loss", "eap", "zero")
    assert scores.strongest(4) == [edges[3], edges[2], edges[0], edges[1]]
