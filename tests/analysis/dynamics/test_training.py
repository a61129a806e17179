"""Analyses at snapshots against those of each model, and transitions against a plain loop."""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.analysis import (
    align,
    align_over_training,
    find_transitions,
    measure_over_training,
    score_heads,
    score_heads_over_training,
)
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import interval
from tests.training.runs import EXACT, MODEL, READER, TASK

STEP = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})


def checkpoint(*snapshots: list[HookedTransformer]) -> Checkpoint:
    """A training with these models, one per seed, at steps 0, 4, 8, ..."""
    states = [[model.state_dict() for model in models] for models in snapshots]
    weights = {
        name: torch.stack([torch.stack([state[name] for state in at]) for at in states]) for name in states[0][0]
    }
    return Checkpoint("made", list(snapshots[-1]), {}, Snapshots(tuple(range(0, 4 * len(snapshots), 4)), weights))


def random_checkpoint(cfg: TransformerConfig, n_snapshots: int, n_seeds: int) -> Checkpoint:
    return checkpoint(*[[HookedTransformer(cfg, seed=10 * i + j) for j in range(n_seeds)] for i in range(n_snapshots)])


POINTS, TOKENS = (random_checkpoint(cfg, 3, 2) for cfg in (MODEL, READER))
BARE = Checkpoint("bare", POINTS.models, {})


def test_every_entry_is_the_alignment_of_that_model_at_that_snapshot():
    prompts = TASK.sample(7, seed=1)
    result = align_over_training(POINTS, STEP, prompts)
    assert result.steps == (0, 4, 8)
    for i in range(3):
        for j, model in enumerate(POINTS.models_at(i)):
            expected = {name: values.mean() for name, values in align(model.double(), STEP, prompts).samples().items()}
            expected["mse"] = squared_errors(model, prompts).mean()
            for name, value in expected.items():
                assert result.samples()[name].shape == (3, 2)
                assert result.samples()[name][i, j].item() == pytest.approx(value.item(), rel=1e-6)
    assert len(set(result.mse.flatten().tolist())) == 6
    assert all(model.cfg.dtype == torch.float32 for model in POINTS.models)


def test_prompts_without_a_cosine_are_left_out_of_its_mean():
    prompts = TASK.sample(6, seed=1, dtype=torch.float64)
    prompts.ys[:2] = 0  # gradient descent stays at 0 on these
    result, rest = (align_over_training(POINTS, STEP, part) for part in (prompts, prompts[2:]))
    torch.testing.assert_close(result.sensitivity_cosine, rest.sensitivity_cosine)


def test_every_score_is_that_of_the_best_head_of_that_model_at_that_snapshot():
    names = ("previous_token", "induction", "copying")
    result = score_heads_over_training(TOKENS, names, n_prompts=5, seed=2)
    assert result.steps == (0, 4, 8)
    for i in range(3):
        for j, model in enumerate(TOKENS.models_at(i)):
            alone = score_heads(model, n_prompts=5, seed=2)
            for name in names:
                assert result.scores[name][i, j].item() == pytest.approx(alone.mean(name).max().item(), rel=1e-6)
    assert len(set(result.scores["induction"].flatten().tolist())) == 6  # every snapshot and seed has its own


