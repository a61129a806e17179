"""Errors of interventions name the argument, and leave no hook on the model."""

from typing import Any, cast

import pytest
import torch

from mechicl.analysis import PatchingSession
from mechicl.analysis.interventions import (
    Replacement,
    ablate,
    attribute,
    correlate_effects,
    corrupt,
    corrupt_tokens,
    logit_difference,
    next_token_loss,
    patch,
    patch_paths,
    squared_error,
)  # fmt: skip
from mechicl.analysis.interventions.metrics import evaluate_metric
from mechicl.models.opening.sites import Site
from mechicl.prompts import TokenSequences
from mechicl.tasks import RepeatedTokens
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import ids, model_of, shared_bridge
from tests.families import open_family, token_ids

MODEL = model_of("gpt")
A, B = oracles.pair(MODEL, 4)
IDS, TWO = model_of("ids"), torch.tensor([0, 4])
POSITIONS = torch.tensor([[1, 2], [3, 5]])
SEQUENCES = RepeatedTokens(d_vocab=6, n_ctx=5, min_period=2, max_period=3).sample(4, seed=0)
LAST_HIDDEN = TokenSequences(SEQUENCES.ids, torch.zeros_like(SEQUENCES.predictable))
GPT_J = "GPT-J"


def sweep(*args: Any, **options: Any) -> Any:
    return patch(MODEL, A, B, *args, **options)


def remove(**options: Any) -> Any:
    return ablate(MODEL, A, **options)


def session(clean: Any = A, corrupted: Any = B, **options: Any) -> PatchingSession:
    return PatchingSession(MODEL, clean, corrupted, **options)


def first(predictions: torch.Tensor) -> torch.Tensor:
    return predictions[:, 0]


def metric_of(values: Any) -> Any:
    return lambda: evaluate_metric("bad", values, torch.zeros(3, 2))


