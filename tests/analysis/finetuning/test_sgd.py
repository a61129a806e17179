"""Fine-tuning, alone, in parallel and in searches, against torch's own SGD; the model stays unchanged."""

import copy
import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import mechicl
from mechicl.analysis.finetuning import (
    METHODS,
    FineTuning,
    FineTuningDivergedError,
    compare_with_finetuning,
    fine_tune,
    search_tuning,
)
from mechicl.analysis.finetuning.hyperparameter_search import TuningSearch
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.analysis.finetuning.sgd import LARGEST_GROUP, ParallelSGD, find_tuned_parameters, fine_tune_each
from mechicl.models import HookedTransformer, TransformerConfig
from tests.analysis.finetuning.oracles import (
    OURS,
    Snapshot,
    example_loss,
    linearized_outputs,
    model_on_tokens,
    score_and_loss,
    sgd,
    token_shots,
    wrapped_model,
)
from tests.analysis.interventions.oracles import inputs, model_of, no_hook_left


def assert_changes(changes, expected, rtol=1e-8):
    assert set(changes) == set(expected)
    largest = max(change.abs().max().item() for change in expected.values())
    assert largest > 1e-4
    for name, change in expected.items():
        assert_close(
            changes[name], change, atol=1e-9 * largest, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


def key_value(model):
    """Keys' and values' own parameters; GPT-2's bridge has separate ones too."""
    parts = {"W_K", "W_V", "b_K", "b_V", "k", "v", "k_proj", "v_proj"}
    return [name for name, _ in model.named_parameters() if parts & set(name.split("."))]


@pytest.mark.parametrize(("kind", "parameters", "examples_per_step"), [
    *((kind, *how) for kind in ("points", "softmax") for how in (("key_value", 1), ("all", 2), ("named", 7))),
    *((kind, "key_value", 1) for kind in ("linear", "one head", "deep", "looped", "sink", "momentum", "gpt2", "llama")),
    ("gpt2", "key_value", 2),
])  # fmt: skip
def test_plain_fine_tuning_is_sgd(kind, parameters, examples_per_step):
    model = model_of("gpt", n_context=3) if kind == "points" else model_on_tokens(kind)
    shots = prompt_shots(model, inputs(model, 0, 1)) if kind == "points" else token_shots()
    every = [name for name, _ in model.named_parameters()]
    names = {"key_value": key_value(model), "all": every, "named": ["blocks.1.attn.W_V", every[-1]]}[parameters]
    parameters = tuple(names) if parameters == "named" else parameters
    tuning = FineTuning(0.02, epochs=3, parameters=parameters, examples_per_step=examples_per_step)
    tuned = fine_tune(model, shots, tuning)
    changes, losses = sgd(model, shots, tuning, names)  # of a looped model, one block's
    is_bridge = kind in ("gpt2", "llama")
    assert_changes(tuned.changes, changes, rtol=1e-5 if is_bridge else 1e-8)
    assert_close(tuned.losses, losses, atol=1e-6 if is_bridge else 1e-10, rtol=1e-6 if is_bridge else 1e-8)


def test_keys_and_values_that_heads_share_are_tuned():
    cfg = TransformerConfig(d_vocab=11, n_ctx=9, d_model=8, n_heads=4, d_head=2, n_key_value_heads=2, n_layers=2)
    shared = ["_W_K", "_W_V", "_b_K", "_b_V"]
    expected = [f"blocks.{layer}.attn.{name}" for layer in (0, 1) for name in shared]
    assert sorted(find_tuned_parameters(HookedTransformer(cfg), "key_value")) == expected


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
    else:
        stream = model.embed_tokens(tokens[None])
        for block in model.blocks:
            stream = stream.detach()
            written = block.attn(block.ln1(stream))
            losses.append(example_loss(model.read_out(written)[0, -1], target, choices))
            stream = block(stream)
    return torch.stack(losses)


@pytest.mark.parametrize("kind", [*OURS, "gpt2"])
def test_each_layer_separately(kind):
    model, shots = model_on_tokens(kind), token_shots((2,), (1,))
    tuned = fine_tune(model, shots, FineTuning(1.0, method="per_layer"))
    bare = wrapped_model(kind) if kind == "gpt2" else model
    losses = losses_by_layer(bare, kind, shots.examples[0], shots.example_targets[0], shots.choices)
    assert_close(tuned.losses[0, 0], losses.sum(), atol=1e-6, rtol=1e-6)
    if kind == "gpt2":  # queries, keys and values of all heads are one matrix, transposed
        gradient = torch.autograd.grad(losses.sum(), bare.transformer.h[1].attn.c_attn.weight)[0][:, 8:16]
        (name,) = (name for name in tuned.changes if "h.1." in name and ".k." in name and name.endswith("weight"))
        assert_close(tuned.changes[name], -gradient.T, atol=1e-5, rtol=1e-5)
    else:
        parameters = dict(bare.named_parameters())
        gradients = torch.autograd.grad(losses.sum(), [parameters[name] for name in tuned.changes])
        assert_changes(tuned.changes, {n: -g for n, g in zip(tuned.changes, gradients, strict=True)})


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
    before, tuning = Snapshot(model), FineTuning(method=method, epochs=3)
    for work in (
        lambda: fine_tune(model, shots, tuning),
        lambda: compare_with_finetuning(model, shots, tuning),
        lambda: search_tuning(model, shots, tuning, learning_rates=(0.1, 0.2), epochs=(1, 2)),
    ):
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


# ---- several fine-tunings at once ----
@pytest.mark.parametrize("examples_per_step", [1, 2])
@pytest.mark.parametrize("kind", ["gpt", "linear", "looped"])
def test_models_on_other_prompts_side_by_side(kind, examples_per_step):
    model = model_of(kind, n_context=3)
    prompts = inputs(model, 0, 3)
    shots = [prompt_shots(model, prompt) for prompt in prompts.split(1)]
    rate = 2e-5 if kind == "linear" else 0.01  # nothing bounds linear attention
    tuning, before = FineTuning(rate, epochs=2, examples_per_step=examples_per_step), Snapshot(model)
    tuned = fine_tune_each(model, shots, tuning, progress=False)
    before.check()
    for each, part in zip(tuned, shots, strict=True):
        changes, losses = sgd(model, part, tuning, key_value(model))
        assert_changes(each.changes, changes)
        assert_close(each.losses, losses, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("examples_per_step", [1, 2])
@pytest.mark.parametrize("method", ["plain", "linearized", "per_layer"])
@pytest.mark.parametrize("kind", ["texts", "points"])
def test_learning_rates_side_by_side_or_in_turns(kind, method, examples_per_step):
    if kind == "texts":
        model, shots = model_on_tokens("softmax"), token_shots()
    else:
        model = model_of("gpt", n_context=3)
        shots = prompt_shots(model, inputs(model, 0, 1))
    rates, settings = (0.01, 0.03), FineTuning(epochs=2, method=method, examples_per_step=examples_per_step)
    together = ParallelSGD(model, [shots, shots], settings, rates)
    in_turns = ParallelSGD(model, [shots, shots], settings, rates)
    in_turns.vectorized = False
    losses = torch.stack(list(together.epochs()), 1)
    assert_close(torch.stack(list(in_turns.epochs()), 1), losses, atol=1e-10, rtol=1e-8)
    for i, rate in enumerate(rates):
        tuning = replace(settings, learning_rate=rate)
        alone = ParallelSGD(model, [shots], tuning)
        assert_close(losses[i], torch.stack([epoch[0] for epoch in alone.epochs()]), atol=1e-10, rtol=1e-8)
        for sgd_ in (together, in_turns):
            assert_changes(sgd_.changes_of(i), alone.changes_of(0))
        if method == "plain":
            assert_changes(together.changes_of(i), sgd(model, shots, tuning, key_value(model))[0])


def test_a_copy_that_diverges_leaves_the_others_unchanged():
    model = model_of("linear", n_context=3)
    shots = prompt_shots(model, inputs(model, 0, 1))
    parallel = ParallelSGD(model, [shots, shots], FineTuning(epochs=9), (2e-4, 10.0))
    for _ in parallel.epochs():
        pass
    finite = [all(change.isfinite().all() for change in parallel.changes_of(i).values()) for i in range(2)]
    assert finite == [True, False]
    tuning = FineTuning(2e-4, epochs=9)
    assert_changes(parallel.changes_of(0), sgd(model, shots, tuning, key_value(model))[0])
    with pytest.raises(FineTuningDivergedError, match="learning_rate=10"):
        fine_tune_each(model, [shots, shots], FineTuning(10.0, epochs=9), progress=False)


def test_more_than_a_group_of_unequal_sets():
    model = model_of("gpt", n_context=3)
    prompts = inputs(model, 0, LARGEST_GROUP + 2)
    shots = [prompt_shots(model, prompt) for prompt in prompts.split(1)]
    shots[1] = prompt_shots(model, prompts[1:2].prefix(2))
    tuning = FineTuning(0.01)
    tuned = fine_tune_each(model, shots, tuning, progress=False)
    assert len(tuned) == len(shots)
    for i in (0, 1, 2, LARGEST_GROUP + 1):
        assert_changes(tuned[i].changes, sgd(model, shots[i], tuning, key_value(model))[0])


# ---- searches ----
@pytest.mark.parametrize(("kind", "method"), [*(("softmax", method) for method in METHODS), ("gpt2", "plain")])
def test_a_search_is_fine_tuning_at_each_setting(kind, method):
    model, shots = model_on_tokens(kind), token_shots(queries=(2, 1, 2))
    rates, epochs = (0.01, 0.1), (2, 1)
    settings = FineTuning(method=method, examples_per_step=2)
    with mechicl.settings(memory=1.3e5):
        search = search_tuning(model, shots, settings, learning_rates=rates, epochs=epochs)
    assert (search.learning_rates, search.epochs, search.tuning) == (rates, (1, 2), settings)
    assert search.score.shape == search.loss.shape == (2, 2, 3)
    for i, rate in enumerate(rates):
        for j, n in enumerate(search.epochs):
            tuned = fine_tune(model, shots, dataclasses.replace(settings, learning_rate=rate, epochs=n))
            for q, (tokens, target) in enumerate(zip(shots.zero_shot, shots.targets, strict=True)):
                if method == "linearized":
                    outputs = linearized_outputs(model, tokens[None], tuned.changes)[0]
                else:
                    with tuned.applied(model), torch.no_grad():
                        outputs = model(tokens[None])[0, -1]
                score, loss = score_and_loss(outputs.numpy(), target, shots.choices)
                assert search.score[i, j, q] == score
                assert search.loss[i, j, q].item() == pytest.approx(loss, rel=1e-6)
    table = search.to_dataframe()
    assert table["learning_rate"].tolist() == [0.01, 0.01, 0.1, 0.1]
    assert table["epoch"].tolist() == [1, 2, 1, 2]


nan, inf = math.nan, math.inf
TABLES = {
    "score": ([[0.0, 0.5], [1.0, 0.5]], [[0.1, 0.1], [9.0, 0.1]], (1, 0), True),
    "tie, by loss": ([[0.5, 0.5], [0.5, 0.2]], [[0.3, 0.2], [0.25, 0.1]], (0, 1), True),
    "NaN": ([[nan, 0.2], [0.1, nan]], [[nan, 5.0], [0.1, nan]], (0, 1), True),
    "no finite loss": ([[1.0, 0.2], [1.0, 0.1]], [[nan, 5.0], [inf, 0.1]], (0, 1), True),
    "errors": ([[-4.0, -1.0], [-0.5, -3.0], [-1.0, -1.0]], [[4.0, 1.0], [0.5, 3.0], [1.0, 1.0]], (1, 0), False),
    "one rate, one epoch": ([[0.9, 0.1]], [[0.1, 0.1]], (0, 0), False),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_the_best_of_a_search(name):
    scores, losses, (rate, epoch), at_edge = TABLES[name]
    settings = FineTuning(method="per_layer", examples_per_step=3)
    score, loss = (torch.tensor(table, dtype=torch.float64)[..., None].expand(-1, -1, 3) for table in (scores, losses))
    rates = (0.1, 0.2, 0.3)[: len(scores)]
    search = TuningSearch(rates, (1, 4), score, loss, settings)
    assert search.best == FineTuning(rates[rate], (1, 4)[epoch], "key_value", "per_layer", 3)
    assert search.at_edge == at_edge


@pytest.mark.parametrize(
    ("method", "epochs"), [("plain", (1,)), ("plain", (1, 2)), ("linearized", (5,)), ("per_layer", (1, 2))]
)
def test_divergence(method, epochs):
    model = model_of("linear")
    shots = prompt_shots(model, inputs(model, 0, 1))
    with pytest.raises(ValueError, match=r"diverged at all learning rates \(1e\+200, 1e\+250\): try lower ones"):
        search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e250), epochs=epochs)
    search = search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e-3), epochs=epochs)
    assert search.score[0].isnan().all()
    assert search.loss[0].isnan().all()
    assert search.score[1].isfinite().all()
    assert search.best.learning_rate == 1e-3
    with pytest.raises(ValueError, match=r"diverged at learning_rate=1e\+200: take a lower one"):
        fine_tune(model, shots, FineTuning(1e200, epochs=5, method=method))


