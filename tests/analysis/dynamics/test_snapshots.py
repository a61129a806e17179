"""Transitions against curves made by hand and a plain loop; alignment against `align` at each snapshot."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mechicl import algorithms, constructions
from mechicl.analysis import align, align_over_training, find_transitions, score_heads, score_heads_over_training
from mechicl.analysis.dynamics.snapshots import Transitions
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots
from mechicl.learners import AlgorithmLearner
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from mechicl.training import train
from tests.training.runs import EXACT, TASK, reading, small


def of_one(losses: list[float], steps: list[int] | None = None, **options) -> tuple[float, ...]:
    """Before, after, start and end of one seed's curve, evaluated every ten steps."""
    steps = [10 * i for i in range(len(losses))] if steps is None else steps
    found = find_transitions(steps, [[loss] for loss in losses], **options)
    return tuple(field.item() for field in (found.before, found.after, found.start, found.end))


def no_transition(found: tuple[float, ...]) -> bool:
    return all(math.isnan(value) for value in found)


# ---- transitions ----


def test_each_seed_has_its_own_crossings():
    # from 1 to 0: a tenth is behind at 0.9, half at 0.5, nine tenths at 0.1
    falling = [1.0, 0.95, 0.85, 0.6, 0.3, 0.2, 0.05, 0.0]
    late = [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 0.5]
    steps = [0, 1, 10, 20, 30, 45, 60, 100]
    found = find_transitions(steps, list(zip(falling, late, strict=True)))
    assert found.plateau.tolist() == [1, 2]
    assert found.final.tolist() == [0, 0.5]
    assert found.before.tolist() == [20, 45]
    assert found.after.tolist() == [30, 60]
    assert found.start.tolist() == [10, 60]
    assert found.end.tolist() == [60, 60]
    assert found.steps.tolist() == [25, 52.5]
    assert found.fell.tolist() == [True, True]
    assert found.spread() == 52.5 / 25
    assert found.interval(0.9) == interval(torch.tensor([25.0, 52.5]), 0.9)


def test_a_tensor_gives_the_same_as_a_list():
    losses = [[3.0, 1.0], [1.0, 0.9], [0.5, 0.2], [0.5, 0.2]]
    a, b = (
        find_transitions([0, 5, 6, 9], losses),
        find_transitions([0, 5, 6, 9], torch.tensor(losses, dtype=torch.float64)),
    )
    assert a.steps.tolist() == b.steps.tolist() == [2.5, 5.5]


def test_what_rises_again_has_fallen_only_at_its_last_crossing():
    assert of_one([1.0, 0.0, 0.0, 1.0, 0.7, 0.2, 0.0, 0.0]) == (40, 50, 40, 60)
    assert of_one([1.0, 0.0, 0.2, 0.0, 0.0]) == (0, 10, 10, 30)  # back above a tenth, not above the half


def test_a_loss_that_is_just_at_the_threshold_has_fallen():
    assert of_one([1.0, 0.5, 0.5, 0.0]) == (0, 10, 10, 30)


def test_what_is_back_above_the_threshold_at_the_last_evaluation_has_not_fallen_for_good():
    plunge = [1.0] * 10 + [0.0] * 29
    assert no_transition(of_one([*plunge, 0.8]))
    before, after, start, end = of_one([*plunge, 0.3])  # here the half is behind, nine tenths are not
    assert (before, after, start) == (90, 100, 100)
    assert math.isnan(end)


@pytest.mark.parametrize(
    "losses", [[1.0] * 5, [0.0] * 5, [1.0, 1.2, 1.4, 1.5], [1.0, 0.95, 0.93, 0.92], [1.0, 0.1, 0.1, 1.0]]
)
def test_no_fall_is_no_transition(losses):
    assert no_transition(of_one(losses))
    assert no_transition(of_one(losses, fall=0.0)) == (losses[-1] >= losses[0])


