"""Results are the same after they are written to files and read again."""

import inspect

import pytest
import torch

from mechicl import algorithms
from mechicl.analysis import (
    Lens,
    align,
    align_over_training,
    behaviour,
    causes,
    dynamics,
    find_transitions,
    heads,
    identify,
    layers,
    match,
    measure_forgetting,
    measure_order_sensitivity,
    measure_shifted_losses,
    measure_target_copying,
    probe,
    read_dual_form,
    score_heads_over_training,
)
from mechicl.analysis.behaviour import measure_outside_span, rank_families
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.analysis.heads import measure_token_sensitivity
from mechicl.analysis.layers import cross_moments
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import load_result
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=2, n_context=4)
ONLINE, NEWTON = (
    AlgorithmLearner(algorithms.online_gradient_descent),
    AlgorithmLearner(algorithms.newton, {"steps": [1, 2]}),
)
MAKE = {
    "alignment": lambda model, prompts: align(model, ONLINE, prompts),
    "forgetting": lambda model, prompts: measure_forgetting(model, prompts),
    "order": lambda model, prompts: measure_order_sensitivity(model, prompts, n_orders=2),
    "span": lambda model, prompts: measure_outside_span(Lens(model), prompts),
    "growth": lambda model, prompts: fit_growth([1, 2, 3, 4, 5], [1, 2, 4, 7, 17]),
    "match": lambda model, prompts: match(Lens(model), NEWTON, prompts, similarity="weights"),
    "shifts": lambda model, prompts: measure_shifted_losses({"model": model}, TASK, [1.0, 2.0], n_prompts=10),
    "layer errors": lambda model, prompts: Lens(model).errors(prompts),
    "probes": lambda model, prompts: probe(model, {"cross": cross_moments}, prompts, prompts),
    "ranking": lambda model, prompts: rank_families({"Newton": match(Lens(model), NEWTON, prompts)}),
    "copying": lambda model, prompts: measure_target_copying(model, prompts),
    "derivatives": lambda model, prompts: measure_token_sensitivity(model, prompts),
    "dual form": lambda model, prompts: read_dual_form(model, prompts),
    "transitions": lambda model, prompts: find_transitions([0, 9, 11], [[1.0, 1.0], [0.0, 1.0], [0.0, 0.5]]),
    "training": lambda model, prompts: align_over_training([model, model], ONLINE, prompts),
    "heads": lambda model, prompts: score_heads_over_training([model], ["target_to_input"], prompts=prompts),
    "identification": lambda model, prompts: identify(ONLINE, TASK, steps=1, n_prompts=20),
}


@pytest.fixture(scope="module")
def model():
    fields = {"x_dim": 2, "n_context": 4, "prompt_format": "interleaved", "d_model": 8, "initializer_range": 0.3}
    return HookedTransformer(TransformerConfig(**fields, attention="softmax")).eval()


@pytest.mark.parametrize("name", MAKE)
def test_results_are_the_same_after_saving_and_loading(name, model, tmp_path):
    result = MAKE[name](model, TASK.sample(12, seed=0))
    again = load_result(result.save(tmp_path / "result"))
    assert type(again) is type(result)
    assert str(again) == str(result)
    assert len(str(result).splitlines()) > 1
    table = result.to_dataframe()
    assert again.to_dataframe().equals(table)
    for name in ("cosine", "similarities", "attention", "share"):  # intervals do not leave the range of the quantity
        ends = table.filter(regex=f"{name}.*_(low|high)$").to_numpy(dtype=float)
        assert not (abs(ends) > 1).any()
    for quantity, values in result.samples().items():
        assert torch.equal(again.samples()[quantity].nan_to_num(9), values.detach().nan_to_num(9))


NO_MODEL = {"find_transitions", "composition_scores", "prefix_matching_scores", "rank_families", "sample_sources"}
ONE_PASS = {"sensitivities", "induced_weights", "regressed_weights", "tuned_descent", "tuned_clipped_descent"}
QUANTITIES = {"algorithm_weights", "cross_moments", "ols_weights", "second_moments"}


@pytest.mark.parametrize("package", [behaviour, causes, dynamics, heads, layers])
def test_analyses_take_the_same_options(package):
    functions = {name for name in package.__all__ if inspect.isfunction(getattr(package, name))}
    for name in functions - NO_MODEL - ONE_PASS - QUANTITIES:
        parameters = inspect.signature(getattr(package, name)).parameters
        assert {"memory", "progress"} <= parameters.keys(), name
        assert "n_prompts" not in parameters or "seed" in parameters, name