def test_a_grid_grows_where_its_best_lies_on_an_edge():
    score = torch.zeros(3, 2, 1, dtype=torch.float64)
    loss = torch.tensor([[3.0, 3.0], [2.0, 2.0], [1.5, 1.0]], dtype=torch.float64)[..., None]
    search = TuningSearch((0.1, 0.3, 1.0), (1, 4), score, loss, FineTuning())
    assert search.at_edge
    assert search.wider() == ((0.1, 0.3, 1.0, 3.3), (1, 4, 16))
    assert dataclasses.replace(search, loss=loss.flip(0)).wider() == ((0.033, 0.1, 0.3, 1.0), (1, 4, 16))
    inside = dataclasses.replace(search, loss=loss[[0, 2, 1]].flip(1))
    assert not inside.at_edge
    assert inside.wider() == ((0.1, 0.3, 1.0), (1, 4))


def test_a_search_that_widens_is_the_search_of_the_wider_grid():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(2, 1))
    narrow = search_tuning(model, shots, learning_rates=(1e-5, 1e-4), epochs=(1, 2), choose_by="loss", progress=False)
    assert narrow.at_edge
    rates, epochs = narrow.wider()
    wide = search_tuning(model, shots, learning_rates=rates, epochs=epochs, progress=False)
    grown = search_tuning(
        model, shots, learning_rates=(1e-5, 1e-4), epochs=(1, 2), choose_by="loss", widen=1, progress=False
    )
    assert (grown.learning_rates, grown.epochs) == (rates, epochs)
    torch.testing.assert_close(grown.loss, wide.loss)
