import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl.learners import AlgorithmLearner, Learner, Trajectory
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, student_t_quantile

quick = settings(max_examples=40, deadline=None)


def some_prompts(n_prompts=3, n_points=4, x_dim=2, y_dim=2):
    generator = torch.Generator().manual_seed(0)
    return Prompts(
        torch.randn(n_prompts, n_points, x_dim, generator=generator),
        torch.randn(n_prompts, n_points, y_dim, generator=generator),
    )


def running_means(prompts, steps=(1,), scale=1.0, at="points"):
    """A toy algorithm: `step * scale` times the mean of the targets so far (0 for none)."""
    n_prompts, n_points, y_dim = prompts.ys.shape
    predictions = torch.zeros(len(steps), n_prompts, n_points, y_dim)
    for s, step in enumerate(steps):
        for t in range(1, n_points):
            predictions[s, :, t] = step * scale * prompts.ys[:, :t].mean(1)
    return Trajectory(tuple(steps), predictions[:, :, -1:] if points == "query" else predictions, "means")


# ---- Trajectory ----


def test_a_trajectorys_query_is_the_last_point_of_each_step():
    predictions = torch.arange(2 * 3 * 4 * 2.0).reshape(2, 3, 4, 2)
    query = Trajectory((1, 5), predictions).query()
    assert query.shape == (2, 3, 2)
    for step in range(2):
        for prompt in range(3):
            assert torch.equal(query[step, prompt], predictions[step, prompt, 3])


@pytest.mark.parametrize("points", ["all", "query"])
def test_squared_errors_are_summed_over_the_targets_dimensions(points):
    prompts = some_prompts()
    trajectory = running_means(prompts, steps=(1, 3), at=at)
    errors = trajectory.squared_errors(prompts)
    n_points = 4 if points == "all" else 1
    assert errors.shape == (2, 3, n_points)
    for step in range(2):
        for prompt in range(3):
            for point in range(n_points):
                expected = 0.0
                for y in range(2):
                    target = prompts.ys[prompt, 4 - n_points + point, y].item()
                    expected += (trajectory.predictions[step, prompt, point, y].item() - target) ** 2
                assert errors[step, prompt, point].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {"n_prompts": 1},  # these three would be broadcast
        {"n_points": 1},
        {"y_dim": 1},
        {"n_points": 5},
        {"n_prompts": 2},
    ],
)
def test_squared_errors_against_other_prompts_are_refused_and_not_broadcast(shape):
    trajectory = running_means(some_prompts())
    with pytest.raises(ValueError, match=r"of shape \(1, 3, 4, 2\) are not of Prompts"):
        trajectory.squared_errors(some_prompts(**shape))


def test_a_trajectory_needs_one_slice_of_predictions_a_step():
    with pytest.raises(ValueError, match="3 steps for 2 slices"):
        Trajectory((1, 2, 3), torch.zeros(2, 3, 4, 1))
    assert Trajectory((), torch.zeros(0, 3, 4, 1)).query().shape == (0, 3, 1)


# ---- AlgorithmLearner ----


def test_an_algorithm_with_hyperparameters_is_a_learner():
    prompts = some_prompts()
    learner = AlgorithmLearner(running_means, {"steps": (1, 4), "scale": 0.5})
    assert isinstance(learner, Learner)
    assert not isinstance(running_means, Learner)
    expected = torch.stack([4 * 0.5 * prompts.ys[i, :3].mean(0) for i in range(3)])  # of the last step
    torch.testing.assert_close(learner.predict(prompts), expected)
    prefixes = learner.predict_prefixes(prompts)
    assert prefixes.shape == prompts.ys.shape
    assert prefixes[:, 0].eq(0).all()
    torch.testing.assert_close(prefixes[:, 2], 4 * 0.5 * prompts.ys[:, :2].mean(1))
    torch.testing.assert_close(prefixes[:, -1], expected)
    assert learner.trajectory(prompts).steps == (1, 4)


def test_only_the_querys_prediction_is_asked_of_the_algorithm_when_it_is_all_that_is_wanted():
    asked = []

    def algorithm(prompts, **hyperparameters):
        asked.append(hyperparameters)
        return running_means(prompts, **hyperparameters)

    prompts = some_prompts()
    learner = AlgorithmLearner(algorithm, {"scale": 2.0})
    learner.predict(prompts)
    learner.predict_prefixes(prompts)
    assert asked == [{"scale": 2.0, "points": "query"}, {"scale": 2.0}]
    explicit = AlgorithmLearner(running_means, {"points": "query"})
    assert torch.equal(explicit.predict(prompts), running_means(prompts).predictions[0, :, -1])


