"""Learners that several tests of behaviour compare."""

import pytest

from mechicl.analysis.behaviour import identification


class Constant:
    """A learner that no query reaches."""

    def predict(self, prompts):
        return prompts.ys[:, 0]

    def predict_prefixes(self, prompts):
        return prompts.ys


class Bare:
    """Another learner's predictions, without its steps."""

    def __init__(self, learner):
        self.predict, self.predict_prefixes = learner.predict, learner.predict_prefixes


@pytest.fixture(scope="module", autouse=True)
def quick_limits():
    """The best learners on the task are tuned on fewer prompts than elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identification, "LIMIT_PROMPTS", 1000)
        yield
