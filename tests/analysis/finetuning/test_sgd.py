"""Fine-tuning against torch's own SGD and hand-written passes, and the model left as it was."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    FineTuning,
    TuningSearch,
    compare_with_finetuning,
    fine_tune,
    linearized_outputs,
    prompt_shots,
    search_tuning,
)
from mechicl.shots import Shots
from mechicl.statistics import interval
from tests.analysis.finetuning.oracles import (
    KINDS,
    Snapshot,
    example_loss,
    model_on_tokens,
    score_and_loss,
    sgd,
    token_shots,
    wrapped_model,
)
from tests.analysis.interventions.oracles import bridge, inputs, lstm, model_of, no_hook_left

METHODS = ("plain", "linearized", "per_layer")


def assert_changes(found, expected, rtol=1e-8):
    assert set(found) == set(expected)
    largest = max(of.abs().max().item() for of in expected.values())
    assert largest > 1e-4
    for name, of in expected.items():
        assert_close(found[name], of, atol=1e-9 * largest, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def key_value(model):
    return [name for name, _ in model.named_parameters() if name.rsplit(".", 1)[-1] in ("W_K", "W_V", "b_K", "b_V")]


# ---- plain ----


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("parameters", ["key_value", "all", ("blocks.1.attn.W_V", "unembed")])
@pytest.mark.parametrize("regression", [False, True])
def test_plain_fine_tuning_is_sgd(regression, parameters, batch_size):
    model = model_of("gpt", n_context=3) if regression else model_on_tokens("softmax")
    shots = prompt_shots(model, inputs(model, 0, 1)) if regression else token_shots()
    every = [name for name, _ in model.named_parameters()]
    names = {"key_value": key_value(model), "all": every}.get(parameters) or list(parameters)
    tuning = FineTuning(0.01, epochs=3, parameters=parameters, examples_per_step=batch_size)
    found = fine_tune(model, shots, tuning)
    changes, losses = sgd(model, names, shots, tuning)
    assert_changes(found.changes, changes)
    assert_close(found.losses, losses, atol=1e-10, rtol=1e-8)
    assert found.losses.shape == (3, 3)
    assert found.tuning == tuning


@pytest.mark.parametrize("kind", ["linear", "one head", "deep", "looped", "sink", "momentum"])
def test_plain_fine_tuning_of_other_models_is_sgd(kind):
    model, shots = model_on_tokens(kind), token_shots()
    tuning = FineTuning(0.02, epochs=2)
    found = fine_tune(model, shots, tuning)
    changes, losses = sgd(model, key_value(model), shots, tuning)
    assert_changes(found.changes, changes)
    assert_close(found.losses, losses, atol=1e-10, rtol=1e-8)
    if kind == "looped":  # one block, whose weights the others share
        assert set(found.changes) == {f"blocks.0.attn.{name}" for name in ("W_K", "W_V", "b_K", "b_V")}


def rows_of_wrapped(model, kind):
    """Key and value weights of a model of transformers, by layer and name in a bridge: the parameter, and its part."""
    found = {}
    if kind == "gpt2":
        for i, block in enumerate(model.transformer.h):
            d = block.attn.c_attn.weight.shape[0]
            for which, part in (("k", slice(d, 2 * d)), ("v", slice(2 * d, 3 * d))):
                found[i, which, "weight"] = block.attn.c_attn.weight, (slice(None), part)
                found[i, which, "bias"] = block.attn.c_attn.bias, (part,)
    else:
        for i, block in enumerate(model.model.layers):
            for which, projection in (("k", block.self_attn.k_proj), ("v", block.self_attn.v_proj)):
                found[i, which, "weight"] = projection.weight, (slice(None),)
    return found


def by_wrapped_name(changes):
    """Changes of a bridge by the same."""
    found = {}
    for name, of in changes.items():
        parts = name.split(".")
        layer = next(int(part) for part in parts if part.isdecimal())
        which = next(part[0] for part in parts if part in ("k", "v", "k_proj", "v_proj"))
        found[layer, which, parts[-1]] = of
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_fine_tuning_of_a_bridge_is_sgd_on_what_it_wraps(kind, batch_size):
    shots, tuning = token_shots(), FineTuning(0.05, epochs=3, examples_per_step=batch_size)
    found = by_wrapped_name(fine_tune(model_on_tokens(kind), shots, tuning).changes)
    wrapped = wrapped_model(kind)
    parts = rows_of_wrapped(wrapped, kind)
    start = {name: of.detach()[part].clone() for name, (of, part) in parts.items()}
    pairs = list(zip(shots.examples, shots.example_targets, strict=True))
    for _ in range(tuning.epochs):
        for first in range(0, len(pairs), batch_size):
            batch = pairs[first : first + batch_size]
            losses = [example_loss(wrapped(tokens[None]).logits[0, -1], y, shots.choices) for tokens, y in batch]
            wrapped.zero_grad()
            torch.stack(losses).mean().backward()
            with torch.no_grad():
                for of, part in parts.values():
                    assert of.grad is not None
                    of[part] -= tuning.learning_rate * of.grad[part]
    assert found.keys() == parts.keys()
    for name, (of, part) in parts.items():
        change = of.detach()[part] - start[name]
        given = found[name].T if kind == "gpt2" and name[2] == "weight" else found[name]
        assert_close(given, change, atol=1e-6, rtol=1e-5)  # what it wraps has norms in float32


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("parameters", ["all", ("transformer.wte._original_component.weight",)])
def test_all_parameters_of_a_bridge(kind, parameters):
    """The first and the last one of GPT-2 are one."""
    if kind == "llama" and parameters != "all":
        return
    model, shots, tuning = model_on_tokens(kind), token_shots(), FineTuning(0.05, epochs=2, parameters=parameters)
    found = fine_tune(model, shots, tuning)
    names = [name for name, _ in model.named_parameters()] if parameters == "all" else parameters
    own = dict(sgd_of_all(wrapped_model(kind), shots, tuning, only="wte" if parameters != "all" else ""))
    given = {name.replace("_original_component.", ""): of for name, of in found.changes.items()}
    assert set(found.changes) == set(names)
    compared = 0
    for name, of in own.items():
        if name in given:  # a bridge has split GPT-2's c_attn
            change = given[name] if given[name].shape == of.shape else given[name].T
            assert_close(change, of, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
            compared += 1
    assert compared == (len(names) if kind == "llama" else 28 if parameters == "all" else 1)


def sgd_of_all(model, shots, tuning, only):
    start = {name: of.detach().clone() for name, of in model.named_parameters() if only in name}
    now = {name: of for name, of in model.named_parameters() if only in name}
    optimizer = torch.optim.SGD(now.values(), lr=tuning.learning_rate)
    for _ in range(tuning.epochs):
        for tokens, target in zip(shots.examples, shots.example_targets, strict=True):
            optimizer.zero_grad()
            example_loss(model(tokens[None]).logits[0, -1], target, shots.choices).backward()
            optimizer.step()
    return {name: of.detach() - start[name] for name, of in now.items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_of_0_changes_nothing(method):
    model = model_on_tokens("softmax")
    tuned = fine_tune(model, token_shots(), FineTuning(0.0, epochs=2, method=method))
    assert all(not of.any() for of in tuned.changes.values())
    assert torch.equal(tuned.losses[0], tuned.losses[1])


# ---- each layer by itself ----


def losses_by_layer(model, kind, shots):
    """For each example the loss of each layer's attention, read out by hand, from a detached stream."""
    found = []
    for tokens, target in zip(shots.examples, shots.example_targets, strict=True):
        losses = []
        if kind == "gpt2":
            body = model.transformer
            stream = body.wte(tokens) + body.wpe(torch.arange(len(tokens)))
            for block in body.h:
                stream = stream.detach()
                written = block.attn(block.ln_1(stream[None]))[0][0]
                losses.append(example_loss(model.lm_head(body.ln_f(written[-1])), target, shots.choices))
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
                losses.append(example_loss(model.lm_head(body.norm(written[0, -1])), target, shots.choices))
                stream = stream + written
                stream = stream + block.mlp(block.post_attention_layernorm(stream))
        else:
            stream = model.embed_tokens(tokens[None])
            for block in model.blocks:
                stream = stream.detach()
                written = block.attn(block.ln1(stream))
                losses.append(example_loss(model.read_out(written)[0, -1], target, shots.choices))
                stream = block(stream)
        found.append(losses)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_by_itself(kind):
    model, shots = model_on_tokens(kind), token_shots((2,), (1,))
    tuned = fine_tune(model, shots, FineTuning(1.0, method="per_layer"))
    bare = wrapped_model(kind) if kind in ("gpt2", "llama") else model
    (losses,) = losses_by_layer(bare, kind, shots)
    assert_close(tuned.losses[0, 0], torch.stack(losses).sum(), atol=1e-6, rtol=1e-6)
    if bare is model:
        own = {name: of for name, of in model.named_parameters() if name in tuned.changes}
        gradients = dict(zip(own, torch.autograd.grad(torch.stack(losses).sum(), list(own.values())), strict=True))
        assert_changes(tuned.changes, {name: -of for name, of in gradients.items()})
        return
    parts = rows_of_wrapped(bare, kind)
    torch.stack(losses).sum().backward()
    for name, change in by_wrapped_name(tuned.changes).items():
        of, part = parts[name]
        assert of.grad is not None
        given = change.T if kind == "gpt2" and name[2] == "weight" else change
        assert_close(given, -of.grad[part], atol=1e-5, rtol=1e-5)