def test_a_learners_name_tells_the_algorithm_and_its_hyperparameters():
    assert AlgorithmLearner(running_means, {"steps": (1,), "scale": 0.5}).name == "running_means(steps=(1,), scale=0.5)"
    assert AlgorithmLearner(running_means).name == "running_means()"


def test_learners_can_be_keys_of_a_dict():
    a, b = AlgorithmLearner(running_means, {"scale": 1.0}), AlgorithmLearner(running_means, {"scale": torch.ones(2)})
    assert {a: "a", b: "b"}[b] == "b"
    assert a != b


# ---- Interval ----


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.95, 1.05, "1.000 ± 0.050"),
        (0.877, 1.123, "1.00 ± 0.12"),
        (-11.0, 13.0, "1 ± 12"),
        (-1233.0, 1235.0, "1 ± 1234"),
        (1.0, 1.0, "1.0000 ± 0.0000"),
        (math.nan, math.nan, "1.0000 ± nan"),
        (-math.inf, math.inf, "1.0000 ± inf"),
    ],
)
def test_an_interval_shows_two_digits_of_its_half_width(low, high, text):
    assert str(Interval(1.0, low, high, n=5)) == text


def test_an_interval_at_the_level_of_rounding_does_not_show_zeros():
    assert str(Interval(3.21e-15, 3.11e-15, 3.31e-15, n=5)) == "3.21e-15 ± 1e-16"


def test_an_interval_contains_what_lies_between_its_ends():
    between = Interval(2.0, 1.0, 3.0, n=4)
    assert between.half_width == 1.0
    for inside in (1.0, 2.0, 3.0):
        assert inside in between
    for outside in (0.999, 3.001, math.nan, math.inf):
        assert outside not in between
    assert 1.0 not in Interval(1.0, math.nan, math.nan, n=1)


@quick
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_the_interval_is_students(values, level):
    measured = interval(torch.tensor(values, dtype=torch.float64), level)
    mean, error = np.mean(values), scipy.stats.sem(values)
    scale = max(map(abs, values))
    assert measured.mean == pytest.approx(mean, rel=1e-9, abs=1e-12 * scale)
    if error > 1e-9 * scale:
        low, high = scipy.stats.t.interval(level, len(values) - 1, loc=mean, scale=error)
        assert measured.low == pytest.approx(low, rel=1e-9, abs=1e-9 * scale)
        assert measured.high == pytest.approx(high, rel=1e-9, abs=1e-9 * scale)
    assert (measured.n, measured.level) == (len(values), level)


def test_an_interval_worked_by_hand():
    # Mean 2, standard deviation 1, n = 3: the 0.975 quantile with two degrees of freedom is 4.3027.
    measured = interval(torch.tensor([1.0, 2.0, 3.0]))
    assert measured.mean == 2.0
    assert measured.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("degrees", [1, 2, 9, 100])
@pytest.mark.parametrize("probability", [0.6, 0.95, 0.995])
def test_quantiles_invert_the_integral_of_students_density(degrees, probability):
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def density(t):
        return constant * (1 + t * t / degrees) ** (-(degrees + 1) / 2)

    area = scipy.integrate.quad(density, 0, student_t_quantile(probability, degrees), epsabs=1e-12)[0]
    assert area == pytest.approx(probability - 0.5, abs=1e-9)


def test_quantiles_are_those_of_the_printed_tables():
    table = {(0.975, 1): 12.706, (0.975, 4): 2.776, (0.95, 10): 1.812, (0.995, 30): 2.750, (0.975, 100_000): 1.960}
    for (probability, degrees), printed in table.items():
        assert student_t_quantile(probability, degrees) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_an_interval_covers_the_mean_as_often_as_it_says(level):
    draws = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covered = sum(0.0 in interval(row, level) for row in draws)
    assert scipy.stats.binomtest(covered, 2000, level).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_samples_of_any_dtype_and_shape_count_one_by_one(dtype):
    samples = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    measured = interval(samples)
    assert measured.n == 6
    assert measured.mean == pytest.approx(2 / 3, rel=1e-12)
    low, high = scipy.stats.t.interval(0.95, 5, loc=2 / 3, scale=scipy.stats.sem([0, 1, 1, 1, 0, 1]))
    assert (measured.low, measured.high) == pytest.approx((low, high), rel=1e-12)


