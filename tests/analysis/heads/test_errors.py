"""Calls that analyses of heads refuse, with the argument or the cause that the error names."""

from typing import Any

import pytest
import torch

from mechicl.analysis import composition_scores, measure_target_copying, read_dual_form, score_heads
from mechicl.analysis.heads import measure_token_sensitivity, prefix_matching_scores
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import LinearRegression
from tests.analysis.interventions.oracles import bridge, ids
from tests.strategies import random_model

TOKENS = TransformerConfig(
    prompt_format="token_ids", d_vocab=30, n_ctx=24, n_layers=3, n_heads=2, d_model=10, d_head=4, attention="softmax"
)
POINTS = TransformerConfig(
    x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", keys="full", n_layers=2, n_heads=2, d_model=12,
    attention="softmax",
)  # fmt: skip
TASK = LinearRegression(x_dim=3, n_context=4, y_dim=2)
PROMPTS, IDS = TASK.sample(6, seed=0), ids(0, d_vocab=4)
NO_PROMPTS, NO_CONTEXT, NARROW = PROMPTS[:0], PROMPTS.prefix(0), TASK.replace(x_dim=2).sample(6, seed=0)
READER, LINEAR, MODEL = (random_model(cfg).eval() for cfg in (TOKENS, TOKENS.replace(attention="linear"), POINTS))
PAIRED = HookedTransformer(TransformerConfig(x_dim=3, y_dim=2, n_context=4)).eval()
MOMENTUM = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, keys="causal", momentum=0.5)).eval()
LSTM = HookedLSTM(LSTMConfig(x_dim=3, y_dim=2, n_context=4, d_model=5)).eval()


def other(value: object) -> Any:
    """A value of a type that the call does not take."""
    return value


def score(**options: Any):
    """Scores of a reader of tokens, whose config is changed by the options that are fields."""
    fields = {name: options.pop(name) for name in ("n_ctx", "d_vocab", "n_layers") if name in options}
    return score_heads(HookedTransformer(TOKENS.replace(**fields)).eval(), **options)


STUDIES = measure_target_copying, measure_token_sensitivity


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: score(n_ctx=3), "at least 4 positions and 2 different tokens; the model has n_ctx=3"),
        (lambda: score(n_ctx=4, prepend=0), "5 positions and 3 different tokens"),
        (lambda: score(d_vocab=2, prepend=0), "d_vocab=2"),
        (lambda: score(prepend=30), "prepend must be a token id below 30, got 30"),
        (lambda: score(prepend=0, sequences=IDS), "prepend is for drawn sequences"),
        (lambda: score(prompts=PROMPTS), "prompt_format='token_ids' is scored on token ids"),
        (lambda: score(sequences=IDS[:0]), "one prompt or more"),
        (lambda: score(sequences=torch.arange(8)[None]), "a token that occurs twice"),
        (lambda: score(sequences=ids(0, n_pos=25, d_vocab=4)), "25 positions, but this model has 24"),
        (lambda: score(n_layers=0), "no layers"),
        (lambda: score(n_prompts=2).best("inductoin"), "no score 'inductoin'.*did you mean 'induction'"),
        (lambda: score(n_prompts=2).interval("copying", 0, 0), "'copying' is a score of the weights"),
        (lambda: score(n_prompts=2).interval("induction", 3, 0), "no head 0 of layer 3 among 3 layers of 2"),
        (lambda: score(n_prompts=2).interval("induction", 0, 2), "no head 2 of layer 0"),
        (lambda: score_heads(MODEL), "prompt_format='interleaved' is scored on prompts"),
        (lambda: score_heads(MODEL, prompts=PROMPTS, sequences=IDS), "'interleaved' is scored on prompts"),
        (lambda: score_heads(MODEL, prompts=NO_PROMPTS), "at least one prompt and one context point"),
        (lambda: score_heads(MODEL, prompts=NO_CONTEXT), "at least one prompt and one context point"),
        (lambda: score_heads(MODEL, prompts=NARROW), "x_dim=3"),
        (lambda: score_heads(PAIRED, prompts=PROMPTS), "contain x and y together"),
        (lambda: score_heads(HookedTransformer(TOKENS).train()), r"call model\.eval\(\)"),
        (lambda: score_heads(LSTM, prompts=PROMPTS), r"this HookedLSTM has no hook blocks\.0\.attn\.hook_pattern"),
        (lambda: composition_scores(LSTM), "W_Q, W_K, W_V and W_O, got HookedLSTM"),
        (lambda: prefix_matching_scores(MODEL), "need a vocabulary; this model is 'interleaved'"),
        # ---- the dual form ----
        *[(lambda n=n: read_dual_form(LINEAR, IDS, n_demonstration_tokens=other(n)), "n_demonstration_tokens must be")
          for n in (-1, 6, 2.0, True)],
        (lambda: read_dual_form(bridge(), IDS, 3), "layer must be 0 to 2, got 3"),
        (lambda: read_dual_form(bridge(), PROMPTS), r"reads token ids \[prompt pos\], got"),
        *[(lambda bad=bad: read_dual_form(LINEAR, bad), r"ints \[prompt pos\]")
          for bad in (IDS[0], IDS[:, :0], IDS.double())],
        (lambda: read_dual_form(PAIRED, IDS), "prompt_format='paired' reads Prompts, got a tensor"),
        (lambda: read_dual_form(MOMENTUM, PROMPTS), r"this model has momentum=0\.5"),
        (lambda: read_dual_form(LSTM, PROMPTS), "HookedLSTM has no 'blocks"),
        (lambda: read_dual_form(bridge().train(), IDS), "training mode"),
        (lambda: read_dual_form(HookedTransformer(TOKENS).train(), IDS), "training mode"),
        (lambda: read_dual_form(torch.nn.Linear(2, 2), IDS), "no hooks"),
        # ---- copying ----
        *[(lambda study=study: study(PAIRED, PROMPTS), "takes 'paired' ones") for study in STUDIES],
        *[(lambda study=study, p=p: study(MODEL, p), "at least one prompt and one context point")
          for study in STUDIES for p in (NO_PROMPTS, NO_CONTEXT)],
        *[(lambda study=study: study(MODEL, NARROW), "x_dim=3") for study in STUDIES],
        *[(lambda study=study, last=last, layer=layer: study(MODEL, PROMPTS, layer), f"layer must be 0 to {last}, got")
          for study, last in zip(STUDIES, (1, 2), strict=True) for layer in (-1, last + 1)],
        (lambda: measure_target_copying(MODEL, PROMPTS[:1]), "at least two prompts, got 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


def test_composition_is_that_of_keys_by_default():
    assert torch.equal(composition_scores(READER), composition_scores(READER, "K"))
