"""Parts of the scripts on von Oswald et al. 2023 and on the lecture text, against independent computations."""

import pytest
import torch

from mechicl.algorithms import tuned_step_size
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import Checkpoint, Snapshots, load_checkpoint
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.scripts import import_script

# ---- out of distribution ----


def clipped_descent(prompts: Prompts, step_sizes: list[float], gammas: list[float], clip: float) -> torch.Tensor:
    """GD++ on tokens, every token cut after every step, in a plain loop."""
    predicted = []
    for xs, ys in zip(prompts.xs.double(), prompts.ys.double(), strict=True):
        tokens = torch.cat([xs, ys], dim=1)
        tokens[-1, -1] = 0
        for a, gamma in zip(step_sizes, gammas, strict=True):
            context = tokens[:-1]
            scores = tokens[:, :-1] @ context[:, :-1].T
            inputs = tokens[:, :-1] - gamma * scores @ context[:, :-1]
            targets = tokens[:, -1:] - a * scores @ context[:, -1:]
            tokens = torch.cat([inputs, targets], dim=1).clamp(-clip, clip)
        predicted.append(-tokens[-1, -1])
    return torch.stack(predicted)[:, None]


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_descent_as_layers_is_clipped_where_the_model_is(scale):
    checkpoint = load_checkpoint("lsa-3l-looped")
    cfg = checkpoint.models[0].cfg
    learner = tuned_descent(LinearRegression().sample(500, seed=0), cfg.n_layers, gamma=True)
    prompts = LinearRegression(input_scale=scale).sample(5, seed=1, dtype=torch.float64)
    a, gamma = learner.hyperparameters["step_size"], learner.hyperparameters["gamma"]
    expected = clipped_descent(prompts, [a] * 3, [gamma] * 3, 10.0)
    assert (expected.abs() == 10).any() == (scale > 1)
    torch.testing.assert_close(import_script("oswald_shifts").as_layers(learner, cfg).predict(prompts), expected)


def test_two_curves_are_as_far_apart_as_the_largest_gap_over_the_height_of_the_second():
    curve, reference = torch.tensor([1.0, 10.0, 30.0]), torch.tensor([1.0, 10.0, 100.0])
    distance = import_script("oswald_shifts").distance
    assert distance(reference, reference) == 0
    assert distance(curve, reference) == pytest.approx((2 - torch.tensor(30.0).log10().item()) / 2)
    assert distance(curve, reference, torch.tensor([True, True, False])) == 0


# ---- copying ----


@pytest.mark.parametrize(
    ("ratios", "expected"), [([1, 2, 4, 5], 30), ([4, 2, 4, 5], 30), ([4, 4, 4, 4], 10), ([4, 4, 4, 1], None)]
)
def test_a_token_is_read_from_the_snapshot_after_the_last_low_one(ratios, expected):
    last_rise = import_script("oswald_copying_order")._last_rise
    assert last_rise((10, 20, 30, 40), torch.tensor([float(ratio) for ratio in ratios])) == expected


@pytest.mark.parametrize(
    ("reads", "unfallen", "first"),
    [(30, 40, True), (40, 40, True), (50, 40, False), (None, 40, False), (30, None, False)],
)
def test_reading_comes_first_if_the_loss_has_not_fallen_by_then(reads, unfallen, first):
    order = import_script("oswald_copying_order").Order(reads, None, unfallen)
    assert order.first(reads) == first


def test_the_shipped_seeds_read_the_next_token_before_their_loss_falls():
    order = import_script("oswald_copying_order")
    checkpoint = load_checkpoint("copy-2l-dense").select([1])
    assert checkpoint.snapshots is not None
    few = slice(0, 8)  # the fall of this seed, and some steps before
    weights = {name: tensor[few] for name, tensor in checkpoint.snapshots.weights.items()}
    snapshots = Snapshots(checkpoint.snapshots.steps[few], weights)
    short = Checkpoint(checkpoint.name, checkpoint.models, checkpoint.record, snapshots)
    rows, _, _ = order._order(short, checkpoint.task.sample(2, seed=0))
    assert [str(row.measured) for row in rows[:3]] == ["1 of 1 seeds", "1 of 1 seeds", "0 of 1 seeds"]


# ---- the lecture text ----


def test_the_lectures_first_worked_example_has_its_numbers():
    lecture = import_script("lecture_meta_optimizers")
    rows = {row.quantity: row for row in lecture._worked_examples()}
    for name, row in rows.items():
        assert row.measured == pytest.approx(row.published, abs=1e-9), name


def test_one_root_is_no_learning_rate_and_two_roots_are():
    lecture = import_script("lecture_meta_optimizers")
    rows = lecture._one_step(lecture.Args(n_prompts=8))
    rates = [row.measured for row in rows if row.quantity.startswith("learning rate")]
    assert rates == pytest.approx([lecture.RATE**-0.5, lecture.RATE**-0.5, 1.0])


def test_contexts_with_the_same_row_of_products_have_different_rows_of_the_inverse():
    lecture = import_script("lecture_meta_optimizers")
    *_, same, apart = lecture._bayes(lecture.Args(n_prompts=16))
    assert same.measured == 0
    assert apart.measured > 0.1


def test_the_power_series_is_gradient_descent_on_the_ridge_loss():
    lecture = import_script("lecture_meta_optimizers")
    rows = {row.quantity: row.measured for row in lecture._power_series(lecture.Args(n_prompts=60))}
    (error,) = [value for name, value in rows.items() if "ten steps of gradient descent" in name]
    assert error == 0


# ---- sizes ----


def test_the_largest_size_is_as_good_as_gradient_descent():
    layer = import_script("oswald_one_layer")
    rows = layer._size_rows("lsa-1l-d5")
    task = LinearRegression(x_dim=5, n_context=5)
    step = tuned_step_size(task.sample(20_000, seed=3))
    prompts = task.sample(4096, seed=1_000_003, dtype=torch.float64)
    predicted = step * torch.einsum("px,pnx,pny->py", prompts.query.xs, prompts.context.xs, prompts.context.ys)
    expected = (predicted - prompts.query.ys).square().mean() / 2
    assert rows[0].ends[1] == pytest.approx(expected.item(), rel=1e-3)