def test_how_far_a_loss_must_fall_is_a_choice():
    losses = [1.0, 0.75, 0.75]
    assert of_one(losses, fall=0.25) == (0, 10, 10, 10)
    assert no_transition(of_one(losses, fall=0.26))


def test_the_plateau_may_be_given():
    losses = [4.0, 2.0, 1.2, 0.9, 0.3, 0.0]
    assert of_one(losses) == (0, 10, 10, 40)
    assert of_one(losses, plateau=2.0) == (20, 30, 20, 50)  # 0.3 is not below a tenth of 2
    found = find_transitions(range(6), [[loss, loss] for loss in losses], plateau=2.0)
    assert found.plateau.tolist() == [2, 2]


def test_what_is_below_from_the_first_evaluation_on_fell_there():
    assert of_one([0.3, 0.3, 0.1, 0.0], [5, 10, 15, 20], plateau=2.0) == (5, 5, 5, 15)


def test_the_final_value_is_a_median_of_the_last_twentieth():
    losses = [1.0] * 30 + [0.6] * 27 + [0.0, 0.9, 0.4]
    found = find_transitions(range(60), [[loss] for loss in losses])
    assert found.final.item() == 0.4
    assert found.after.item() == 59


def test_seeds_without_a_transition_are_left_out_of_the_mean():
    found = find_transitions([0, 10, 20], [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    assert found.fell.tolist() == [True, False, True]
    assert found.interval().n == 2
    assert found.interval().mean == 10
    assert found.spread() == 3


@pytest.mark.parametrize(("losses", "mean"), [([[1.0], [0.0]], 0.5), ([[1.0], [1.0]], math.nan)])
def test_one_seed_has_neither_spread_nor_interval(losses, mean):
    found = find_transitions([0, 1], losses)
    assert math.isnan(found.spread())
    assert found.interval().mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(found.interval().low)


def test_a_transition_before_the_first_step_makes_no_infinite_spread():
    found = find_transitions([0, 9, 11], [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], plateau=1.0)
    assert found.steps.tolist() == [0, 10]
    assert found.spread() == 10


def by_loop(steps: list[int], losses: list[float], fall: float) -> tuple[float, ...]:
    """Before, after, start, end by walking back from the end."""
    tail = sorted(losses[len(losses) - max(1, len(losses) // 20) :])
    plateau, final = losses[0], tail[(len(tail) - 1) // 2]
    nan = math.nan
    if final >= plateau or plateau - final < fall * plateau:
        return nan, nan, nan, nan
    after = []
    for share in (0.1, 0.5, 0.9):
        i = len(losses)
        while i > 0 and losses[i - 1] <= plateau - share * (plateau - final):
            i -= 1
        after.append(i)
    if after[1] == len(losses):
        return nan, nan, nan, nan
    end = steps[after[2]] if after[2] < len(losses) else nan
    return steps[after[1] - 1], steps[after[1]], steps[after[0]], end


LEVELS = st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.6, 0.85, 1.0, 2.0])


@given(
    st.lists(st.tuples(st.integers(1, 3), LEVELS), min_size=2, max_size=70),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(1, 4),
)
@example([(1, 1.0)] * 30 + [(1, 0.0)] * 9 + [(1, 1.0)], 0.1, 1)
def test_a_plain_loop_finds_the_same(pieces, fall, repeats):
    gaps = [gap for gap, _ in pieces for _ in range(repeats)]
    losses = [loss for _, loss in pieces for _ in range(repeats)]
    steps = [sum(gaps[:i]) for i in range(len(gaps))]
    assert of_one(losses, steps, fall=fall) == pytest.approx(by_loop(steps, losses, fall), nan_ok=True)


def test_every_found_transition_lies_where_it_says():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(50, 200, generator=generator, dtype=torch.float64)
    losses = losses * torch.linspace(1, 0.01, 50, dtype=torch.float64)[:, None].sqrt()
    found = find_transitions(range(50), losses)
    assert found.fell.any()
    assert not found.fell.all()
    middle = (found.plateau + found.final) / 2
    for seed in found.fell.nonzero().flatten().tolist():
        after = int(found.after[seed])
        assert found.before[seed] == after - 1
        assert losses[after - 1, seed] > middle[seed]
        assert (losses[after:, seed] <= middle[seed]).all()
        assert found.start[seed] <= found.after[seed]
        assert not found.end[seed] < found.after[seed]


@pytest.mark.parametrize(
    ("steps", "losses", "options", "message"),
    [
        ([0], [[1.0]], {}, "2 steps"),
        ([], [], {}, "2 steps"),
        ([0, 1, 2], [[1.0], [0.5]], {}, "with 3 >= 2 steps"),
        ([0, 0], [[1.0], [0.5]], {}, "steps must increase"),
        ([0, 5, 3], [[1.0], [0.5], [0.2]], {}, "steps must increase"),
        ([0, 1], [[1.0], [math.nan]], {}, "losses must be finite"),
        ([0, 1], [[math.inf], [1.0]], {}, "losses must be finite"),
        ([0, 1], [[1.0], [0.5]], {"plateau": 0.0}, "plateau must be positive"),
        ([0, 1], [[1.0], [0.5]], {"plateau": -1.0}, "plateau must be positive"),
        ([0, 1], [[1.0], [0.5]], {"plateau": math.nan}, "plateau must be positive"),
        ([0, 1], [[1.0], [0.5]], {"plateau": math.inf}, "plateau must be positive"),
        ([0, 1], [[1.0], [0.5]], {"fall": -0.1}, "fall must be between 0 and 1"),
        ([0, 1], [[1.0], [0.5]], {"fall": math.nan}, "fall must be between 0 and 1"),
    ],
)
def test_what_is_no_curve_is_refused(steps, losses, options, message):
    with pytest.raises(ValueError, match=message):
        find_transitions(steps, losses, **options)


def test_no_seeds_have_no_transitions():
    found = find_transitions([0, 1], torch.zeros(2, 0))
    assert isinstance(found, Transitions)
    assert found.steps.shape == (0,)
    assert math.isnan(found.interval().mean)


# ---- alignment ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Checkpoint:
    """Two seeds with three snapshots."""
    config = small(seeds=(0, 3), n_snapshots=3, model=EXACT.replace(dtype="float32"), learning_rate=0.05)
    result = train(config, tmp_path_factory.mktemp("run"), progress=False)
    return Checkpoint("run", result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_entry_is_the_alignment_of_that_model_at_that_snapshot(trained, dtype):
    prompts = trained.task.sample(7, seed=1, dtype=dtype)
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})
    found = align_over_training(trained, learner, prompts)
    assert found.steps == trained.snapshots.steps
    assert len(found.steps) == 3
    assert found.mse.shape == (3, 2)
    for i in range(3):
        for j, model in enumerate(trained.models_at(i)):
            alone = align(model.double(), learner, prompts)
            for name in ("prediction_distance", "sensitivity_cosine", "sensitivity_distance"):
                values = getattr(found, name)
                assert values.dtype == torch.float64
                assert values[i, j].item() == pytest.approx(getattr(alone, name).mean().item(), rel=1e-6)
            predictions = model.predict(prompts).detach()
            squares = [(p - y) ** 2 for p, y in zip(predictions.tolist(), prompts.query.ys.tolist(), strict=True)
                       for p, y in zip(p, y, strict=True)]  # fmt: skip
            assert found.mse[i, j].item() == pytest.approx(sum(squares) / len(squares), rel=1e-6)
    assert len(set(found.mse.flatten().tolist())) == 6
    assert all(model.cfg.dtype == "float32" for model in trained.models)


def test_prompts_without_a_cosine_are_left_out_of_its_mean(trained):
    prompts = trained.task.sample(6, seed=1, dtype=torch.float64)
    silent = prompts.ys.clone()
    silent[:2] = 0  # gradient descent stays at 0 on these, and so does the model
    prompts = type(prompts)(prompts.xs, silent)
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})
    found, rest = (align_over_training(trained, learner, part) for part in (prompts, prompts[2:]))
    assert found.sensitivity_cosine.isfinite().all()
    torch.testing.assert_close(found.sensitivity_cosine, rest.sensitivity_cosine)


def test_a_construction_between_two_others_is_aligned_as_its_step_size_says():
    task = LinearRegression(x_dim=3, n_context=4)
    models = [constructions.gradient_descent(x_dim=3, n_context=4, step_size=a) for a in (0.2, -0.2)]
    weights = {
        name: torch.stack([torch.stack([dict(m.named_parameters(), **dict(m.named_buffers()))[name] for m in order])
                           for order in (models, models[::-1])]).detach()
        for name in dict(models[0].named_parameters(), **dict(models[0].named_buffers()))
    }  # fmt: skip
    checkpoint = Checkpoint("made", list(models), {}, Snapshots((0, 4), weights))
    found = align_over_training(checkpoint, models[0], task.sample(5, seed=0, dtype=torch.float64))
    torch.testing.assert_close(found.sensitivity_cosine, torch.tensor([[1, -1], [-1, 1]]).double())
    torch.testing.assert_close(found.prediction_distance[0, 0], torch.tensor(0.0).double())
    assert found.prediction_distance[0, 1] == found.prediction_distance[1, 0] > 0


def test_without_snapshots_there_is_nothing_to_compare(trained):
    bare = Checkpoint("bare", trained.models, trained.record)
    with pytest.raises(CheckpointError, match="bare was saved without snapshots"):
        align_over_training(bare, trained.models[0], trained.task.sample(2, seed=0))


# ---- heads ----


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Checkpoint:
    """Two seeds of a model on tokens, with three snapshots."""
    result = train(
        reading(seeds=(0, 3), n_snapshots=3, learning_rate=0.05), tmp_path_factory.mktemp("run"), progress=False
    )
    return Checkpoint("run", result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))


