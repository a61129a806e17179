"""Attribution against patching and finite differences; bridges against plain models."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.analysis.interventions import InterventionSweep, attribute, correlate_effects, patch
from mechicl.base.settings import settings
from tests.analysis.interventions import oracles
from tests.analysis.interventions.agreement import COMPONENTS, TOLERANCE, agreement_of
from tests.analysis.interventions.oracles import hook_name, model_of, pair, recorded, run
from tests.families import open_family, place_of, putting, token_ids

EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-8}
FIRST = {"prediction": lambda predictions: predictions[:, 0]}
SWEEPS = [
    ("z", ("layer", "head")), ("z", ("layer", "pos", "head")), ("resid_pre", ("pos", "layer")),
    ("attn_out", ("layer",)), ("k", ("layer", "head", "pos")), ("pattern", ("layer", "head", "query", "key")),
    ("attn_scores", ("layer", "query")),
]  # fmt: skip


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_exact_where_the_metric_is_affine_in_the_activation(direction):
    """The last layer's output goes through a linear read-out; so do its values, where no norm comes after them."""
    linear, recurrent = model_of("linear"), oracles.lstm()
    for model, component, axes in [
        (linear, "attn_out", ("layer", "pos")),
        (linear, "z", ("layer", "head")),
        (linear, "v", ("layer", "pos", "head")),
        (recurrent, "resid_post", ("layer", "pos")),
    ]:
        clean, corrupted = pair(model)
        options: dict[str, Any] = {"direction": direction, "metrics": FIRST}
        axes = dict.fromkeys(axes) | {"layer": [1]}
        estimate = attribute(model, clean, corrupted, component, axes, **options)
        real = patch(model, clean, corrupted, component, axes, **options)
        assert_close(estimate.values, real.values, **EXACT)
        assert_close(estimate.unpatched_values, real.unpatched_values, **EXACT)
        assert_close(estimate.source_values, real.source_values, **EXACT)
        assert (estimate.axes, estimate.indices) == (real.axes, real.indices)


@pytest.mark.parametrize(("kind", "at"), [("gpt", "query"), ("gpt", "positions"), ("looped", "query")])
def test_otherwise_it_is_the_slope_of_small_patches(kind, at):
    model = model_of(kind)
    metrics = {"sum": lambda predictions: predictions.flatten(1).sum(1)}
    clean, corrupted = pair(model)
    for component, axes in SWEEPS[2:4] if at == "positions" else SWEEPS:
        estimate = attribute(model, clean, corrupted, component, axes, metrics=metrics, at=at)
        values, current = (
            [recorded(model, prompts, hook_name(component, layer)) for layer in range(model.cfg.n_layers)]
            for prompts in (clean, corrupted)
        )
        slopes = []
        for cell in oracles.cells(model, component, axes, values[0])[::11]:
            where = oracles.place(component, {axis: i for axis, i in cell.items() if axis != "layer"})
            change = (values[cell["layer"]] - current[cell["layer"]]).nan_to_num(0)
            name = hook_name(component, cell["layer"])

            def moved(sign, name=name, where=where, change=change):
                def nudge(activation, hook):
                    out = activation.clone()
                    out[where] = out[where] + sign * 1e-6 * change[where]
                    return out

                return metrics["sum"](run(model, corrupted, [(name, nudge)], at))

            slopes.append((moved(1) - moved(-1)) / 2e-6)
        assert_close(estimate.effect().flatten(0, len(axes) - 1)[::11], torch.stack(slopes), atol=1e-6, rtol=1e-5)
        assert_close(estimate.unpatched, run(model, corrupted, at=at), **EXACT)
        assert not estimate.values["sum"].requires_grad


def test_correlate_effects_is_the_correlation_over_cells():
    model = model_of("gpt")
    clean, corrupted = pair(model, 5)
    axes = ("layer", "pos", "head")
    estimate, real = (f(model, clean, corrupted, "z", axes) for f in (attribute, patch))
    mean = correlate_effects(estimate, real)
    each = [np.corrcoef(estimate.effect()[..., i].flatten(), real.effect()[..., i].flatten())[0, 1] for i in range(5)]
    half = 2.7764451 * np.std(each, ddof=1) / math.sqrt(5)
    assert mean.n == 5
    assert mean.mean == pytest.approx(np.mean(each))
    assert mean.low == pytest.approx(max(np.mean(each) - half, -1), rel=1e-6)
    assert mean.high == pytest.approx(min(np.mean(each) + half, 1), rel=1e-6)
    narrow = correlate_effects(estimate, real, level=0.2)  # not cut
    assert narrow.high - narrow.low == pytest.approx(2 * 0.2707223 * np.std(each, ddof=1) / math.sqrt(5), rel=1e-4)


