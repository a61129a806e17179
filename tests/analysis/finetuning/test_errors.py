"""Errors of fine-tuning name the argument."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from mechicl.analysis.finetuning import (
    METHODS,
    FineTuning,
    FineTuningComparison,
    compare_on_prompts,
    compare_with_finetuning,
    draw_texts,
    fine_tune,
    measure_accuracy,
    search_on_prompts,
    search_tuning,
)
from mechicl.analysis.finetuning.forward_passes import linearized_outputs, value_and_derivative, weights_changed
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.text import TEXT_TASKS, topic_tokenizer
from tests.analysis.finetuning.oracles import Snapshot, model_on_tokens, token_shots
from tests.analysis.interventions.oracles import inputs, lstm, model_of
from tests.strategies import random_prompts
from tests.text.models import reader

MODEL, SHOTS, POINTS = model_on_tokens("softmax"), token_shots(), model_of("gpt", n_context=3)
LONG, LSTM = token_shots((17,), (1,)), lstm()
PROMPTS, IDS, POINT_SHOTS = random_prompts(POINTS.cfg, 2), torch.zeros(1, 3, dtype=torch.int64), prompt_shots(
    POINTS, inputs(LSTM, 0, 1)
)  # fmt: skip
MADE = model_of("identity", attention_weights="gradient_descent", n_heads=1, d_head=None)
WIDE = model_of("ids", d_vocab=20, n_ctx=16, n_layers=4, d_head=5)
OF_DEEP = {method: fine_tune(model_on_tokens("deep"), SHOTS, FineTuning(0.1, method=method)) for method in METHODS[:2]}
WEIGHTS = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([2.0], dtype=torch.float64)}


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def compare(model: Any = MODEL, shots: Any = SHOTS, tuning: Any = None, **options: Any) -> FineTuningComparison:
    return compare_with_finetuning(model, shots, tuning or FineTuning(0.1), **options)


def search(**options: Any) -> Any:
    return search_tuning(MODEL, SHOTS, **options)


def settings(**fields: Any) -> FineTuning:
    return FineTuning(**fields)


def change_weights() -> None:
    with weights_changed(MODEL, {"embed.W_E": torch.zeros(1)}):
        raise AssertionError


def of_unequal_models() -> FineTuningComparison:
    comparison = compare()
    of_a_layer = {name: value[:1] for name, value in vars(comparison).items() if value.ndim > 1}
    return FineTuningComparison.concatenate([comparison, dataclasses.replace(comparison, **of_a_layer)])


CASES: list[tuple[Any, str]] = [
    (lambda: settings(learning_rate=-0.1), "learning_rate must"),
    (lambda: settings(learning_rate=math.nan), "learning_rate must"),
    (lambda: settings(epochs=0), "epochs must"),
    (lambda: settings(examples_per_step=0), "examples_per_step must"),
    (lambda: settings(parameters=()), "parameters must"),
    (lambda: settings(parameters="lora"), "parameters must"),
    (lambda: settings(method="lora"), "method must"),
    (lambda: fine_tune(MODEL, SHOTS, settings(parameters=("W_X", "embed.W_E"))), r"parameters must .*\['W_X'\]"),
    *((lambda method=method: fine_tune(MADE, prompt_shots(MADE, inputs(MADE, 0, 1)), settings(method=method)),
       "parameters='all', or their names, such as 'blocks.0.attn.step_size'") for method in METHODS),
    (lambda: fine_tune(LSTM, POINT_SHOTS), "HookedLSTM has no separate key and value projections"),
    (lambda: fine_tune(LSTM, POINT_SHOTS, settings(method="per_layer", parameters="all")), "blocks.0.hook_attn_out"),
    (lambda: fine_tune(torch.nn.Linear(2, 2), SHOTS), "Linear has no hooks"),
    (lambda: search_tuning(torch.nn.Linear(2, 2), SHOTS), "Linear has no hooks"),
    (lambda: fine_tune(model_on_tokens("softmax").train(), SHOTS), r"training mode .*: call model.eval\(\) first"),
    (lambda: fine_tune(MODEL, LONG), "a prompt of 18 tokens is longer than the model's context of n_ctx=16"),
    (lambda: search_tuning(MODEL, LONG), "a prompt of 18 tokens"),
    (lambda: OF_DEEP["linearized"].applied(MODEL), r"take linearized_outputs"),
    (lambda: linearized_outputs(MODEL, IDS, {"W_X": torch.zeros(1)}), "'W_X', which is not in the model"),
    (lambda: linearized_outputs(MODEL, IDS, {"embed.W_E": torch.zeros(1)}), r"which is of shape \(20, 8\)"),
    (change_weights, "'embed.W_E', which is of shape"),
    (lambda: value_and_derivative(lambda w: WithoutForwardMode.apply(w["a"]), WEIGHTS, WEIGHTS), "no forward-mode"),
    (lambda: value_and_derivative(lambda w: w["a"].expand(2) + w["b"].expand(3), WEIGHTS, WEIGHTS), "must match"),
    (lambda: search(learning_rates=()), "learning_rates and epochs must not be empty"),
    (lambda: search(epochs=()), "learning_rates and epochs must not be empty"),
    (lambda: search(learning_rates=(0.1, math.inf)), "learning_rates must be a sequence of a number that is positive"),
    (lambda: search(epochs=(0, 1)), "epochs"),
    (lambda: search(widen=-1), "widen must"),
    (lambda: search(choose_by="epochs"), "choose_by must"),
    *((lambda tuned=tuned: compare(tuning=tuned), "'blocks.2.attn.W_K', which is not in the model")
      for tuned in OF_DEEP.values()),
    (lambda: compare(WIDE, tuning=OF_DEEP["plain"]), r"\(2, 8, 4\) is for the parameter 'blocks.0.attn.W_K'"),
    (lambda: compare(memory=1000), "memory=1000 bytes is too little"),
    (lambda: compare(torch.nn.Linear(2, 2)), "Linear has no hooks"),
    (lambda: compare(LSTM), "'blocks.0.hook_attn_out'"),
    (lambda: compare(shots=token_shots((3, 3, 3, 3), (2,))), "prompt of 23 tokens"),
    (lambda: FineTuningComparison.concatenate([]), "parts must be of models of one shape"),
    (of_unequal_models, r"parts must be of models of one shape, got \[\(1, 2\), \(2, 2\)\] heads"),
    (lambda: prompt_shots(POINTS, PROMPTS), "prompt must be one prompt with context points"),
    (lambda: prompt_shots(POINTS, PROMPTS[:1].prefix(0)), "prompt must be one prompt with context points"),
    (lambda: prompt_shots(POINTS, random_prompts(dataclasses.replace(POINTS.cfg, x_dim=3), 1)), "x_dim=2"),
    (lambda: search_on_prompts(POINTS, PROMPTS[:0]), "prompt must be one prompt"),
    (lambda: compare_on_prompts(model_of("gpt"), PROMPTS, FineTuning()), "a prompt of 7 tokens is longer than"),
    (lambda: measure_accuracy(reader(), topic_tokenizer(), draw_texts(TEXT_TASKS["farm"], n_demonstrations=6), (7,)),
     "n_demonstrations must be 0 to 6, got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named"), CASES)
def test_errors_name_the_argument(call, named):
    before = Snapshot(MODEL)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=named):
        call()
    before.check()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_the_loss_does_not_depend_on(method, frozen):
    model = model_on_tokens("softmax").requires_grad_(not frozen)
    model.add_hook("blocks.1.attn.hook_q", lambda tensor, *, hook: tensor.detach() if tensor.requires_grad else tensor)
    with pytest.raises(ValueError, match=r"does not depend on any of the parameters \['blocks.1.attn.W_Q'\]"):
        fine_tune(model, token_shots(), FineTuning(parameters=("blocks.1.attn.W_Q",), method=method))