def test_a_mean_of_single_precision_samples_does_not_lose_digits():
    samples = torch.full((1_000_000,), 1000.1, dtype=torch.float32)
    assert interval(samples).mean == pytest.approx(samples[0].item(), rel=1e-12)


def test_samples_with_gradients_can_be_averaged():
    assert interval(torch.ones(3, requires_grad=True)).mean == 1.0


def test_one_sample_or_none_has_no_interval():
    one = interval(torch.tensor(3.0))
    assert (one.mean, one.n) == (3.0, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    none = interval(torch.zeros(0))
    assert none.n == 0
    assert math.isnan(none.mean)
    assert math.isnan(none.half_width)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_not_left_out(bad):
    measured = interval(torch.tensor([1.0, bad, 2.0]))
    assert not math.isfinite(measured.mean)
    assert not math.isfinite(measured.low)
    assert not math.isfinite(measured.high)
    assert measured.n == 3


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95.0, math.nan])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        interval(torch.ones(3), level)


# ---- Samples ----


@dataclass(frozen=True)
class Measurement(Result):
    cosine: Tensor
    by_layer: Tensor
    note: str = "not a tensor"


def some_result():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(6, generator=generator, dtype=torch.float64)  # what makes a prompt hard in every layer
    by_layer = shared + 0.1 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    return Measurement(cosine=torch.randn(6, generator=generator, dtype=torch.float64), by_layer=by_layer)


def test_a_result_knows_its_tensors():
    result = some_result()
    assert [name for name, _ in result.samples().items()] == ["cosine", "by_layer"]
    assert result.samples()["cosine"] is result.cosine


def test_intervals_of_a_result_are_over_its_samples():
    result = some_result()
    intervals = result.intervals(0.9)
    assert set(intervals) == {"cosine", "by_layer"}
    per_prompt = [np.mean([result.by_layer[a, b, p].item() for a in range(2) for b in range(3)]) for p in range(6)]
    for name, values in (("cosine", result.cosine.tolist()), ("by_layer", per_prompt)):
        low, high = scipy.stats.t.interval(0.9, 5, loc=np.mean(values), scale=scipy.stats.sem(values))
        assert intervals[name].n == 6
        assert intervals[name].mean == pytest.approx(np.mean(values), rel=1e-12)
        assert (intervals[name].low, intervals[name].high) == pytest.approx((low, high), rel=1e-12)


def test_entries_of_one_sample_do_not_count_as_independent_ones():
    repeated = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(100, 8)
    once = Measurement(cosine=repeated[0], by_layer=repeated).intervals()
    assert once["by_layer"].half_width == pytest.approx(once["cosine"].half_width, rel=1e-6)


def test_a_single_number_is_one_sample():
    intervals = Measurement(cosine=torch.tensor(2), by_layer=torch.tensor(3.0)).intervals()
    assert (intervals["cosine"].mean, intervals["cosine"].n) == (2.0, 1)


def test_a_table_has_a_row_a_sample_and_a_column_an_entry():
    result = some_result()
    table = result.to_dataframe()
    entries = [f"by_layer[{a},{b}]" for a in range(2) for b in range(3)]
    assert list(table.columns) == ["cosine", *entries]
    assert len(table) == 6
    for prompt in range(6):
        assert table["cosine"][prompt] == result.cosine[prompt].item()
        for a in range(2):
            for b in range(3):
                assert table[f"by_layer[{a},{b}]"][prompt] == result.by_layer[a, b, prompt].item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_table_takes_tensors_of_any_dtype_and_with_gradients(dtype):
    values = torch.tensor([0, 1, 1]).to(dtype)
    table = Measurement(cosine=values, by_layer=torch.ones(3, requires_grad=True)).to_dataframe()
    assert table["cosine"].tolist() == [0, 1, 1]
    assert table["by_layer"].tolist() == [1.0, 1.0, 1.0]


def test_a_table_of_fields_with_different_numbers_of_samples_is_refused():
    with pytest.raises(ValueError, match="same length"):
        Measurement(cosine=torch.ones(3), by_layer=torch.ones(4)).to_dataframe()