def test_correlate_effects_is_cut_and_leaves_out_prompts_without_effects():
    def made(effects: torch.Tensor) -> InterventionSweep:
        none = torch.zeros(effects.shape[1], dtype=effects.dtype)
        cells = (tuple(range(len(effects))),)
        return InterventionSweep("made", ("layer",), cells, None, none[:, None], None, {"m": effects}, {"m": none})

    real = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    estimate = -3 * real
    estimate[0, :2] += torch.tensor([0.5, 2.0])
    cut = correlate_effects(made(estimate), made(real))
    assert cut.low == -1 < cut.mean < cut.high
    estimate[:, 3] = real[0, 3]  # the same everywhere
    assert correlate_effects(made(estimate), made(real)).n == 3
    estimate[2, 0] = math.nan
    assert math.isnan(correlate_effects(made(estimate), made(real)).mean)
    others = dataclasses.replace(made(real), indices=(tuple(range(1, 7)),))
    with pytest.raises(ValueError, match="sweeps must have the same cells"):
        correlate_effects(made(estimate), others)


def test_no_grad_changes_nothing_and_nothing_stays():
    model = model_of("gpt")
    clean, corrupted = pair(model, 5)
    expected = attribute(model, clean, corrupted)
    with torch.no_grad():
        assert_close(attribute(model, clean, corrupted).values, expected.values)
    assert not model.has_hooks()
    assert all(weight.grad is None for weight in model.parameters())


def test_logits_are_kept_once_however_many_layers():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5_000, n_layer=6, n_head=2, n_embd=8, n_positions=16)
    model = build_bridge_from_module(GPT2LMHeadModel(config).eval(), "GPT2LMHeadModel", hf_config=config)
    clean, corrupted = torch.randint(5_000, (2, 1, 16), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"metrics": lambda logits: logits[:, 3], "progress": False}
    logits = 4 * 16 * 5_000  # bytes
    with settings(memory=10 * logits):
        tight = attribute(model, clean, corrupted, **options)
    assert_close(tight.values, attribute(model, clean, corrupted, **options).values)


@pytest.mark.parametrize("component", ["resid_mid", "resid_post", "attn_out", "z"])
@pytest.mark.parametrize("family", ["GPT-2", "BLOOM", "Llama"])
def test_bridges_have_the_slope_of_the_plain_model(family, component):
    """By finite differences, with torch's hooks on the plain model."""
    model, plain = open_family(family, dtype=torch.float64)
    clean, corrupted = token_ids(0), token_ids(1)
    metrics = {"logit": lambda logits: logits[:, 3]}
    estimate = attribute(model, clean, corrupted, component, {"layer": [1]}, metrics=metrics)
    name = hook_name(component, 1)
    change = recorded(model, clean, name) - recorded(model, corrupted, name)
    at = place_of(model, plain, component, 1)
    assert at is not None

    def moved(share: float) -> torch.Tensor:
        def move(activation: torch.Tensor) -> None:
            activation += share * change.view_as(activation)

        with torch.no_grad(), putting(plain, at, move):
            return plain(corrupted).logits[:, -1, 3]

    slope = (moved(1e-2) - moved(-1e-2)) / 2e-2  # bridges compute rotations and softmax in single precision
    assert_close(estimate.effect()[0], slope, rtol=2e-3, atol=2e-3)


# ---- families of bridges ----
FAMILIES = (  # one of each kind; those of agreement.py are twice as many
    "GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "OPT", "BLOOM", "XGLM", "Llama", "Mixtral", "Qwen3", "Gemma 2", "Phi",
    "Phi-3", "Falcon", "MPT", "OLMo 2", "CodeGen", "GPT-BigCode", "Granite", "Cohere", "GLM 4", "GPT", "BERT", "Mamba",
    "RecurrentGemma", "T5",
)  # fmt: skip
IGNORED = {"attn_scores", "pattern"}
REFUSED = {  # what is refused because the model ignores it
    "GPT-Neo": IGNORED,
    "GPT-J": IGNORED,
    "XGLM": IGNORED,
    "OPT": IGNORED,
    "BERT": IGNORED,
    "GPT": {"resid_post"},
}
RECURRENT = {"gate", "step", "state"}
OF_TABLES = {component for component in COMPONENTS if component.startswith(("col_", "row_", "cell_"))}
ABSENT = {
    "T5": set(COMPONENTS),
    "Mamba": set(COMPONENTS) - {"resid_pre", "resid_post"},
    "RecurrentGemma": set(COMPONENTS) - {"resid_pre", "resid_post"},
}
PARALLEL = {"GPT-J", "GPT-NeoX", "Phi", "Falcon", "CodeGen", "Cohere", "Cohere 2"}


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_each_component_is_right_or_refused(family):
    bridge, plain = open_family(family)
    for component in COMPONENTS:
        agreement = agreement_of(bridge, plain, component, [1], [0])
        if component in REFUSED.get(family, ()):
            assert agreement.refusal is not None
            assert "ignores edits" in agreement.refusal or "does not fire" in agreement.refusal
        elif component in OF_TABLES:
            assert agreement.refusal is not None
        elif component in RECURRENT | ABSENT.get(family, {"resid_mid"} if family in PARALLEL else set()):
            assert "the model has no hook" in (agreement.refusal or "")
        else:
            assert agreement.refusal is None, component
            assert agreement.difference is not None
            assert agreement.difference < TOLERANCE, component
