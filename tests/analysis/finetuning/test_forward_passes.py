"""A model's first-order expansion against differences, its memory, and errors of fine-tuning."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    METHODS,
    FineTuning,
    FineTuningComparison,
    compare_with_finetuning,
    draw_texts,
    fine_tune,
    measure_accuracy,
    search_tuning,
)
from mechicl.analysis.finetuning.forward_passes import value_and_derivative, weights_changed
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.text import TEXT_TASKS, topic_tokenizer
from tests.analysis.finetuning.oracles import (
    D_VOCAB,
    OURS,
    Snapshot,
    added,
    linearized_outputs,
    model_on_tokens,
    token_shots,
)
from tests.analysis.interventions.oracles import bridge, inputs, lstm, model_of
from tests.analysis.interventions.test_runs import peak
from tests.strategies import random_prompts
from tests.text.models import reader


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


OF_POINTS = ("gpt", "linear", "identity", "full", "clipped", "mixed", "looped", "float32")
STEPS = {"llama": (1e-3, 1e-3), "float32": (1e-2, 1e-2)}  # in float32, or with norms and softmax in float32


@pytest.mark.parametrize(("kind", "of_points"), [
    *((kind, False) for kind in (*OURS, "gpt2", "llama")), *((kind, True) for kind in OF_POINTS),
])  # fmt: skip
def test_the_expansion_by_differences(kind, of_points):
    model = model_of(kind) if of_points else model_on_tokens(kind)
    tokens = torch.randint(D_VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    tokens = model.encode(random_prompts(model.cfg, 3)) if of_points else tokens
    changes, before = changes_of(model), Snapshot(model)
    outputs = linearized_outputs(model, tokens, changes)
    step, tolerance = STEPS.get(kind, (1e-6, 1e-6) if of_points else (1e-5, 1e-7))
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


# ---- errors ----
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
    (lambda: settings(parameters=()), "parameters must"),
    (lambda: fine_tune(MODEL, SHOTS, settings(parameters=("W_X", "embed.W_E"))), r"parameters must .*\['W_X'\]"),
    *((lambda method=method: fine_tune(MADE, prompt_shots(MADE, inputs(MADE, 0, 1)), settings(method=method)),
       "name parameters, such as 'blocks.0.attn.step_size'") for method in METHODS),
    (lambda: fine_tune(LSTM, POINT_SHOTS), "HookedLSTM has no separate keys and values"),
    (lambda: fine_tune(LSTM, POINT_SHOTS, settings(method="per_layer", parameters="all")), "blocks.0.hook_attn_out"),
    (lambda: fine_tune(model_on_tokens("softmax").train(), SHOTS), r"training mode .*: call model.eval\(\) first"),
    (lambda: fine_tune(MODEL, LONG), "a prompt of 18 tokens is longer than the model's context of n_ctx=16"),
    (lambda: OF_DEEP["linearized"].applied(MODEL), "tune with another method"),
    (lambda: linearized_outputs(MODEL, IDS, {"W_X": torch.zeros(1)}), "'W_X', which is not in the model"),
    (lambda: linearized_outputs(MODEL, IDS, {"embed.W_E": torch.zeros(1)}), r"which is of shape \(20, 8\)"),
    (change_weights, "'embed.W_E', which is of shape"),
    (lambda: value_and_derivative(lambda w: WithoutForwardMode.apply(w["a"]), WEIGHTS, WEIGHTS), "no forward-mode"),
    (lambda: search(learning_rates=()), "learning_rates and epochs must not be empty"),
    (lambda: search(learning_rates=(0.1, math.inf)), "learning_rates must be a sequence of a number that is positive"),
    *((lambda tuned=tuned: compare(tuning=tuned), "'blocks.2.attn.W_K', which is not in the model")
      for tuned in OF_DEEP.values()),
    (lambda: compare(WIDE, tuning=OF_DEEP["plain"]), r"\(2, 8, 4\) is for the parameter 'blocks.0.attn.W_K'"),
    (lambda: compare(shots=token_shots((3, 3, 3, 3), (2,))), "prompt of 23 tokens"),
    (of_unequal_models, r"parts must be of models of one shape, got \[\(1, 2\), \(2, 2\)\] heads"),
    (lambda: prompt_shots(POINTS, PROMPTS), "prompt must be one prompt with context points"),
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