def test_losses_of_layers_by_themselves_do_not_meet():
    """A layer's keys and values have the gradient of its own loss alone."""
    model, shots = model_on_tokens("softmax", n_layers=3), token_shots((2,), (1,))
    changes = fine_tune(model, shots, FineTuning(1.0, method="per_layer")).changes
    (losses,) = losses_by_layer(model, "softmax", shots)
    for layer, loss in enumerate(losses):
        own = [of for name, of in model.named_parameters() if name in changes]
        gradients = torch.autograd.grad(loss, own, allow_unused=True, retain_graph=True)
        for name, gradient in zip(changes, gradients, strict=True):
            if name.startswith(f"blocks.{layer}."):
                assert_close(changes[name], -gradient)
            else:
                assert gradient is None


def test_each_layer_by_itself_in_batches_and_epochs():
    shots, tuning = token_shots(), FineTuning(0.05, method="per_layer", epochs=2, examples_per_step=2)
    model = model_on_tokens("softmax")
    found = fine_tune(model, shots, tuning)
    tuned = copy.deepcopy(model)
    optimizer = torch.optim.SGD([of for name, of in tuned.named_parameters() if name in found.changes], lr=0.05)
    for _ in range(2):
        for index in ([0, 1], [2]):
            losses = [sum(losses_by_layer(tuned, "softmax", shots)[i], torch.zeros(())) for i in index]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    before = dict(model.named_parameters())
    now = dict(tuned.named_parameters())
    assert_changes(found.changes, {name: now[name].detach() - before[name].detach() for name in found.changes})