def test_models_on_points_are_scored_on_prompts():
    cfg = EXACT.replace(prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax")
    made, prompts = random_checkpoint(cfg, 2, 1), TASK.sample(6, seed=0, dtype=torch.float64)
    result = score_heads_over_training(made, ["target_to_input"], prompts=prompts)
    expected = score_heads(made.models_at(-1)[0], prompts=prompts).mean("target_to_input").max()
    assert result.scores["target_to_input"][-1].item() == pytest.approx(expected.item())


def test_a_list_of_models_is_a_training_of_one_seed():
    prompts, models = TASK.sample(5, seed=0), [POINTS.models_at(i)[0] for i in range(3)]
    listed, whole = (align_over_training(each, STEP, prompts) for each in (models, POINTS))
    assert listed.steps == (0, 1, 2)
    torch.testing.assert_close(listed.mse, whole.mse[:, :1])
    assert models[0].cfg.dtype == torch.float32  # the user's models are not converted
    tokens = [TOKENS.models_at(i)[1] for i in range(3)]
    scores, expected = (score_heads_over_training(each, n_prompts=3).scores["induction"] for each in (tokens, TOKENS))
    torch.testing.assert_close(scores, expected[:, 1:])


# ---- transitions ----
def of_one(losses: list[float], steps: list[int] | None = None, **options) -> tuple[float, ...]:
    """Before, after, start and end of one seed's curve, evaluated every ten steps."""
    steps = [10 * i for i in range(len(losses))] if steps is None else steps
    result = find_transitions(steps, [[loss] for loss in losses], **options)
    return tuple(field.item() for field in (result.before, result.after, result.start, result.end))


def test_each_seed_has_its_own_crossings():
    # from 1 to 0: a tenth is done at 0.9, half at 0.5, nine tenths at 0.1
    falling = [1.0, 0.95, 0.85, 0.6, 0.3, 0.2, 0.05, 0.0]
    late, flat = [2.0] * 6 + [0.5] * 2, [1.0] * 8
    result = find_transitions([0, 1, 10, 20, 30, 45, 60, 100], list(zip(falling, late, flat, strict=True)))
    assert result.plateau.tolist() == [1, 2, 1]
    assert result.final.tolist() == [0, 0.5, 1]
    fields = (result.before, result.after, result.start, result.end, result.steps)
    assert [each[:2].tolist() for each in fields] == [[20, 45], [30, 60], [10, 60], [60, 60], [25, 52.5]]
    assert result.fell.tolist() == [True, True, False]
    assert result.spread() == 52.5 / 25
    assert result.mean_step(0.9) == interval(torch.tensor([25.0, 52.5]), 0.9)


def test_transitions_at_step_1_are_no_share():
    result = find_transitions([0, 2, 4], [[1.0] * 3, [0.0] * 3, [0.0] * 3])
    assert result.steps.tolist() == [1, 1, 1]
    assert (result.mean_step().low, result.mean_step().high) == (1, 1)


NAN, PLUNGE = math.nan, [1.0] * 10 + [0.0] * 29


def test_any_quantity_is_measured_at_every_snapshot():
    prompts = TASK.sample(7, seed=1)

    def measure(model):
        return {"error": squared_errors(model, prompts)[:, 0], "norm": model.blocks[0].attn.W_Q.norm()}

    result = measure_over_training(POINTS, measure, progress=False)
    assert result.steps == (0, 4, 8)
    for i, models in enumerate(POINTS.models_at(i) for i in range(3)):
        expected = torch.stack([squared_errors(model, prompts).mean() for model in models]).double()
        torch.testing.assert_close(result.quantities["error"][i], expected)
    made = []

    def load(model):
        made.append(model)
        return model

    loaders = {step: partial(load, model) for step, model in ((5, POINTS.models[0]), (2, POINTS.models[1]))}
    result = measure_over_training(loaders, measure, progress=False)
    assert (result.steps, made) == ((2, 5), [POINTS.models[1], POINTS.models[0]])
    errors = [squared_errors(model, prompts)[:, 0].double() for model in made]
    torch.testing.assert_close(result.quantities["error"], torch.stack(errors))
    with pytest.raises(ValueError, match="as many samples at each snapshot, got at steps 0 and 1"):
        measure_over_training(made, lambda model: {"n": torch.zeros(1 + (model is made[1]))}, progress=False)


@pytest.mark.parametrize(("losses", "options", "expected"), [
    ([1.0, 0.0, 0.0, 1.0, 0.7, 0.2, 0.0, 0.0], {}, (40, 50, 40, 60)),  # it falls at its last crossing
    ([*PLUNGE, 0.8], {}, (NAN,) * 4),  # above it at the last evaluation
    ([*PLUNGE, 0.3], {}, (90, 100, 100, NAN)),  # half of the fall is over, nine tenths are not
    ([1.0, 0.95, 0.93, 0.92], {}, (NAN,) * 4),  # too little
    ([1.0, 0.75, 0.75], {"fall": 0.25}, (0, 10, 10, 10)),
    ([4.0, 2.0, 1.2, 0.9, 0.3, 0.0], {"plateau": 2.0}, (20, 30, 20, 50)),  # 0.3 is not below a tenth of 2
    ([0.3, 0.3, 0.1, 0.0], {"plateau": 2.0, "steps": [5, 10, 15, 20]}, (5, 5, 5, 15)),  # below from the first on
])  # fmt: skip
def test_where_a_curve_falls(losses, options, expected):
    assert of_one(losses, **options) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("losses", "mean"), [([[1.0], [0.0]], 0.5), ([[1.0], [1.0]], NAN), ([[], []], NAN)])
