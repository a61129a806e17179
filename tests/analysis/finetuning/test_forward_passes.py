"""A model's first-order expansion against differences, and the memory that it takes."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import FineTuning, fine_tune
from mechicl.analysis.finetuning.forward_passes import (
    linearized_outputs,
    run_with_changes,
    value_and_derivative,
    weights_changed,
)
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from tests.analysis.finetuning.oracles import D_VOCAB, OURS, Snapshot, added, model_on_tokens, token_shots
from tests.analysis.interventions.oracles import bridge, model_of, no_hook_left
from tests.analysis.interventions.test_runs import peak
from tests.strategies import random_prompts


def changes_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter) / 10
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def slope_by_differences(model, tokens, changes, step):
    above, below = (added(model, changes, sign * step)(tokens)[:, -1] for sign in (1, -1))
    return (above - below) / (2 * step)


@pytest.mark.parametrize("kind", [*OURS, "gpt2", "llama"])
def test_the_expansion_by_differences(kind):
    model = model_on_tokens(kind)
    tokens = torch.randint(D_VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    changes, before = changes_of(model), Snapshot(model)
    outputs = linearized_outputs(model, tokens, changes)
    # norms and softmax of transformers are in float32, which differences see
    step, tolerance = (1e-3, 1e-3) if kind == "llama" else (1e-5, 1e-7)
    with torch.no_grad():
        start = model(tokens)[:, -1]
    slope = slope_by_differences(model, tokens, changes, step)
    assert (outputs - start - slope).norm() / slope.norm() < tolerance
    assert not outputs.requires_grad
    before.check()
    # no change has no effect, and twice the change twice the effect
    assert_close(linearized_outputs(model, tokens, {}), start, atol=1e-6, rtol=1e-6)
    double = linearized_outputs(model, tokens, {name: 2 * change for name, change in changes.items()})
    assert_close(double - start, 2 * (outputs - start), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt", "linear", "identity", "full", "clipped", "mixed", "looped", "float32"])
def test_the_expansion_on_prompts(kind):
    model = model_of(kind)
    tokens = model.encode(random_prompts(model.cfg, 3))
    changes = changes_of(model)
    step, tolerance = (1e-2, 1e-2) if kind == "float32" else (1e-6, 1e-6)
    slope = slope_by_differences(model, tokens, changes, step)
    outputs = linearized_outputs(model, tokens, changes) - model(tokens)[:, -1].detach()
    assert (outputs - slope).norm() / slope.norm() < tolerance


def test_activations_are_expanded_too():
    model = model_on_tokens("softmax")
    tokens = torch.randint(D_VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    changes, step, name = changes_of(model), 1e-5, "blocks.1.attn.hook_pattern"

    def read(changes=None, linearized=False):
        parts = {name: np.s_[:, :, -1]}
        return run_with_changes(ModelAdapter(model), tokens, parts, changes, linearized=linearized)[1][name]

    above, below = (read({n: s * change for n, change in changes.items()}) for s in (step, -step))
    expected = read() + (above - below) / (2 * step)
    assert_close(read(changes, linearized=True), expected, atol=1e-8, rtol=1e-8)
    assert no_hook_left(model)


def test_changed_weights_are_restored_after_an_error():
    model = model_on_tokens("softmax")
    before = Snapshot(model)
    with pytest.raises(KeyError), weights_changed(model, changes_of(model)):
        raise KeyError
    before.check()


def test_value_and_derivative():
    weights = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([2.0], dtype=torch.float64)}
    changes = {"a": torch.tensor([0.5], dtype=torch.float64), "b": torch.tensor([-1.0], dtype=torch.float64)}
    value, slope = value_and_derivative(lambda w: w["a"] ** 2 * w["b"], weights, changes)
    assert value.item() == 18
    assert slope.item() == 2 * 3 * 2 * 0.5 - 9


def mid_size(kind):
    if kind == "gpt2":
        return bridge(n_layer=3, n_head=4, n_embd=64, vocab_size=500, n_positions=64)
    config = TransformerConfig(
        prompt_format="token_ids", d_vocab=500, n_ctx=64, n_layers=4, n_heads=4, d_model=64, d_mlp=256,
        attention="softmax", normalization_type="LN",
    )  # fmt: skip
    return HookedTransformer(config).eval()


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
@pytest.mark.parametrize("n_pos", [16, 64])
def test_a_linearised_model_takes_at_most_twice_the_memory(kind, n_pos):
    """Weights included: of a step of fine-tuning, and of a reading, against a plain pass without gradients."""
    model = mid_size(kind)
    shots = token_shots((n_pos - 1,), (1,))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    tuning = FineTuning(method="linearized")
    changes = fine_tune(model, shots, tuning).changes  # a first run allocates workspaces
    tokens, adapter = shots.examples[0][None], ModelAdapter(model)

    @torch.no_grad()
    def plain():
        return adapter.run(tokens)

    plain()
    baseline = weights + peak(plain)[0]
    held = sum(change.nbytes for change in changes.values())
    assert weights + peak(lambda: fine_tune(model, shots, tuning))[0] <= 2 * baseline
    assert weights + held + peak(lambda: linearized_outputs(model, tokens, changes))[0] <= 2 * baseline
