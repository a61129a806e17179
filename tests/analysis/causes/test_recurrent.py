"""Hand-written recurrent layers pass the causal test of the algorithm that they run, plain and hidden; others fail."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.algorithms.stepwise import Hypothesis, OnlineDescent, ResidualRidge, StepwiseAlgorithm
from mechicl.analysis import interchange, sample_sources
from mechicl.analysis import test_hypotheses as rank_hypotheses
from mechicl.constructions.known import KnownModel, _hidden
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression

SIZES: dict[str, Any] = {"x_dim": 3, "n_context": 8}
TASK = LinearRegression(**SIZES)


def stacked(model: HookedTransformer, layers: int) -> HookedTransformer:
    """The model with its one layer repeated."""
    deep = HookedTransformer(model.cfg.replace(n_layers=layers, recurrent=layers > 1))
    deep.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in deep.state_dict()} | {
        name: model.state_dict()[f"blocks.0.{name.split('.', 2)[2]}"]
        for name in deep.state_dict() if name.startswith("blocks.")
    })  # fmt: skip
    return deep.eval()


def models(layers: int) -> dict[str, KnownModel]:
    columns = torch.eye(4, dtype=torch.float64)
    places = {"x": columns[:, :3], "residual": columns[:, 3:]}
    delta = constructions.online_gradient_descent(**SIZES, step_size=0.8)
    mesa = constructions.recursive_least_squares(**SIZES, penalty=0.3)
    steps: dict[str, tuple[HookedTransformer, StepwiseAlgorithm]] = {
        "delta": (delta, OnlineDescent(8, step_size=0.8, passes=layers, causal=True)),
        "mesa": (mesa, ResidualRidge(layers, penalty=0.3, causal=True)),
    }
    return {
        name: KnownModel(name, stacked(model, layers), Hypothesis(algorithm, tuple(
            (k, k * algorithm.n_steps // layers) for k in range(layers + 1)), places), TASK)
        for name, (model, algorithm) in steps.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", ["delta", "mesa"])
def test_exchanged_states_act_as_in_the_layers_own_algorithm(name: str):
    prompts = TASK.sample(64, seed=0, dtype=torch.float64)
    sources = sample_sources(TASK, prompts, seed=1)
    for layers in (1, 2):
        known = models(layers)
        other = known["mesa" if name == "delta" else "delta"].hypothesis
        for each in (known[name], _hidden(known[name], 3, 0.0)):
            result = interchange(each.model, each.hypothesis, prompts, sources, progress=False)
            assert result.score.mean >= 0.999, (layers, result.cells[result.weakest])
            assert ("query exchanged" in {cell.intervention for cell in result.cells}) == (layers == 2)
        wrong = Hypothesis(other.algorithm, other.schedule)
        assert interchange(known[name].model, wrong, prompts, sources, progress=False).score.mean < 0.95


@pytest.mark.parametrize("name", ["delta", "mesa"])
def test_hypotheses_of_the_layers_algorithm_come_first(name: str):
    known = models(1)[name]
    table = rank_hypotheses(_hidden(known, 1, 0.0).model, TASK, n_prompts=64, with_likeness=False, progress=False)
    frame = table.to_dataframe().set_index("hypothesis")
    # forms of the same algorithm, and one that contains it
    same = {
        "delta": {"online gradient descent, 8 points", "normalised LMS, 8 points"},
        "mesa": {"ridge of residuals, 1 step", "ridge by 3 eigendirections"},
    }[name]
    assert set(frame.index[:2]) == same
    assert frame.effects[:2].min() >= 0.999
    assert frame.effects[2:].max() < 0.999