# ---- linearised ----


@pytest.mark.parametrize("kind", ["softmax", "linear", "looped", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_linearised_fine_tuning_is_sgd_on_the_expansion(kind, batch_size):
    """With the Jacobian written out, row by row."""
    model, shots = model_on_tokens(kind), token_shots()
    tuning = FineTuning(0.05, epochs=2, method="linearized", examples_per_step=batch_size)
    found = fine_tune(model, shots, tuning)
    own = [dict(model.named_parameters())[name] for name in found.changes]
    at_start, jacobians = [], []
    for tokens in shots.examples:
        logits = model(tokens[None])[0, -1]
        rows = [torch.autograd.grad(logit, own, retain_graph=True) for logit in logits]
        jacobians.append(torch.stack([torch.cat([of.flatten() for of in row]) for row in rows]))
        at_start.append(logits.detach())
    delta, losses = torch.zeros(jacobians[0].shape[1], dtype=torch.float64), []
    gradients: list[torch.Tensor] = []
    for _ in range(tuning.epochs):
        for first in range(0, 3, batch_size):
            gradients.clear()
            for i in range(first, min(first + batch_size, 3)):
                outputs = at_start[i] + jacobians[i] @ delta
                losses.append(example_loss(outputs, shots.example_targets[i], shots.choices))
                right = F.one_hot(shots.example_targets[i], len(outputs))
                gradients.append(jacobians[i].T @ (outputs.softmax(-1) - right))
            delta = delta - tuning.learning_rate * torch.stack(gradients).mean(0)
    changes = torch.cat([of.flatten() for of in found.changes.values()])
    assert (changes - delta).norm() / delta.norm() < (1e-5 if kind == "gpt2" else 1e-10)
    assert_close(found.losses.flatten(), torch.stack(losses), atol=1e-6, rtol=1e-6)


def test_the_gradient_of_the_linearised_loss_by_differences():
    model, shots = model_on_tokens("softmax"), token_shots((2, 3), (1,))
    rate = 0.1
    one = fine_tune(model, with_first_example(shots), FineTuning(rate, method="linearized")).changes
    both = fine_tune(model, shots, FineTuning(rate, method="linearized")).changes
    second = {name: (both[name] - one[name]) / -rate for name in both}  # where the first step has led
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = {name: torch.randn(of.shape, generator=generator, dtype=torch.float64) for name, of in both.items()}

        def loss(step: float, direction: dict[str, torch.Tensor] = direction) -> float:
            delta = {name: of + step * direction[name] for name, of in one.items()}
            outputs = linearized_by_differences(model, shots.examples[1], delta)
            return example_loss(outputs, shots.example_targets[1], shots.choices).item()

        slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
        found = sum((second[name] * direction[name]).sum().item() for name in second)
        assert found == pytest.approx(slope, rel=1e-5)


def with_first_example(shots: Shots) -> Shots:
    return Shots(
        shots.zero_shot, shots.in_context, shots.targets, shots.query_lengths,
        shots.examples[:1], shots.example_targets[:1],
        shots.example_spans[:1], shots.choices,
    )  # fmt: skip


@torch.no_grad()
def linearized_by_differences(model: Any, tokens: torch.Tensor, delta: dict[str, torch.Tensor]) -> torch.Tensor:
    step, around = 1e-5, []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        parameters = dict(moved.named_parameters())
        for name, of in delta.items():
            parameters[name] += sign * step * of
        around.append(moved(tokens[None])[0, -1])
    return model(tokens[None])[0, -1] + (around[0] - around[1]) / (2 * step)


@pytest.mark.parametrize("part", ["W_V", "W_O"])
def test_a_model_that_is_linear_in_what_is_tuned_is_its_own_expansion(part):
    model = model_on_tokens("linear", n_layers=1, attn_bias=False)
    shots = token_shots()
    tunings = [
        FineTuning(0.1, epochs=3, method=method, parameters=(f"blocks.0.attn.{part}",)) for method in METHODS[:2]
    ]
    plain, expanded = (fine_tune(model, shots, tuning) for tuning in tunings)
    assert_changes(expanded.changes, plain.changes, rtol=1e-9)
    assert_close(plain.losses, expanded.losses)
    with plain.applied(model), torch.no_grad():
        moved = model(shots.examples[0][None])[:, -1]
    assert_close(linearized_outputs(model, shots.examples[0][None], expanded.changes), moved)
    with pytest.raises(ValueError, match="no model with other weights"):
        expanded.applied(model)


# ---- the model is as it was ----


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("softmax", method) for method in METHODS),
        *(("gpt2", method) for method in METHODS),
        ("looped", "plain"),
        ("llama", "plain"),
    ],
)
def test_the_model_is_left_as_it_was(kind, method):
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
        with pytest.raises(KeyError), tuned.applied(model):
            raise KeyError
    before.check()
    with torch.no_grad():
        assert torch.equal(model(shots.examples[0][None]), logits)
    copy.deepcopy(model)  # nothing of a run is left in it


