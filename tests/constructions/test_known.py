"""Constructions and known models compute their algorithms, plain, hidden and trained."""

import dataclasses
import json

import pytest
import torch

from mechicl import analysis, constructions
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import certificates_table, hide, known_models
from mechicl.constructions.certificates import certificates
from mechicl.constructions.circuits import previous_token_then_induction, two_steps_in_a_layer
from mechicl.constructions.known import KnownModel
from mechicl.constructions.trained import recipes
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression

PLAIN, HIDDEN = known_models(), known_models(hidden=True)
TASK = LinearRegression(x_dim=5, n_context=20)


def test_there_are_enough_of_them_with_different_names():
    assert len(PLAIN) >= 20
    assert len({known.name for known in PLAIN}) == len(PLAIN)


@pytest.mark.parametrize("known", [*PLAIN, *HIDDEN], ids=lambda known: known.name)
def test_predictions_equal_those_of_the_algorithm(known):
    prompts = known.task.sample(32, seed=0, dtype=torch.float64)
    expected = known.hypothesis.algorithm.predict(prompts)
    tolerance = 1e-8 if known.exact else 1e-3
    error = (known.model.predict(prompts) - expected).abs().max()
    assert error < tolerance * expected.abs().max()


def test_variables_are_in_the_subspaces_of_the_hypotheses():
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    for model, hypothesis in (
        two_steps_in_a_layer(x_dim=5, n_context=20, step_size=0.14, layers=2),
        previous_token_then_induction(x_dim=5, n_context=20),
    ):
        stream = model.run_with_cache(prompts)[1]["blocks.0.hook_resid_post"]
        state = hypothesis.algorithm.states(prompts)[hypothesis.schedule[1][1]]
        if model.cfg.prompt_format == "paired":
            places = {"x": state["x"], "residual": state["residual"]}
        else:  # the previous input at targets, with its squared norm
            stream, previous = stream[:, 1::2], state["previous"][:, :-1]
            places = {"previous": torch.cat([previous, previous.square().sum(-1, keepdim=True)], dim=-1)}
        for name, value in places.items():
            torch.testing.assert_close(stream @ hypothesis.subspaces[name], value)


# ---- trained ----


@pytest.mark.parametrize("known", known_models(trained=True), ids=lambda known: known.name)
def test_trained_models_contain_their_algorithm(known):
    prompts = known.task.sample(200, seed=5, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=6)
    for model, hypothesis in ((known.model, known.hypothesis), rotated(known)):
        assert isinstance(model, HookedTransformer)
        result = analysis.interchange(model, hypothesis, prompts, sources, progress=False)
        assert result.score.mean >= 0.99, result.cells[result.weakest]
        assert result.effects.mean >= 0.99
    fresh = HookedTransformer(known.model.cfg, seed=1).double()
    control = analysis.interchange(fresh, known.hypothesis, prompts, sources, progress=False)
    assert control.r2[0].mean < 0.1


def rotated(known: KnownModel) -> tuple[HookedTransformer, Hypothesis]:
    hidden = hide(known.model, seed=1)
    subspaces = {name: hidden.stream.T @ columns for name, columns in known.hypothesis.subspaces.items()}
    return hidden.model, dataclasses.replace(known.hypothesis, subspaces=subspaces)


@pytest.mark.parametrize("name", recipes())
def test_records_agree_with_recipes(name):
    checkpoint, recipe = load_checkpoint(name), recipes()[name]
    assert checkpoint.record["training"] == json.loads(json.dumps(recipe.config.to_dict()))
    assert checkpoint.record["interchange"]["hypothesis"] == recipe.hypothesis.name
    assert min(checkpoint.record["interchange"]["r2"][0].values()) >= 0.99
    assert checkpoint.record["command"] == f"python analyses/train_known.py {name} checkpoints/{name}"


@pytest.fixture(scope="module")
def table():
    return list(certificates(n_prompts=16))


def test_errors_of_constructions_are_as_stated(table):
    exact = [certificate for certificate in table if certificate.statement == "exact"]
    assert len(exact) >= 15
    assert {c.construction: c.max_relative_error for c in exact if not c.max_relative_error <= 1e-10} == {}
    others = [certificate for certificate in table if certificate.statement != "exact"]
    assert {certificate.construction for certificate in others} == {"copy_targets", "softmax_gradient_descent", "div"}
    for certificate in others:
        assert certificate.statement.startswith("O(")
        # div's 0.8^256 is below rounding, 12 e^-10 and 0.01² are not
        low, high = (0, 1e-12) if certificate.construction == "div" else (1e-6, 6e-4)
        assert low < certificate.max_relative_error < high


def test_every_construction_has_a_certificate(table):
    vocabulary = {"Head", "Hidden", "Layer", "Stream", "assemble", "with_pseudo_examples", "certificates_table"}
    vocabulary |= {
        "induction",
        "hide",
        "known_models",
        "compress",
        "weights_circuit",
    }  # tested elsewhere
    operations = {"aff", "div", "mov", "mul", "total"}
    assert {certificate.construction for certificate in table} == operations | set(constructions.__all__) - vocabulary


def test_layers_width_and_heads_are_those_of_the_models(table):
    sizes = {c.theorem: (c.layers, c.width, c.heads) for c in table}
    assert sizes["von Oswald et al. 2023, Proposition 1"] == (5, 8, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (linear)"] == (7, 14, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (relu)"] == (7, 14, 2)


def test_the_table_has_one_row_per_certificate(table):
    frame = certificates_table(n_prompts=16)
    columns = ["theorem", "construction", "layers", "width", "heads", "max_relative_error", "statement"]
    assert list(frame.columns) == columns
    assert frame.max_relative_error.tolist() == [certificate.max_relative_error for certificate in table]
    assert not frame.duplicated(["theorem", "statement"]).any()
