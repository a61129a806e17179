"""Hand-written recurrent layers pass the causal test of the algorithm that they run, plain and hidden; others fail."""

import pytest
import torch

from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis import interchange, sample_sources
from mechicl.analysis import test_hypotheses as rank_hypotheses
from mechicl.constructions import known_models

PLAIN = {known.name: known for known in known_models(recurrent=True)}
HIDDEN = {known.name: known for known in known_models(recurrent=True, hidden=True, seed=3)}
WRONG = {  # another algorithm with as many states between layers
    "DeltaNet, online gradient descent": "Mesa, ridge",
    "Mesa, ridge": "DeltaNet, online gradient descent",
    "gated linear, discounted gradient descent": "Mesa, ridge",
    "Mamba-2, discounted averaging": "Mesa, ridge",
    "DeltaNet, 2 layers": "Mesa, 2 layers",
    "Mesa, 2 layers": "gated linear, 2 layers",
    "gated linear, 2 layers": "DeltaNet, 2 layers",
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_own_hypothesis_holds_and_another_does_not(name: str):
    task = PLAIN[name].task
    prompts = task.sample(32, seed=0, dtype=torch.float64)
    sources = sample_sources(task, prompts, seed=1)
    for known in (PLAIN[name], HIDDEN[f"{name}, hidden"]):
        result = interchange(known.model, known.hypothesis, prompts, sources, progress=False)
        assert result.score.mean >= 0.999, result.cells[result.weakest]
        two = known.model.cfg.n_layers == 2
        assert ("query exchanged" in {cell.intervention for cell in result.cells}) == two
    other = PLAIN[WRONG[name]].hypothesis
    wrong = interchange(
        PLAIN[name].model, Hypothesis(other.algorithm, other.schedule), prompts, sources, progress=False
    )
    assert wrong.score.mean < 0.98


@pytest.mark.parametrize(
    "name", ["DeltaNet, online gradient descent", pytest.param("Mesa, ridge", marks=pytest.mark.slow)]
)
def test_hypotheses_of_the_layers_algorithm_come_first(name: str):
    known = HIDDEN[f"{name}, hidden"]
    table = rank_hypotheses(known.model, known.task, n_prompts=16, with_likeness=False, progress=False)
    frame = table.to_dataframe().set_index("hypothesis")
    # forms of the same algorithm, and one that contains it
    same = {
        "DeltaNet, online gradient descent": {"online gradient descent, 20 points", "normalised LMS, 20 points"},
        "Mesa, ridge": {"ridge of residuals, 1 step", "ridge by 5 eigendirections"},
    }[name]
    assert set(frame.index[:2]) == same
    assert frame.effects[:2].min() >= 0.999
    assert frame.effects[2:].max() < 0.999
