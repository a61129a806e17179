"""The measure of copying on alternate tokens: of a model that copies by construction, and of one that does not."""

import pytest

from mechicl import constructions
from mechicl.sweeps.measures.regression import target_copying
from tests.sweeps.made import POOL, REGRESSION, checkpoint, untrained

CURVE = {"curve": {"eval_step": [0, 10, 20, 30], "eval_loss": [[9.0], [0.25], [0.05], [0.05]]}}


def test_a_construction_that_copies_is_seen_to():
    model = constructions.copy_then_gradient_descent(x_dim=3, n_context=6, step_size=0.5).eval()
    measured = target_copying(checkpoint(model, REGRESSION, record=CURVE), n_prompts=400)
    assert measured["target_error"] < 1e-3
    assert measured["paired"] == 1
    # the plateau is that of predicting 0 (0.25), not the first loss: half of the way down is between 10 and 20
    assert measured["transition_step"] == 15


def test_untrained_weights_have_not_copied():
    model = untrained(
        REGRESSION, prompt_format="interleaved", positional_embedding_type="sinusoidal", read_in="identity",
        read_out="identity",
    )  # fmt: skip
    measured = target_copying(checkpoint(model, REGRESSION, record=CURVE), n_prompts=400)
    assert min(measured["target_error"], measured["input_error"]) > 0.5
    assert measured["paired"] == 0


def test_another_task_is_refused():
    with pytest.raises(ValueError, match="is of models of LinearRegression"):
        target_copying(checkpoint(untrained(POOL), POOL))