CASES: list[tuple[Any, str]] = [
    (lambda: patch(MODEL, A, B.prefix(1)), r"same number and length: \[4, 5, \d+\], \[4, 3"),
    (lambda: patch(MODEL, A[:0], B[:0]), "no prompts"),
    (lambda: sweep("resid_prev"), "did you mean 'resid_pre'"),
    (lambda: sweep("z", ("layer", "heads")), "did you mean 'head'"),
    (lambda: sweep("z", ("layer", "head", "head")), "axes must"),
    (lambda: sweep("result"), r"'blocks.0.attn.hook_result': call model.set_use_attn_result\(True\)"),
    (lambda: sweep("z", {"layer": [2], "head": None}), r"layer must be 0 to 1, got \[2\]"),
    (lambda: sweep("z", {"layer": None, "head": [0, -1]}), r"head must be 0 to 1, got \[-1\]"),
    (lambda: sweep("z", {"pos": [0]}), "axes must contain 'layer'"),
    (lambda: oracles.bounded(100, sweep), "memory="),
    (lambda: patch(IDS, LAST_HIDDEN, SEQUENCES), "at='positions'"),
    (lambda: attribute(MODEL, MODEL.encode(A), MODEL.encode(B)), "metrics="),
    (lambda: attribute(MODEL, A, B, metrics=lambda p: (p[:, 0] > 0).double()), "'metric' has no gradient"),
    (lambda: attribute(open_family(GPT_J)[0], token_ids(0), token_ids(1), "pattern", metrics=lambda p: p[:, 3]),
     "ignores edits at 'blocks.0.attn.hook_pattern'"),
    (lambda: correlate_effects(sweep("z", ("layer", "pos")), sweep()), "same cells"),
    (lambda: correlate_effects(attribute(MODEL, A, A), patch(MODEL, A, A)), "no prompt has effects"),
    (lambda: patch_paths(model_of("clipped"), A, B), "clips its stream"),
    (lambda: patch_paths(shared_bridge("llama"), ids(0), ids(1), "k"), "receiver must be 'q'"),
    *((lambda name=name: patch_paths(open_family(name)[0], token_ids(0), token_ids(1)), "no direct paths")
      for name in ("OLMo 2", "Gemma 2")),
    (lambda: remove(component="attn_scores", method="zero"), "scores of zero"),
    (lambda: remove(method=Replacement("mean", A.prefix(1))), "reference must"),
    (lambda: remove(method=Replacement("zero", A)), "method='zero' takes no reference"),
    (lambda: remove(method=Replacement("resample", A)), "reference is equal"),
    (lambda: remove(method=Replacement("any")), "method='any' is for edges"),
    (lambda: ablate(MODEL, A[:1], method="resample"), "method='resample' needs another prompt"),
    (lambda: remove().recovered(), "do not come from a run"),
    (lambda: sweep().recovered_interval(1), "one index per axis"),
    (lambda: sweep().effect("los"), "no metric 'los'"),
    (lambda: patch(IDS, ids(0, n_pos=5), ids(1, n_pos=5)).effect(), "no metric yet"),
    (lambda: session(A, A.prefix(1)), "5 positions and corrupted ones 3"),
    (lambda: session(A, ids(0)), "prompts and token ids"),
    (lambda: session(A, A[:0]), "0 corrupted"),
    (lambda: session().toggle(Site("z", 2, pos=0)), "layer must be 0 to 1"),
    (lambda: setattr(session(), "clean_prompt", 4), "clean_prompt must be 0 to 3, got 4"),
    (lambda: PatchingSession(open_family(GPT_J)[0], token_ids(0), token_ids(1)).toggle(Site("pattern", 1, head=0)),
     "ignores edits at 'blocks.1.attn.hook_pattern'"),
    (lambda: corrupt(A[:1], "query"), "kind='query' needs at least 2 prompts"),
    (lambda: corrupt(A.prefix(1), "labels"), "at least 2 context points"),
    (lambda: corrupt_tokens(torch.zeros(1, 3, dtype=torch.int64)), "d_vocab must be at least 2"),
    *((metric_of(bad), "'bad' must return one number per prompt") for bad in
      (lambda p: p, lambda p: p.mean(), lambda p: p[:, :1], lambda p: p[:2, 0], lambda p: [1.0] * 3)),
    (metric_of(float), "'bad' must be a function"),
    (lambda: squared_error(A)(torch.zeros(4, 9)), "for targets"),
    *((lambda bad=bad: logit_difference(bad, TWO)(torch.zeros(2, 5)), "correct must") for bad in (-TWO, TWO + 1)),
    *((lambda bad=bad: logit_difference(TWO, bad)(torch.zeros(2, 5)), "wrong must") for bad in (-TWO, TWO + 1)),
    *((lambda bad=bad: next_token_loss(bad)(torch.zeros(2, 5)), "targets must") for bad in (-TWO, TWO + 1)),
    (lambda: next_token_loss(POSITIONS)(torch.zeros(2, 2, 5)), "targets must be ids in the vocabulary, 0 to 4, got 5"),
    (lambda: next_token_loss(torch.tensor([1, -100])), "every prompt needs a target"),
    (lambda: next_token_loss(TWO)(torch.zeros(2, 3, 5)), "at='query'"),
    (lambda: next_token_loss(POSITIONS)(torch.zeros(2, 7)), "at='positions'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named"), CASES)
def test_errors_name_the_argument(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
    assert oracles.no_hook_left(MODEL)


def test_models_in_training_mode_are_refused():
    model, other = model_of("gpt"), oracles.bridge()
    started = PatchingSession(model, A, B)
    model.blocks[1].attn.train()
    other.original_model.transformer.h[1].train()
    calls = (lambda: patch(model, A, B), started.result, lambda: patch(other, *oracles.bridge_pair()))
    for call in cast(Any, calls):
        with pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\)"):
            call()
