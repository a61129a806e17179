"""Fine-tuning against torch's own SGD and hand-written passes; the model stays unchanged."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from mechicl.analysis.finetuning import METHODS, FineTuning, compare_with_finetuning, fine_tune, search_tuning
from mechicl.analysis.finetuning.forward_passes import linearized_outputs
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from tests.analysis.finetuning.oracles import (
    KINDS,
    Snapshot,
    example_loss,
    model_on_tokens,
    sgd,
    token_shots,
    wrapped_model,
)
from tests.analysis.interventions.oracles import inputs, lstm, model_of, no_hook_left


def assert_changes(changes, expected, rtol=1e-8):
    assert set(changes) == set(expected)
    largest = max(change.abs().max().item() for change in expected.values())
    assert largest > 1e-4
    for name, change in expected.items():
        assert_close(
            changes[name], change, atol=1e-9 * largest, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


def key_value(model):
    return [name for name, _ in model.named_parameters() if name.rsplit(".", 1)[-1] in ("W_K", "W_V", "b_K", "b_V")]


# ---- plain ----


@pytest.mark.parametrize(("parameters", "examples_per_step"), [("key_value", 1), ("all", 2), ("named", 7)])
@pytest.mark.parametrize("regression", [False, True])
def test_plain_fine_tuning_is_sgd(regression, parameters, examples_per_step):
    model = model_of("gpt", n_context=3) if regression else model_on_tokens("softmax")
    shots = prompt_shots(model, inputs(model, 0, 1)) if regression else token_shots()
    every = [name for name, _ in model.named_parameters()]
    names = {"key_value": key_value(model), "all": every, "named": ["blocks.1.attn.W_V", every[-1]]}[parameters]
    parameters = tuple(names) if parameters == "named" else parameters
    tuning = FineTuning(0.01, epochs=3, parameters=parameters, examples_per_step=examples_per_step)
    tuned = fine_tune(model, shots, tuning)
    changes, losses = sgd(model, shots, tuning, names)
    assert_changes(tuned.changes, changes)
    assert_close(tuned.losses, losses, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("kind", ["linear", "one head", "deep", "looped", "sink", "momentum"])
def test_plain_fine_tuning_of_other_models_is_sgd(kind):
    model, shots = model_on_tokens(kind), token_shots()
    tuning = FineTuning(0.02, epochs=2)
    tuned = fine_tune(model, shots, tuning)
    changes, losses = sgd(model, shots, tuning, key_value(model))  # of a looped model, one block's
    assert_changes(tuned.changes, changes)
    assert_close(tuned.losses, losses, atol=1e-10, rtol=1e-8)


def test_a_recurrent_model():
    model = lstm()
    shots = prompt_shots(model_of("gpt", n_context=3), inputs(model, 0, 1))  # the same tokens
    tuning = FineTuning(0.01, parameters="all", epochs=2)
    names = [name for name, _ in model.named_parameters()]
    assert_changes(fine_tune(model, shots, tuning).changes, sgd(model, shots, tuning, names)[0])


# A bridge has separate keys and values, where GPT-2 has one matrix for queries, keys and values, transposed.


def by_bridge_part(changes, kind, d_model):
    """Changes of keys and values in a bare model of transformers: by layer, "k" or "v", and "weight" or "bias"."""
    parts = {}
    for name, change in changes.items():
        words = name.split(".")
        layer = next(int(word) for word in words if word.isdecimal())
        if kind == "llama":
            parts[layer, words[-2][0], words[-1]] = change
        else:
            for i, projection in ((1, "k"), (2, "v")):
                parts[layer, projection, words[-1]] = change[..., i * d_model : (i + 1) * d_model]
    return parts


def of_bridge(changes, kind):
    """Changes of a bridge by the same names, and laid out in the same way."""
    parts = {}
    for name, change in changes.items():
        words = name.split(".")
        layer = next(int(word) for word in words if word.isdecimal())
        projection = next(word[0] for word in words if word in ("k", "v", "k_proj", "v_proj"))
        parts[layer, projection, words[-1]] = change.T if kind == "gpt2" and words[-1] == "weight" else change
    return parts


def wrapped_key_value(wrapped, kind):
    ends = {"gpt2": ("c_attn.weight", "c_attn.bias"), "llama": ("k_proj.weight", "v_proj.weight")}[kind]
    return [name for name, _ in wrapped.named_parameters() if "attn" in name and name.endswith(ends)]


def assert_parts(changes, expected, tolerance):
    assert changes.keys() == expected.keys()
    for name, change in expected.items():
        assert_close(changes[name], change, atol=tolerance, rtol=1e-5)  # the wrapped model has norms in float32


@pytest.mark.parametrize(("kind", "examples_per_step"), [("gpt2", 1), ("gpt2", 2), ("llama", 1)])
def test_fine_tuning_of_a_bridge_is_sgd_on_the_wrapped_model(kind, examples_per_step):
    shots, wrapped = token_shots(), wrapped_model(kind)
    tuning = FineTuning(0.05, epochs=3, examples_per_step=examples_per_step)
    names = wrapped_key_value(wrapped, kind)
    # queries of GPT-2 are in the same matrix, and are not tuned
    masks = {name: (torch.arange(24) >= 8).double() for name in names if "c_attn" in name}
    expected, _ = sgd(wrapped, shots, tuning, names, masks=masks)
    changes = of_bridge(fine_tune(model_on_tokens(kind), shots, tuning).changes, kind)
    assert_parts(changes, by_bridge_part(expected, kind, 8), 1e-6)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("gpt2", "all"), ("llama", "all"), ("gpt2", ("transformer.wte._original_component.weight",))],
)
def test_all_parameters_of_a_bridge(kind, parameters):
    """The first and the last one of GPT-2 are tied."""
    model, shots, tuning = model_on_tokens(kind), token_shots(), FineTuning(0.05, epochs=2, parameters=parameters)
    tuned = fine_tune(model, shots, tuning)
    names = [name for name, _ in model.named_parameters()] if parameters == "all" else parameters
    assert set(tuned.changes) == set(names)
    wrapped = wrapped_model(kind)
    wrapped_names = [name for name, _ in wrapped.named_parameters() if parameters == "all" or "wte" in name]
    expected, _ = sgd(wrapped, shots, tuning, wrapped_names)
    changes = {name.replace("_original_component.", ""): change for name, change in tuned.changes.items()}
    compared = expected.keys() & changes.keys()  # a bridge has split GPT-2's c_attn
    for name in compared:
        change = changes[name] if changes[name].shape == expected[name].shape else changes[name].T
        assert_close(change, expected[name], atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert len(compared) == (len(names) if kind == "llama" else 20 if parameters == "all" else 1)


# ---- each layer separately ----


def losses_by_layer(model, kind, tokens, target, choices):
    """The loss of each layer's attention, read out by hand, from a detached stream."""
    losses = []
    if kind == "gpt2":
        body = model.transformer
        stream = body.wte(tokens) + body.wpe(torch.arange(len(tokens)))
        for block in body.h:
            stream = stream.detach()
            written = block.attn(block.ln_1(stream[None]))[0][0]
            losses.append(example_loss(model.lm_head(body.ln_f(written[-1])), target, choices))
            stream = stream + written
            stream = stream + block.mlp(block.ln_2(stream))
    elif kind == "llama":
        body = model.model
        stream = body.embed_tokens(tokens)[None]
        angles = body.rotary_emb(stream, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for block in body.layers:
            stream = stream.detach()
            written, _ = block.self_attn(block.input_layernorm(stream), angles, mask)
            losses.append(example_loss(model.lm_head(body.norm(written[0, -1])), target, choices))
            stream = stream + written
            stream = stream + block.mlp(block.post_attention_layernorm(stream))
    else:
        stream = model.embed_tokens(tokens[None])
        for block in model.blocks:
            stream = stream.detach()
            written = block.attn(block.ln1(stream))
            losses.append(example_loss(model.read_out(written)[0, -1], target, choices))
            stream = block(stream)
    return torch.stack(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_separately(kind):
    model, shots = model_on_tokens(kind), token_shots((2,), (1,))
    tuned = fine_tune(model, shots, FineTuning(1.0, method="per_layer"))
    is_bridge = kind in ("gpt2", "llama")
    bare = wrapped_model(kind) if is_bridge else model
    losses = losses_by_layer(bare, kind, shots.examples[0], shots.example_targets[0], shots.choices)
    assert_close(tuned.losses[0, 0], losses.sum(), atol=1e-6, rtol=1e-6)
    parameters = dict(bare.named_parameters())
    names = wrapped_key_value(bare, kind) if is_bridge else list(tuned.changes)
    gradients = torch.autograd.grad(losses.sum(), [parameters[name] for name in names])
    expected = {name: -gradient for name, gradient in zip(names, gradients, strict=True)}
    if is_bridge:
        assert_parts(of_bridge(tuned.changes, kind), by_bridge_part(expected, kind, 8), 1e-5)
    else:
        assert_changes(tuned.changes, expected)


def test_each_layer_separately_in_batches_and_epochs():
    shots, tuning = token_shots(), FineTuning(0.05, method="per_layer", epochs=2, examples_per_step=2)
    model = model_on_tokens("softmax")

    def summed(tuned, tokens, target):
        return losses_by_layer(tuned, "softmax", tokens, target, shots.choices).sum()

    changes, losses = sgd(model, shots, tuning, key_value(model), summed)
    tuned = fine_tune(model, shots, tuning)
    assert_changes(tuned.changes, changes)
    assert_close(tuned.losses, losses)


# ---- linearised ----


@pytest.mark.parametrize(
    ("kind", "examples_per_step"), [("softmax", 1), ("softmax", 2), ("linear", 2), ("looped", 1), ("gpt2", 2)]
)
def test_linearised_fine_tuning_is_sgd_on_the_expansion(kind, examples_per_step):
    """With the Jacobian written out, row by row."""
    model, shots = model_on_tokens(kind), token_shots()
    tuning = FineTuning(0.05, epochs=2, method="linearized", examples_per_step=examples_per_step)
    tuned = fine_tune(model, shots, tuning)
    parameters = [dict(model.named_parameters())[name] for name in tuned.changes]
    at_start, jacobians = [], []
    for tokens in shots.examples:
        logits = model(tokens[None])[0, -1]
        rows = [torch.autograd.grad(logit, parameters, retain_graph=True) for logit in logits]
        jacobians.append(torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows]))
        at_start.append(logits.detach())
    delta, losses = torch.zeros(jacobians[0].shape[1], dtype=torch.float64), []
    for _ in range(tuning.epochs):
        for first in range(0, 3, examples_per_step):
            gradients: list[torch.Tensor] = []
            for i in range(first, min(first + examples_per_step, 3)):
                outputs = at_start[i] + jacobians[i] @ delta
                losses.append(example_loss(outputs, shots.example_targets[i], shots.choices))
                right = F.one_hot(shots.example_targets[i], len(outputs))
                gradients.append(jacobians[i].T @ (outputs.softmax(-1) - right))
            delta = delta - tuning.learning_rate * torch.stack(gradients).mean(0)
    changes = torch.cat([change.flatten() for change in tuned.changes.values()])
    assert (changes - delta).norm() / delta.norm() < (1e-5 if kind == "gpt2" else 1e-10)
    assert_close(tuned.losses.flatten(), torch.stack(losses), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("part", ["W_V", "W_O"])
def test_a_model_that_is_linear_in_its_tuned_weights_is_its_own_expansion(part):
    model, shots = model_on_tokens("linear", n_layers=1, attn_bias=False), token_shots()
    tunings = [
        FineTuning(0.1, epochs=3, method=method, parameters=(f"blocks.0.attn.{part}",)) for method in METHODS[:2]
    ]
    plain, expanded = (fine_tune(model, shots, tuning) for tuning in tunings)
    assert_changes(expanded.changes, plain.changes, rtol=1e-9)
    assert_close(plain.losses, expanded.losses)
    with plain.applied(model), torch.no_grad():
        moved = model(shots.examples[0][None])[:, -1]
    assert_close(linearized_outputs(model, shots.examples[0][None], expanded.changes), moved)


# ---- the model stays unchanged ----


@pytest.mark.parametrize(
    ("kind", "method"),
    [*(("softmax", method) for method in METHODS), ("gpt2", "linearized"), ("gpt2", "per_layer"), ("llama", "plain")],
)
def test_the_model_stays_unchanged(kind, method):
    model, shots = model_on_tokens(kind), token_shots((2, 1), (1, 2))
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    before = Snapshot(model)
    with torch.no_grad():
        logits = model(shots.examples[0][None])
    tuned = fine_tune(model, shots, FineTuning(method=method))
    before.check()
    compare_with_finetuning(model, shots, tuned)
    before.check()
    search_tuning(model, shots, FineTuning(method=method), learning_rates=(0.1,), epochs=(1,))
    before.check()
    if method != "linearized":
        with tuned.applied(model), torch.no_grad():
            assert not torch.equal(model(shots.examples[0][None]), logits)
        before.check()
    copy.deepcopy(model)  # no tensor of a run stays in it


class Failing:
    """A hook that raises at its n-th call and after."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, activation: torch.Tensor, hook: Any) -> None:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("mine")


@pytest.mark.parametrize(("kind", "method"), [*(("softmax", method) for method in METHODS), ("gpt2", "linearized")])
@pytest.mark.parametrize("n", [2, 9])
def test_the_model_stays_unchanged_after_an_error(kind, method, n):
    model, shots = model_on_tokens(kind), token_shots(queries=(1, 2))
    before = Snapshot(model)
    tuning = FineTuning(method=method, epochs=3)
    works = {
        "tune": lambda: fine_tune(model, shots, tuning),
        "compare": lambda: compare_with_finetuning(model, shots, tuning),
        "search": lambda: search_tuning(model, shots, tuning, learning_rates=(0.1, 0.2), epochs=(1, 2)),
    }
    for work in works.values():
        model.add_hook("blocks.1.attn.hook_z", Failing(n))
        with pytest.raises(RuntimeError, match="mine"):
            work()
        model.reset_hooks()
        before.check()


@pytest.mark.parametrize(("kind", "method"), [*(("softmax", method) for method in METHODS), ("gpt2", "plain")])
def test_hooks_of_the_user_are_part_of_the_model(kind, method):
    """They act in every run, and stay."""
    model, shots = model_on_tokens(kind), token_shots((2, 1), (1, 2))
    plain = compare_with_finetuning(model, shots, FineTuning(method=method))
    name = "blocks.1.attn.hook_z" if kind == "softmax" else "blocks.1.attn.hook_v"
    model.add_hook(name, lambda activation, hook: activation / 2)
    logits = model.run_with_hooks(shots.zero_shot[0][None], fwd_hooks=[])
    hooked = compare_with_finetuning(model, shots, FineTuning(method=method))
    assert torch.equal(model.run_with_hooks(shots.zero_shot[0][None], fwd_hooks=[]), logits)
    assert len(model.hook_dict[name].fwd_hooks) == 1
    assert (hooked.zero_shot_loss - plain.zero_shot_loss).abs().min() > 1e-6
    model.reset_hooks()
    if (kind, method) == ("softmax", "plain"):  # weights that are half as large do the same
        with torch.no_grad():
            model.blocks[1].attn.W_O /= 2
        halved = compare_with_finetuning(model, shots, FineTuning(method=method))
        assert_close(halved.finetuned_loss, hooked.finetuned_loss)
    assert no_hook_left(model)


@pytest.mark.parametrize("method", METHODS)
def test_models_without_keys_and_values(method):
    made = model_of("identity", attention_weights="gradient_descent", n_heads=1, d_head=None)
    step = ("blocks.0.attn.step_size", "blocks.1.attn.step_size")
    shots = prompt_shots(made, inputs(made, 0, 1), "unlabelled")
    tuned = fine_tune(made, shots, FineTuning(0.01, method=method, parameters=step))
    assert set(tuned.changes) == set(step)
    assert not any(change.any() for change in tuned.changes.values())  # steps on targets of 0 are 0 for any step size
