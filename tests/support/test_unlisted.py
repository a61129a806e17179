"""Learners on no list: their fingerprints show what kind of learner each one is."""

import pytest

from analyses.support.unlisted import halves, unlisted
from mechicl.analysis import fingerprint
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=5, n_context=20, inputs="gaussian", noise_std=0.3)
LEARNERS = unlisted()
KINDS = {  # properties that hold, and properties that do not
    "0.7 times least squares": ({"linear in the targets", "function of S", "scale of the inputs"}, set()),
    "saturated least squares": ({"order of the points", "moments"}, {"linear in the targets", "scale of the targets"}),
    "least squares with intercept": ({"linear in the targets", "shift of the targets"}, {"linear in the query"}),
    "least absolute deviations": (
        {"linear in the query", "scale of the targets"},
        {"moments", "linear in the targets"},
    ),
    "orthogonal matching pursuit, 2": (
        {"moments", "scale of the inputs"},
        {"rotation of the inputs", "linear in the targets"},
    ),
    "Gaussian smoother": ({"linear in the targets", "shift of the targets"}, {"linear in the query", "moments"}),
    "Adam, 20 steps": ({"order of the points", "moments"}, {"scale of the targets", "rotation of the inputs"}),
    "averaged online descent": ({"linear in the targets"}, {"order of the points"}),
    "Gauss-Seidel, 1 sweep": (
        {"linear in the targets", "scale of the inputs"},
        {"rotation of the inputs", "function of S"},
    ),
    "2 principal components": ({"function of S", "rotation of the inputs", "scale of the inputs"}, {"one filter"}),
    "least squares on the last half": ({"linear in the targets", "linear in the query"}, {"order of the points"}),
    "ridge towards ones": ({"linear in the query", "moments"}, {"linear in the targets"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_fingerprint_shows_the_kind(name):
    result = fingerprint(LEARNERS[name], TASK, n_prompts=64, progress=False)
    holds, violates = KINDS[name]
    assert holds <= {*result.exact, *result.near}
    assert {each: result.violation(each).mean for each in violates if result.violation(each).mean < 1e-5} == {}


def test_the_halves_are_disjoint_and_complete():
    calibrated, tested = halves()
    assert not set(calibrated) & set(tested)
    assert {*calibrated, *tested} == set(LEARNERS)
    assert len(tested) >= 30
