"""Interchange on models whose algorithm is known, on others, and on models of other kinds."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mechicl import wrap
from mechicl.algorithms.stepwise import Hypothesis, NewtonSteps, QueryDescent, ResidualDescent, RidgePath
from mechicl.analysis.causes import INTERVENTIONS, interchange, sample_sources
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.constructions import gradient_descent, known_models
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.statistics import load_result
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=5, n_context=20)
STEP_SIZE = 0.14
THREE = ResidualDescent(3, step_size=STEP_SIZE)


def ends(task=TASK, n: int = 48) -> tuple[Prompts, Prompts]:
    prompts = task.sample(n, seed=0, dtype=torch.float64)
    return prompts, sample_sources(task, prompts, seed=1)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=3)


@pytest.mark.parametrize("known", [*known_models(), *known_models(hidden=True)], ids=lambda known: known.name)
def test_a_model_does_what_it_was_made_to_do(known):
    prompts, sources = ends(known.task, n=8)
    few = ["prediction", "query exchanged", "context exchanged", "context skips", "context frozen"]  # of the deep ones
    asked = few if known.model.cfg.n_layers > 4 else None
    if "two in a layer" in known.name:  # what points read between two steps of one layer, no hook of the layer cuts
        asked = [name for name in INTERVENTIONS if name != "context isolated"]
    result = interchange(known.model, known.hypothesis, prompts, sources, interventions=asked, progress=False)
    assert result.score.mean > 0.999, result.cells[result.weakest]
    assert result.effects.mean > 0.999


def test_models_that_predict_the_same_by_other_means_are_distinguished(model):
    prompts, sources = ends()
    alone = interchange(model, Hypothesis(QueryDescent(3, step_size=STEP_SIZE)), prompts, sources, progress=False)
    assert alone.r2[0].mean > 0.999  # the same predictions
    assert alone.cells[alone.weakest].intervention == "context frozen"
    assert alone.effects.mean < 0.95
    others = [NewtonSteps(5), RidgePath((1.0, 0.1, 0.01))]
    schedules = [((0, 0), (1, 3), (2, 5), (3, 7)), ()]
    hypotheses = [Hypothesis(a, s) for a, s in zip(others, schedules, strict=True)]
    for result in interchange_each(model, hypotheses, prompts, sources, progress=False):
        assert result.score.mean < 0.5


def test_r2_is_its_formula(model):
    prompts, sources = ends()
    hypothesis = Hypothesis(QueryDescent(3, step_size=0.1))
    result = interchange(model, hypothesis, prompts, sources, interventions=["query exchanged"], progress=False)
    assert [cell.intervention for cell in result.cells] == ["query exchanged"] * 2
    states = [hypothesis.algorithm.states(each) for each in (prompts, sources)]
    base, source = (model.predict(each) for each in (prompts, sources))
    for cell, r2, predicted, expected in zip(result.cells, result.r2, result.predictions, result.expected, strict=True):
        # the construction's stream is (x, -running prediction): what it adds later does not depend on it
        own = [algorithm_states(each, cell.layer) for each in (prompts, sources)]
        torch.testing.assert_close(predicted.T, base + own[1] - own[0], rtol=0, atol=1e-10)
        state = {name: value.clone() for name, value in states[0][cell.step].items()}
        for name in state:
            state[name][:, -1] = states[1][cell.step][name][:, -1]
        for k in range(cell.step, 3):
            state = hypothesis.algorithm.advance(k, state)
        torch.testing.assert_close(expected.T, state["prediction"][:, -1], rtol=0, atol=1e-10)
        error = (predicted - expected).square().mean() / (source - base).square().mean()
        assert r2.mean == pytest.approx(1 - error.item(), abs=1e-12)
        assert r2.low < r2.mean < r2.high


def algorithm_states(prompts: Prompts, after: int) -> Tensor:
    return THREE.read({name: value[:, -1:] for name, value in THREE.states(prompts)[after].items()})


def test_untrained_models_run_nothing():
    task = LinearRegression(x_dim=3, n_context=8)
    config = TransformerConfig(
        x_dim=3, n_context=8, n_layers=4, d_model=16, n_heads=2, d_mlp=32, prompt_format="interleaved",
        attention="softmax", normalization_type="LN", initializer_range=0.2, read_in="linear",
    )  # fmt: skip
    prompts, sources = ends(task)
    for algorithm in (ResidualDescent(4, step_size=0.1), NewtonSteps(2), RidgePath((1.0, 0.5, 0.2, 0.1))):
        result = interchange(HookedTransformer(config), Hypothesis(algorithm), prompts, sources, progress=False)
        assert result.score.mean < 0.1
        assert result.effects.mean < 0.1


def test_models_without_attention_get_the_other_interventions():
    task = LinearRegression(x_dim=3, n_context=6)
    model = HookedLSTM(LSTMConfig(x_dim=3, n_context=6, n_layers=2, d_model=12)).eval()
    hypothesis = Hypothesis(ResidualDescent(2, step_size=0.1))
    result = interchange(model, hypothesis, *ends(task), progress=False)
    assert result.untried == ("query does not read", "query stops reading", "context isolated")
    assert {cell.intervention for cell in result.cells} == set(INTERVENTIONS) - set(result.untried)


class TwoStepsABlock(nn.Module):
    """A user's network, each of whose blocks takes two steps of gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return -tokens[:, -1, -1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step_size = nn.Parameter(torch.tensor(STEP_SIZE, dtype=torch.float64))

    def forward(self, stream: Tensor) -> Tensor:
        for _ in range(2):
            xs = stream[..., :-1]
            moved = self.step_size * (xs @ xs[:, :-1].mT) @ stream[:, :-1, -1:]
            stream = torch.cat([xs, stream[..., -1:] - moved], dim=-1)
        return stream


