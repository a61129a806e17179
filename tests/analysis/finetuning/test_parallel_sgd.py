"""Several fine-tunings at once against torch's own SGD, one after the other."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import FineTuning, FineTuningDivergedError
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.analysis.finetuning.sgd import LARGEST_GROUP, ParallelSGD, fine_tune_each
from tests.analysis.finetuning.oracles import Snapshot, model_on_tokens, sgd, token_shots
from tests.analysis.finetuning.test_sgd import assert_changes, key_value
from tests.analysis.interventions.oracles import inputs, model_of


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


def test_a_wrapped_model_takes_turns():
    model, shots = model_on_tokens("gpt2"), token_shots()
    tuned = fine_tune_each(model, [shots, shots], FineTuning(0.01), progress=False)
    assert_changes(tuned[0].changes, tuned[1].changes)