def test_every_score_is_that_of_the_best_head_of_that_model_at_that_snapshot(reader):
    names = ("previous_token", "induction", "copying")
    found = score_heads_over_training(reader, names, n_prompts=5, seed=2)
    assert found.steps == reader.snapshots.steps
    assert list(found.scores) == list(names)
    seen = set()
    for i in range(3):
        for j, model in enumerate(reader.models_at(i)):
            alone = score_heads(model, n_prompts=5, seed=2)
            for name in names:
                of_heads = [
                    alone[name][layer, head].mean().item() for layer in range(model.cfg.n_layers)
                    for head in range(model.cfg.n_heads)
                ]  # fmt: skip
                assert found.scores[name].shape == (3, 2)
                assert found.scores[name][i, j].item() == pytest.approx(max(of_heads), rel=1e-6)
            seen.add(found.scores["induction"][i, j].item())
    assert len(seen) == 6  # every snapshot and seed has its own


def test_models_on_points_are_scored_on_prompts(tmp_path):
    model = EXACT.replace(prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax")
    result = train(small(model=model, n_snapshots=2), tmp_path, progress=False)
    checkpoint = Checkpoint("run", result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))
    prompts = TASK.sample(6, seed=0, dtype=torch.float64)
    found = score_heads_over_training(checkpoint, ["target_to_input"], prompts=prompts)
    (last,) = checkpoint.models_at(-1)
    expected = score_heads(last, prompts=prompts).mean("target_to_input").max()
    assert found.scores["target_to_input"][-1].item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="scored on prompts"):
        score_heads_over_training(checkpoint)


def test_heads_without_snapshots_or_of_unknown_names_are_refused(reader):
    with pytest.raises(CheckpointError, match="bare was saved without snapshots"):
        score_heads_over_training(Checkpoint("bare", reader.models, reader.record))
    with pytest.raises(ValueError, match="no score 'inducton'"):
        score_heads_over_training(reader, ["inducton"])
