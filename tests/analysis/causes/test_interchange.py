"""Interchange, hypotheses and learned subspaces on models whose algorithm is known, and on others."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor, nn

from mechicl import analysis, wrap
from mechicl.algorithms.stepwise import Hypothesis, NewtonSteps, QueryDescent, ResidualDescent, RidgePath, query_of
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.analysis.causes import (
    INTERVENTIONS,
    HypothesisTest,
    SubspaceFit,
    SubspaceSearch,
    fit_subspace,
    interchange,
    sample_sources,
)
from mechicl.analysis.causes import test_hypotheses as rank_hypotheses
from mechicl.analysis.causes.hypotheses import _rising_steps, candidate_algorithms, reads_ahead
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.constructions import gd_plus_plus, gradient_descent, hide, known_models
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, record_streams
from mechicl.prompts import Prompts
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
    assert alone.untried == ()
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
            context = {name: value[:, :-1] for name, value in state.items()}
            state = hypothesis.algorithm.step(k, state, context)
        torch.testing.assert_close(expected.T, state["prediction"][:, -1], rtol=0, atol=1e-10)
        error = (predicted - expected).square().mean() / (source - base).square().mean()
        assert r2.mean == pytest.approx(1 - error.item(), abs=1e-12)
        assert r2.low < r2.mean < r2.high
    unmoved = hypothesis.algorithm.predict(prompts)
    moved = (result.expected - unmoved.T).square().mean((1, 2)) / (source - base).square().mean()
    torch.testing.assert_close(torch.tensor([each.mean for each in result.expected_moved]).double(), moved)


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


def test_cells_that_are_not_finite_are_the_weakest(model):
    prompts, sources = ends(n=12)
    asked = ["query exchanged"]
    result = interchange(model, Hypothesis(THREE), prompts, sources, interventions=asked, progress=False)
    assert result.effects.mean == pytest.approx(1.0)
    expected = result.expected.clone()
    expected[1, 0, 3] = torch.inf
    broken = replace(result, expected=expected)
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


# ---- hypotheses ----
FOUR_INPUTS = LinearRegression(x_dim=4, n_context=12)
SIZES: dict[str, Any] = {"x_dim": 4, "n_context": 12}


@pytest.fixture(scope="module")
def ranked():
    model = hide(gd_plus_plus(**SIZES, steps=3, step_size=(0.2, 0.5, 1.5), gamma=(0.08, 0.3, 0.5)), seed=1).model
    return rank_hypotheses(model, FOUR_INPUTS, n_prompts=32, with_likeness=False, progress=False)


def test_the_algorithm_of_a_hidden_model_comes_first(ranked):
    assert ranked.best.hypothesis == "GD++, 3 steps, parameters for each"
    assert ranked.best.effects.mean > 0.99
    assert ranked.best in ranked.supported
    assert ranked.schedules[0] == ((0, 0), (1, 1), (2, 2), (3, 3))
    others = ranked.to_dataframe().iloc[1:]
    assert others["effects"].max() < ranked.best.effects.low


def test_an_algorithm_that_is_nearly_the_model_s_is_set_apart():
    model = hide(gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=2), seed=0).model
    kinds = {"in the context": ResidualDescent(2, step_size=STEP_SIZE), "alone": QueryDescent(2, step_size=STEP_SIZE),
             "again": ResidualDescent(2, step_size=(STEP_SIZE, STEP_SIZE + 1e-6))}  # fmt: skip
    result = rank_hypotheses(model, TASK, kinds, n_prompts=64, with_likeness=False, progress=False)
    assert result.to_dataframe()["weakest_r2"].min() > 0.9
    assert {test.hypothesis for test in result.supported} == {"in the context", "again"}
    assert "not separable by these interventions" in str(result)
    ((name, cell),) = result.set_apart.items()
    table = next(test for test in result.tests if test.hypothesis == name).to_dataframe()
    assert (name, cell.intervention) == ("alone", table["intervention"][int(table["r2"].argmin())])
    assert "set apart" in str(result)


def test_hypotheses_that_fail_at_different_interventions_are_not_set_apart(model):
    exact = interchange(model, Hypothesis(THREE), *ends(), progress=False)
    noise = 0.005 * torch.randn(exact.expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    odd = (torch.arange(len(noise)) % 2)[:, None, None]
    wrong = {"odd": odd * noise, "even": (1 - odd) * noise, "both": noise}
    tests = [replace(exact, hypothesis=name, expected=exact.expected + error) for name, error in wrong.items()]
    assert min(test.score.mean for test in tests) > 0.9
    schedule = Hypothesis(THREE).schedule
    two, three = (HypothesisTest(each, [tuple(schedule)] * len(each)) for each in (tests[:2], tests))
    assert [test.hypothesis for test in two.supported] == ["odd", "even"]
    assert (two.set_apart, list(three.set_apart)) == ({}, ["both"])
    assert HypothesisTest([exact, *tests], [tuple(schedule)] * 4).supported == [exact]


@pytest.mark.parametrize(
    "known", [known for known in known_models() if known.model.cfg.n_layers < 3][:3], ids=lambda known: known.name
)
def test_mixtures_of_two_contexts_are_what_a_mixed_prompt_gives(known):
    prompts, sources = ends(known.task, n=6)
    asked = ["half exchanged", "point exchanged"]
    result = interchange(known.model, known.hypothesis, prompts, sources, interventions=asked, progress=False)
    first = [i for i, cell in enumerate(result.cells) if cell.layer == 0]
    assert {result.cells[i].kind for i in first} == {"mixture"}
    for i in first:
        where = slice(0, 20, 2) if result.cells[i].intervention == "half exchanged" else slice(10, 11)
        xs, ys = prompts.xs.clone(), prompts.ys.clone()
        xs[:, where], ys[:, where] = sources.xs[:, where], sources.ys[:, where]
        torch.testing.assert_close(result.predictions[i].T, known.model.predict(Prompts(xs, ys)), rtol=0, atol=1e-9)
    assert result.score.mean > 0.999


def test_the_nearest_family_by_predictions_is_reported_too():
    model = gradient_descent(**SIZES, step_size=0.2, steps=2)
    hypotheses = [Hypothesis(kind(2, step_size=0.2)) for kind in (QueryDescent, ResidualDescent)]
    result = rank_hypotheses(model, FOUR_INPUTS, hypotheses, n_prompts=64, progress=False)
    assert result.best.hypothesis == ResidualDescent(2, step_size=0.2).name
    assert result.likeness.startswith("gradient descent, 2 steps")
    assert "nearest by predictions" in str(result)


def test_a_schedule_is_the_best_of_all_that_rise():
    generator = torch.Generator().manual_seed(0)
    predicted, expected = (torch.randn(n, 2, 5, 1, generator=generator, dtype=torch.float64) for n in (3, 5))

    def cost(steps) -> float:
        total = 0.0
        for layer, step in enumerate(steps):
            for ask in range(2):
                model, algorithm = predicted[layer, ask], expected[step, ask]
                total += ((model - algorithm).norm() ** 2 / (model.norm() ** 2 + algorithm.norm() ** 2)).item()
        return total

    rising = [s for s in itertools.product(range(5), repeat=3) if list(s) == sorted(s)]
    assert tuple(_rising_steps(predicted, expected)) == min(rising, key=cost)


def test_a_hypothesis_that_covers_fewer_layers_ranks_lower():
    model = gradient_descent(**SIZES, step_size=0.2, steps=3)
    whole = Hypothesis(ResidualDescent(3, step_size=0.2), name="layer by layer")
    part = Hypothesis(ResidualDescent(3, step_size=0.2), schedule=((0, 0), (2, 2), (3, 3)), name="two at once")
    ends = Hypothesis(ResidualDescent(3, step_size=0.2), schedule=((0, 0), (3, 3)), name="the end alone")
    result = rank_hypotheses(model, FOUR_INPUTS, [ends, part, whole], n_prompts=16, with_likeness=False, progress=False)
    assert [test.hypothesis for test in result.tests] == ["layer by layer", "two at once", "the end alone"]
    assert result.to_dataframe()["layers_covered"].tolist() == [1.0, 0.5, 0.0]
    assert [test.hypothesis for test in result.supported] == ["layer by layer", "two at once"]


def test_causal_points_have_causal_candidates():
    task = LinearRegression(x_dim=2, n_context=6)
    prompts = task.sample(300, seed=0, dtype=torch.float64)
    truth = ResidualDescent(3, step_size=(0.1, 0.2, 0.3), gamma=(0.02, 0.05, 0.0), causal=True)
    after = torch.stack([truth.read(query_of(state)) for state in truth.states(prompts)[1:]])
    candidates = candidate_algorithms(prompts, after, causal=True)
    named = candidates["GD++, 3 steps, parameters for each, each point from its past"]
    assert isinstance(named, ResidualDescent)
    assert named.causal
    assert named.step_sizes == pytest.approx((0.1, 0.2, 0.3), rel=1e-4)
    assert named.gammas[:2] == pytest.approx((0.02, 0.05), rel=1e-3)
    whole = [name for name, algorithm in candidates.items() if not algorithm.causal and "in the context" in name]
    assert whole == ["preconditioned gradient descent, 1 step, residuals in the context"]  # no point reads them


def test_points_that_read_later_ones_are_detected():
    prompts = FOUR_INPUTS.sample(4, seed=0, dtype=torch.float64)
    ahead = gradient_descent(**SIZES, step_size=0.2, steps=2)
    assert reads_ahead(ModelAdapter(ahead), prompts, 1)
    config = TransformerConfig(**SIZES, n_layers=2, d_model=8, n_heads=1, prompt_format="interleaved", read_in="linear")
    assert not reads_ahead(ModelAdapter(HookedTransformer(config).eval()), prompts, 2)


# ---- errors ----
PROMPTS = TASK.sample(6, seed=0, dtype=torch.float64)
SOURCES = analysis.sample_sources(TASK, PROMPTS, seed=1)
KNOWN = {known.name: known for known in known_models()}
TWO, FOUR = (KNOWN[f"gradient descent, {n} steps"] for n in (2, 4))
SMALL = ResidualDescent(2, step_size=0.1)
HUGE = [Prompts(1e80 * each.xs, each.ys) for each in (PROMPTS, SOURCES)]
FEW = SubspaceFit(n_fitting=8, n_prompts=8, iterations=1, restarts=0)


def patterns(n_others: int = 6, **options: Any):
    others = PROMPTS.with_query(PROMPTS.query.xs.flip(0))[:n_others]
    return analysis.causes.exchange_patterns(TWO.model, PROMPTS, others, **options)


def exchange(hypothesis=TWO.hypothesis, prompts=PROMPTS, sources=SOURCES, model: Any = TWO.model, **options: Any):
    return analysis.interchange(model, hypothesis, prompts, sources, progress=False, **options)


def fit(variables: Any = "residual", hypothesis=FOUR.hypothesis, model: Any = FOUR.model, **options: Any):
    return analysis.fit_subspace(model, hypothesis, variables, TASK, **{"fit": FEW, "progress": False} | options)


@pytest.mark.parametrize(("call", "named"), [
    (lambda: exchange(sources=TASK.sample(6, seed=1, dtype=torch.float64)), "sources must have the prompts' quer"),
    (lambda: exchange(FOUR.hypothesis), "ends after 4 layers, and the model has 2"),
    (lambda: exchange(sources=SOURCES[:5]), "same shape"),
    (lambda: exchange(interventions=["head exchanged"]), "'head exchanged'"),
    (lambda: exchange(prompts=HUGE[0], sources=HUGE[1]), "points of sizes .*: scale them"),
    (lambda: exchange(Hypothesis(ResidualDescent(2, step_size=1e200))), "not finite after [12] steps"),
    (lambda: exchange(sources=PROMPTS), "the same for all prompts and their sources"),
    (lambda: exchange(Hypothesis(SMALL, subspaces={"x": torch.eye(4, 2).double()})), "4 rows, and the stream 6"),
    (lambda: exchange(prompts=PROMPTS.prefix(0), sources=SOURCES.prefix(0)), "n_context must be 1 or more"),
    (lambda: interchange_each(TWO.model, [], PROMPTS, SOURCES), "no hypotheses"),
    (lambda: patterns(3), "same shape"),
    (lambda: patterns(layers=[2]), "layers must be some of 0 to 1"),
    (lambda: analysis.test_hypotheses(TWO.model, TASK, [Hypothesis(SMALL)] * 2), "called 'gradient descent, 2"),
    (lambda: analysis.test_hypotheses(TWO.model, TASK.replace(n_context=0)), "n_context"),
    (lambda: candidate_algorithms(PROMPTS, torch.full((2, 6, 1), torch.nan)), "not finite"),
    (lambda: fit("velocity"), r"not \['velocity'\]"),
    *[(lambda dims=dims: fit(dims=dims), "dims must rise") for dims in ((), (0, 1), (2, 1), (1, 1))],
    (lambda: fit(hypothesis=Hypothesis(SMALL, ((0, 0), (2, 1), (4, 2))), layers=1), r"\[0, 2, 4\]; got \[1\]"),
    (lambda: fit(hypothesis=Hypothesis(SMALL), layers=1), "ends after 2 layers"),
    (lambda: fit("x"), "does not change the prediction"),  # the sources have the same queries
    (lambda: fit(fit=replace(FEW, untrained=TWO.model)), r"untrained model has \(layers, d_model\) = \(2, 6\)"),
    (lambda: fit(layers=2, dims=(1, 2)).subspace(2, 3), "dim must be one of 1, 2; got 3"),
    (lambda: fit(layers=2, dims=1).r2(2, 1, "twin"), "search must be one of 'model', .*; got 'twin'"),
])  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


# ---- subspaces ----
QUICK = SubspaceFit(n_fitting=32, n_prompts=32, iterations=15, restarts=0)
HIDDEN = {known.name.removesuffix(", hidden"): known for known in known_models(hidden=True)}


def degrees(result: SubspaceSearch, layer: int, columns: torch.Tensor) -> float:
    learned = result.subspace(layer, columns.shape[1])
    return float(subspace_angles(learned.numpy(), columns.numpy()).max()) * 180 / torch.pi


@pytest.mark.parametrize(("name", "layer", "variable", "place"), [
    ("gradient descent, 2 steps", 1, "residual", "query"),
    ("gradient descent, 4 steps", 2, "residual", "context"),
    ("GD++, 3 steps", 1, "x", "context"),
    ("preconditioned gradient descent, 3 steps", 1, "residual", "context"),
    ("Newton, 3 iterations", 2, "inverse times x", "context"),
    ("copying, then gradient descent, 3 steps", 2, "residual", "context"),  # targets have separate tokens
])  # fmt: skip
def test_planted_variables_are_found_where_they_lie(name, layer, variable, place):
    known = HIDDEN[name]
    columns = known.hypothesis.subspaces.get(variable, torch.zeros(0, 1))
    dim = columns.shape[1]
    options: dict[str, Any] = {"place": place, "layers": layer, "dims": dim, "fit": QUICK, "progress": False}
    result = fit_subspace(known.model, known.hypothesis, variable, known.task, **options)
    assert result.r2(layer, dim).mean > 0.999
    assert result.rest_r2(layer, dim).mean > 0.99
    assert not len(columns) or degrees(result, layer, columns) < 1
    for control in ("random targets", "untrained model"):
        assert result.r2(layer, dim, control).mean < 0.3


@pytest.mark.parametrize("named", [("x",), ("residual",), ("x", "residual")])
def test_the_rest_carries_the_variables_without_a_subspace(named):
    known = HIDDEN["gradient descent, 2 steps"]
    subspaces = {name: known.hypothesis.subspaces[name] for name in named}
    prompts = known.task.sample(16, seed=0, dtype=torch.float64)
    sources = sample_sources(known.task, prompts, seed=1)
    hypothesis = replace(known.hypothesis, subspaces=subspaces)
    result = interchange(known.model, hypothesis, prompts, sources, progress=False)
    made = {cell.intervention for cell in result.cells}
    assert {"query's rest exchanged", "context's rest exchanged"} <= made
    assert result.score.mean == pytest.approx(1)  # of the intervention that is predicted worst


@pytest.mark.parametrize(("hypothesis", "variable", "layer", "dim"), [
    (Hypothesis(ResidualDescent(3, step_size=STEP_SIZE, momentum=0.5)), "velocity", 1, 1),
    (Hypothesis(NewtonSteps(1), schedule=((0, 0), (1, 1), (2, 2), (3, 3))), "inverse times x", 2, 5),
])  # fmt: skip
def test_absent_variables_are_not_found(hypothesis, variable, layer, dim):
    model = hide(gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=3), seed=1).model
    few = replace(QUICK, n_fitting=24, n_prompts=24, iterations=8)
    result = fit_subspace(
        model, hypothesis, variable, TASK, place="context", layers=layer, dims=dim, fit=few, progress=False
    )
    assert min(result.r2(layer, dim).mean, result.rest_r2(layer, dim).mean) < 0.5


def test_too_few_directions_do_not_carry_it():
    known = HIDDEN["GD++, 2 steps"]
    result = fit_subspace(
        known.model, known.hypothesis, "x", known.task, place="context", dims=(1, 3, 5), fit=QUICK, progress=False
    )
    one, three, five = (result.r2(1, dim) for dim in result.dims)
    assert one.mean < three.mean < 0.95
    assert three.high < five.low
    assert five.mean > 0.999


def test_distances_are_those_of_exchanges_made_by_hand():
    model = gradient_descent(x_dim=5, n_context=20, step_size=STEP_SIZE, steps=2)
    hypothesis = Hypothesis(ResidualDescent(2, step_size=STEP_SIZE))
    few = replace(QUICK, iterations=3, restarts=1)
    result = fit_subspace(model, hypothesis, "residual", TASK, place="context", dims=2, fit=few, progress=False)
    basis = result.subspace(1, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2).double())
    prompts = TASK.sample(32, seed=2, dtype=torch.float64)  # those that are held out
    sources = sample_sources(TASK, prompts, seed=3)
    for i in range(4):
        streams, residuals = [], []
        for each in (prompts[i : i + 1], sources[i : i + 1]):
            x, y = each.xs[0], torch.cat([each.ys[0, :-1], torch.zeros(1, 1).double()])
            y = y - STEP_SIZE * x @ x[:-1].T @ y[:-1]
            streams.append(torch.cat([x, y], dim=1))
            residuals.append(y)

        def finish(xs, ys):
            return -(ys - STEP_SIZE * xs @ xs[:-1].T @ ys[:-1])[-1]

        base, other = streams
        unchanged = finish(base[:, :5], base[:, 5:])
        foretold = finish(base[:, :5], torch.cat([residuals[1][:-1], residuals[0][-1:]])) - unchanged
        moved = (other - base) @ basis @ basis.T
        for errors, difference in ((result.errors, moved), (result.rest_errors, other - base - moved)):
            exchanged = torch.cat([(base + difference)[:-1], base[-1:]])
            change = finish(exchanged[:, :5], exchanged[:, 5:]) - unchanged
            if errors is result.errors:
                assert errors[0, 0, 0, i].item() == pytest.approx((change - foretold).square().item(), abs=1e-9)
            else:  # all other variables: the inputs
                by_x = finish(torch.cat([other[:-1, :5], base[-1:, :5]]), base[:, 5:]) - unchanged
                assert errors[0, 0, 0, i].item() == pytest.approx((change - by_x).square().item(), abs=1e-9)
        assert result.changes[0, 0, i].item() == pytest.approx(foretold.square().item(), abs=1e-9)
    r2 = 1 - result.errors[0, 0, 0].mean() / result.changes[0, 0].mean()
    assert result.r2(1, 2).mean == pytest.approx(r2.item())


def small_transformer() -> HookedTransformer:
    config = TransformerConfig(
        x_dim=3, n_context=6, n_layers=3, d_model=12, n_heads=2, d_mlp=24, prompt_format="interleaved", dtype="float64",
        attention="softmax", normalization_type="LN", initializer_range=0.4, read_in="linear",
    )  # fmt: skip
    return HookedTransformer(config, seed=1).eval()


def test_exchanges_and_their_derivatives_are_those_of_whole_passes():
    model, task = small_transformer(), LinearRegression(x_dim=3, n_context=6)
    prompts = task.sample(5, seed=0, dtype=torch.float64)
    adapter = ModelAdapter(model)
    tokens = [adapter.encode(each) for each in (prompts, sample_sources(task, prompts, seed=1))]
    base, source = (record_streams(adapter, each) for each in tokens)
    runs = StreamRuns(adapter, tokens[0], base, source)
    basis = torch.linalg.qr(torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    places: tuple[Place, ...] = ("query", "context")
    for layer in (0, 2, 3):
        for place in places:
            for rest in (False, True):
                leaf = basis.clone().requires_grad_()
                predicted = runs.exchange(layer, place, leaf, rest=rest)
                assert predicted.requires_grad
                torch.autograd.gradcheck(partial(runs.exchange, layer, place, rest=rest), leaf, fast_mode=True)
                where = slice(-1, None) if place == "query" else slice(0, -1)
                streams = base[layer].clone()
                moved = (source[layer] - streams)[:, where]
                inside = moved @ basis @ basis.T
                streams[:, where] += moved - inside if rest else inside
                whole = model(streams, start_at_layer=layer)
                torch.testing.assert_close(predicted.detach(), model.decode(whole)[:, -1])
    assert not runs.exchange(1, "query", basis).requires_grad


def test_the_whole_stream_is_the_exchange_of_everything():
    model, task = small_transformer(), LinearRegression(x_dim=3, n_context=6)
    hypothesis = Hypothesis(ResidualDescent(3, step_size=0.1))
    result = fit_subspace(
        model, hypothesis, "residual", task, layers=(1, 3), dims=12, fit=replace(QUICK, restarts=1), progress=False
    )
    prompts = task.sample(32, seed=2, dtype=torch.float64)
    sources = sample_sources(task, prompts, seed=3)
    asked = interchange(model, hypothesis, prompts, sources, interventions=["query exchanged"], progress=False)
    moved, foretold = asked.predictions - asked.base, asked.expected - asked.expected_base
    torch.testing.assert_close(result.errors[0, 0, 0], (moved - foretold)[0].square().mean(0))
    torch.testing.assert_close(result.rest_errors[0, 0, 0], torch.zeros(32).double())
    assert result.searches == ("model", "random targets", "untrained model")
    table = result.to_dataframe()
    row = table[(table["search"] == "untrained model") & (table["layer"] == 1)].iloc[0]
    assert row["r2"] == result.r2(1, 12, "untrained model").mean
    assert 1 - result.intervals()["errors"].mean == pytest.approx(table["r2"].mean())


def test_wrapped_models_are_searched_through_their_hooks():
    model = wrap(TwoStepsABlock().eval(), encode="paired", decode=lambda out: out, layers="blocks.{}")
    hypothesis = Hypothesis(ResidualDescent(4, step_size=STEP_SIZE), schedule=((0, 0), (1, 2), (2, 4)))
    result = fit_subspace(model, hypothesis, "residual", TASK, place="context", dims=1, fit=QUICK, progress=False)
    assert result.searches == ("model", "random targets")
    assert result.steps == (2,)
    assert result.r2(1, 1).mean > 0.999
    assert abs(result.subspace(1, 1)[-1].item()) == pytest.approx(1, abs=1e-4)


def test_variables_are_read_off_each_token_of_a_point_alone_too():
    known = HIDDEN["previous token, then induction"]  # whose second tokens hold copies of the first ones
    few = replace(QUICK, n_fitting=48, iterations=1)
    options: dict[str, Any] = {"place": "context", "layers": 1, "dims": 5, "fit": few, "progress": False}
    result = fit_subspace(known.model, known.hypothesis, "x, target", known.task, **options)
    assert result.variables == ("x", "target")
    assert result.r2(1, 5).mean > 0.8
    assert result.rest_r2(1, 5).mean > 0.8