def test_one_seed_or_none_has_neither_spread_nor_interval(losses, mean):
    result = find_transitions([0, 1], torch.tensor(losses))
    found = result.mean_step()
    assert (result.spread(), found.mean, found.low) == pytest.approx((NAN, mean, NAN), nan_ok=True)


def test_a_transition_before_the_first_step_makes_no_infinite_spread():
    result = find_transitions([0, 9, 11], [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], plateau=1.0)
    assert result.steps.tolist() == [0, 10]
    assert result.spread() == 10


def by_loop(steps: list[int], losses: list[float], fall: float) -> tuple[float, ...]:
    """Before, after, start, end by walking back from the end."""
    tail = sorted(losses[len(losses) - max(1, len(losses) // 20) :])
    plateau, final = losses[0], tail[(len(tail) - 1) // 2]
    if final >= plateau or plateau - final < fall * plateau:
        return (NAN,) * 4
    after = []
    for share in (0.1, 0.5, 0.9):
        i = len(losses)
        while i > 0 and losses[i - 1] <= plateau - share * (plateau - final):
            i -= 1
        after.append(i)
    if after[1] == len(losses):
        return (NAN,) * 4
    end = steps[after[2]] if after[2] < len(losses) else NAN
    return steps[after[1] - 1], steps[after[1]], steps[after[0]], end


LEVELS = st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.6, 0.85, 1.0, 2.0])


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3), LEVELS), min_size=2, max_size=70),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(1, 4),
)
@example([(1, 1.0)] * 30 + [(1, 0.0)] * 9 + [(1, 1.0)], 0.1, 1)
def test_a_plain_loop_finds_the_same(pieces, fall, repeats):
    gaps, losses = ([piece[i] for piece in pieces for _ in range(repeats)] for i in (0, 1))
    steps = [sum(gaps[:i]) for i in range(len(gaps))]
    assert of_one(losses, steps, fall=fall) == pytest.approx(by_loop(steps, losses, fall), nan_ok=True)


@pytest.mark.parametrize(("call", "error", "named"), [
    (lambda: align_over_training(BARE, STEP, TASK.sample(2, seed=0)), CheckpointError, "bare was saved without sn"),
    (lambda: score_heads_over_training([]), ValueError, "checkpoint must be .* got none"),
    (lambda: score_heads_over_training(TOKENS, ["inducton"]), ValueError, "no score 'inducton'"),
    (lambda: score_heads_over_training(POINTS), ValueError, "paired|scored on prompts"),
    (lambda: find_transitions([0], [[1.0]]), ValueError, "2 steps"),
    (lambda: find_transitions([0, 1, 2], [[1.0], [0.5]]), ValueError, "with 3 >= 2 steps"),
    (lambda: find_transitions([0, 0], [[1.0], [0.5]]), ValueError, "steps must increase"),
    (lambda: find_transitions([0, 1], [[1.0], [NAN]]), ValueError, r"losses\[1\]\[0\] must be a finite number"),
])  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_the_final_value_of_an_even_number_of_losses_is_their_median():
    losses = torch.ones(40, 1)
    losses[20:], losses[-2:, 0] = 0.2, torch.tensor([0.1, 0.3])  # the last twentieth
    assert find_transitions(range(40), losses).final.item() == pytest.approx(0.2)