class Failing:
    """A hook that raises at its n-th call."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, activation: torch.Tensor, hook: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("mine")


@pytest.mark.parametrize("kind", ["softmax", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [2, 9])
def test_and_also_where_something_is_raised_inside(kind, method, n):
    model, shots = model_on_tokens(kind), token_shots(queries=(1, 2))
    before = Snapshot(model)
    tuning = FineTuning(method=method, epochs=2)
    works = {
        "compare": lambda: compare_with_finetuning(model, shots, tuning, memory=2e5),
        "search": lambda: search_tuning(model, shots, tuning, learning_rates=(0.1, 0.2), epochs=(1, 2), memory=2e5),
    }
    if n < 5:
        works["tune"] = lambda: fine_tune(model, shots, tuning)
    for work in works.values():
        hook = Failing(n)
        model.add_hook("blocks.1.attn.hook_z", hook)
        with pytest.raises(RuntimeError, match="mine"):
            work()
        model.reset_hooks()
        before.check()


@pytest.mark.parametrize("kind", ["softmax", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_hooks_of_the_user_are_part_of_the_model(kind, method):
    """They act in every run, and stay."""
    model, shots = model_on_tokens(kind), token_shots((2, 1), (1, 2))
    plain = compare_with_finetuning(model, shots, FineTuning(method=method))

    def halve(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        return activation / 2

    name = "blocks.1.attn.hook_z" if kind == "softmax" else "blocks.1.attn.hook_v"
    model.add_hook(name, halve)
    logits = model.run_with_hooks(shots.zero_shot[0][None], fwd_hooks=[])
    hooked = compare_with_finetuning(model, shots, FineTuning(method=method))
    assert torch.equal(model.run_with_hooks(shots.zero_shot[0][None], fwd_hooks=[]), logits)
    assert len(model.hook_dict[name].fwd_hooks) == 1
    assert (hooked.zero_shot_loss - plain.zero_shot_loss).abs().min() > 1e-6
    if kind == "softmax":  # the same as weights that are half as large
        model.reset_hooks()
        with torch.no_grad():
            model.blocks[1].attn.W_O /= 2
        if method == "plain":
            halved = compare_with_finetuning(model, shots, FineTuning(method=method))
            assert_close(halved.finetuned_loss, hooked.finetuned_loss)
    model.reset_hooks()
    assert no_hook_left(model)


# ---- search ----


@pytest.mark.parametrize(("kind", "method"), [*(("softmax", method) for method in METHODS), ("gpt2", "plain")])
def test_a_search_is_fine_tuning_at_each(kind, method):
    model, shots = model_on_tokens(kind), token_shots(queries=(2, 1, 2))
    rates, epochs = (0.01, 0.1), (2, 1)
    base = FineTuning(method=method, examples_per_step=2)
    search = search_tuning(model, shots, base, learning_rates=rates, epochs=epochs)
    assert (search.learning_rates, search.epochs, search.tuning) == (rates, (1, 2), base)
    assert search.score.shape == search.loss.shape == (2, 2, 3)
    for i, rate in enumerate(rates):
        for j, n in enumerate(search.epochs):
            tuning = base.replace(learning_rate=rate, epochs=n)
            tuned = fine_tune(model, shots, tuning)
            for q, (tokens, target) in enumerate(zip(shots.zero_shot, shots.targets, strict=True)):
                if method == "linearized":
                    outputs = linearized_outputs(model, tokens[None], tuned.changes)[0]
                else:
                    with tuned.applied(model), torch.no_grad():
                        outputs = model(tokens[None])[0, -1]
                score, loss = score_and_loss(outputs.numpy(), target, shots.choices)
                assert search.score[i, j, q] == score
                assert search.loss[i, j, q].item() == pytest.approx(loss, rel=1e-6)
            assert search.score_of(tuning) == interval(search.score[i, j])


nan, inf = math.nan, math.inf
TABLES = {
    "score": ([[0.0, 0.5], [1.0, 0.5]], [[0.1, 0.1], [9.0, 0.1]], (1, 0)),
    "tie, by loss": ([[0.5, 0.5], [0.5, 0.2]], [[0.3, 0.2], [0.25, 0.1]], (0, 1)),
    "tie, by order": ([[0.5, 0.5], [0.5, 0.5]], [[0.3, 0.2], [0.2, 0.2]], (0, 1)),
    "NaN": ([[nan, 0.2], [0.1, nan]], [[nan, 5.0], [0.1, nan]], (0, 1)),
    "no finite loss": ([[1.0, 0.2], [1.0, 0.1]], [[nan, 5.0], [inf, 0.1]], (0, 1)),
    "errors": ([[-4.0, -1.0], [-0.5, -3.0]], [[4.0, 1.0], [0.5, 3.0]], (1, 0)),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_the_best_of_a_search(name):
    scores, losses, (rate, epoch) = TABLES[name]
    base = FineTuning(method="per_layer", examples_per_step=3)
    score, loss = (torch.tensor(of, dtype=torch.float64)[..., None].expand(-1, -1, 3) for of in (scores, losses))
    search = TuningSearch((0.1, 0.2), (1, 4), score, loss, base)
    assert search.best == FineTuning((0.1, 0.2)[rate], (1, 4)[epoch], "key_value", "per_layer", 3)


@pytest.mark.parametrize("epochs", [(1,), (1, 2), (5,)])
@pytest.mark.parametrize("method", METHODS)
def test_divergence(method, epochs):
    model = model_of("linear")
    shots = prompt_shots(model, inputs(model, 0, 1), "unlabelled")
    with pytest.raises(ValueError, match=r"diverged at all learning rates \(1e\+200, 1e\+250\): try lower ones"):
        search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e250), epochs=epochs)
    search = search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e-3), epochs=epochs)
    assert search.score[0].isnan().all()
    assert search.loss[0].isnan().all()
    assert search.score[1].isfinite().all()
    assert search.best.learning_rate == 1e-3


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate must be a finite number of at least 0, got -0.1"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number"),
        ({"epochs": 0}, "epochs must be an int of at least 1, got 0"),
        ({"examples_per_step": 0}, "examples_per_step must be an int of at least 1, got 0"),
        ({"parameters": ()}, "parameters names none"),
    ],
)
def test_settings_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FineTuning(**fields)


@pytest.mark.parametrize("field", ["method", "parameters"])
def test_unknown_settings(field):
    settings: dict[str, Any] = {field: "lora"}
    with pytest.raises((ValueError, TypeCheckError), match="'lora'"):
        FineTuning(**settings)


def test_parameters_that_a_model_does_not_have():
    model = model_on_tokens("softmax")
    with pytest.raises(ValueError, match=r"the model has no parameters \['W_X'\]; it has \['embed'"):
        fine_tune(model, token_shots(), FineTuning(parameters=("W_X", "embed")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_the_loss_does_not_depend_on(method, frozen):
    model = model_on_tokens("softmax").requires_grad_(not frozen)
    model.add_hook("blocks.1.attn.hook_q", lambda tensor, *, hook: tensor.detach() if tensor.requires_grad else tensor)
    with pytest.raises(ValueError, match=r"any of \['blocks.1.attn.W_Q'\]: there is nothing to tune"):
        fine_tune(model, token_shots(), FineTuning(parameters=("blocks.1.attn.W_Q",), method=method))


@pytest.mark.parametrize("method", METHODS)
def test_models_without_keys_and_values(method):
    made = model_of("identity", attention_weights="gradient_descent", n_heads=1, d_head=None)
    shots = prompt_shots(made, inputs(made, 0, 1), "unlabelled")
    with pytest.raises(ValueError, match=r"no key and value projections that can be found: name its parameters, par"):
        fine_tune(made, shots, FineTuning(method=method))
    step = ("blocks.0.attn.step_size", "blocks.1.attn.step_size")
    tuned = fine_tune(made, shots, FineTuning(0.01, method=method, parameters=step))
    assert set(tuned.changes) == set(step)
    assert not any(of.any() for of in tuned.changes.values())  # steps on targets of 0 are 0, whatever their size


def test_a_recurrent_model():
    model = lstm()
    shots = prompt_shots(model_of("gpt", n_context=3), inputs(model, 0, 1))  # the same tokens
    with pytest.raises(ValueError, match=r"HookedLSTM has no key and value projections"):
        fine_tune(model, shots)
    with pytest.raises(ValueError, match=r"the model has no hook 'blocks.0.hook_attn_out'"):
        fine_tune(model, shots, FineTuning(method="per_layer", parameters="all"))
    tuning = FineTuning(0.01, parameters="all", epochs=2)
    found = fine_tune(model, shots, tuning)
    names = [name for name, _ in model.named_parameters()]
    assert_changes(found.changes, sgd(model, names, shots, tuning)[0])


def test_models_that_cannot_be_tuned():
    for work in (fine_tune, search_tuning):
        with pytest.raises(TypeError, match="Linear has no hooks"):
            work(torch.nn.Linear(2, 2), token_shots())
        with pytest.raises(ValueError, match="training mode"):
            work(model_on_tokens("softmax").train(), token_shots())
        with pytest.raises(ValueError, match="a prompt of 18 tokens is longer than the model's context of n_ctx=16"):
            work(bridge(), token_shots((17,), (1,)))


def test_searches_that_are_refused():
    model, shots = model_on_tokens("softmax"), token_shots()
    for options in ({"learning_rates": ()}, {"epochs": ()}):
        with pytest.raises(ValueError, match="a search needs learning rates and epochs"):
            search_tuning(model, shots, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="epochs must be"):
        search_tuning(model, shots, epochs=(0, 1))