def test_two_steps_in_one_block_of_a_users_module():
    model = wrap(TwoStepsABlock().eval(), encode="paired", decode=lambda out: out, layers="blocks.{}")
    prompts, sources = ends()
    hypothesis = Hypothesis(ResidualDescent(4, step_size=STEP_SIZE), schedule=((0, 0), (1, 2), (2, 4)))
    result = interchange(model, hypothesis, prompts, sources, progress=False)
    assert result.score.mean > 0.999
    assert {"query repeats", "context frozen"} < {cell.intervention for cell in result.cells}
    assert result.untried == ("query does not read", "query stops reading", "context isolated")
    wrong = Hypothesis(ResidualDescent(4, step_size=STEP_SIZE), schedule=((0, 0), (1, 1), (2, 4)))
    assert interchange(model, wrong, prompts, sources, progress=False).score.mean < 0.99


def test_the_table_the_text_and_the_saved_result(model, tmp_path):
    result = interchange(model, Hypothesis(THREE), *ends(), progress=False)
    again = load_result(result.save(tmp_path / "interchange"))
    assert again.score == result.score
    table = again.to_dataframe()
    assert table["r2"].min() > 0.999
    assert table[table["intervention"] == "context exchanged"]["moved"].iloc[0] > 0.1
    assert "effects explained" in str(result)
    assert "weakest" in result._repr_html_()
    assert str(result.cells[1]) == "query exchanged after 1 layer"


def test_cells_that_are_not_finite_are_the_weakest(model):
    prompts, sources = ends(n=12)
    asked = ["query exchanged"]
    result = interchange(model, Hypothesis(THREE), prompts, sources, interventions=asked, progress=False)
    assert result.effects.mean == pytest.approx(1.0)
    expected = result.expected.clone()
    expected[1, 0, 3] = torch.inf
    broken = dataclasses.replace(result, expected=expected)
    assert broken.weakest == 1
    assert broken.score.mean < -1e6


def test_effects_are_their_formula_for_each_kind(model):
    prompts, sources = ends()
    result = interchange(model, Hypothesis(QueryDescent(3, step_size=0.1)), prompts, sources, progress=False)
    for kinds in (["exchange"], ["ablation"], ["exchange", "ablation"]):
        total = weights = 0.0
        for i, cell in enumerate(result.cells):
            if cell.kind in kinds:
                moved = (result.predictions[i] - result.base).numpy()
                expected = (result.expected[i] - result.expected_base).numpy()
                size = (moved**2).mean() + (expected**2).mean()
                weight = min(1.0, size / 2 / ((result.sources[i] - result.base) ** 2).mean().item())
                total += weight * (1 - ((moved - expected) ** 2).mean() / size) if size else 0.0
                weights += weight
        assert result.explained(kinds).mean == pytest.approx(total / weights, abs=1e-9)  # type: ignore[arg-type]
    assert result.explained(["exchange"]).mean != result.explained(["ablation"]).mean
    assert result.explained(["prediction"]).mean == pytest.approx(0.0)  # nothing is done


def test_batches_do_not_change_the_result(model):
    prompts, sources = ends()
    whole = interchange(model, Hypothesis(THREE), prompts, sources, progress=False)
    parts = interchange(model, Hypothesis(THREE), prompts, sources, memory=300_000, progress=False)
    torch.testing.assert_close(whole.predictions, parts.predictions)
    torch.testing.assert_close(whole.expected, parts.expected)
