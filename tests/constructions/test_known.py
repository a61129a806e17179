"""Known models compute their algorithms, and keep their function when they are hidden or compressed."""

import dataclasses

import pytest
import torch

from mechicl import analysis, constructions
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import compress, hide, known_models
from mechicl.constructions.known import KnownModel, previous_token_then_induction, two_steps_in_a_layer
from mechicl.constructions.trained import recipes
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig
from tests.constructions.reference import random_model
from tests.scripts import import_script

# ---- known ----
PLAIN, HIDDEN = known_models(), known_models(hidden=True)
STATES = [*known_models(recurrent=True), *known_models(recurrent=True, hidden=True)]
TASK = LinearRegression(x_dim=5, n_context=20)


@pytest.mark.parametrize("known", [*PLAIN, *HIDDEN, *STATES], ids=lambda known: known.name)
def test_predictions_equal_those_of_the_algorithm(known):
    prompts = known.task.sample(32, seed=0, dtype=torch.float64)
    expected = known.hypothesis.algorithm.predict(prompts)
    tolerance = 1e-8 if known.exact else 1e-3
    error = (known.model.predict(prompts) - expected).abs().max()
    assert error < tolerance * expected.abs().max()


def test_sets_of_known_models_exclude_each_other():
    with pytest.raises(ValueError, match="trained and recurrent are different sets of models"):
        known_models(trained=True, recurrent=True)


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
    assert TrainingConfig.from_dict(checkpoint.record["training"]).to_dict() == recipe.config.to_dict()
    assert checkpoint.record["interchange"]["hypothesis"] == recipe.hypothesis.name
    assert min(checkpoint.record["interchange"]["r2"][0].values()) >= 0.99
    assert checkpoint.record["command"] == f"python analyses/train_known.py {name} checkpoints/{name}"


@pytest.fixture(scope="module")
def table():
    return list(import_script("theorems").certificates())


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
    others = {"Head", "Layer", "Stream", "assemble"}  # of models
    tested_elsewhere = {"induction", "hide", "known_models", "compress", "weights_circuit"}
    others |= tested_elsewhere
    operations = {"aff", "div", "mov", "mul", "total"}
    assert {certificate.construction for certificate in table} == operations | set(constructions.__all__) - others


def test_certificates_differ_and_have_the_sizes_of_their_models(table):
    sizes = {c.theorem: (c.layers, c.width, c.heads) for c in table}
    assert sizes["von Oswald et al. 2023, Proposition 1"] == (5, 8, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (linear)"] == (7, 14, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (relu)"] == (7, 14, 2)
    assert len({(c.theorem, c.statement) for c in table}) == len(table)


# ---- hiding ----
IDS = torch.randint(4, (128, 6), generator=torch.Generator().manual_seed(0))
PROMPTS = LinearRegression(x_dim=3, n_context=8).sample(16, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("config", [
    {},
    {"attention": "softmax", "d_mlp": 5, "act_fn": "relu"},
    {"attention": "linear,softmax", "score_scale": 2.0, "sink": "none"},
    {"prompt_format": "interleaved", "positional_embedding_type": "sinusoidal", "d_pos": 6},
    {"prompt_format": "interleaved", "positional_embedding_type": "standard", "attention": "softmax"},
    {"positional_embedding_type": "one_hot", "read_in": "identity", "read_out": "identity", "d_model": 13},
    {"recurrent": True, "d_mlp": 4, "damping": 0.5},
    {"share_mlp": True, "d_mlp": 4, "act_fn": "square"},
    {"mlp_location": "input", "d_mlp": 4},
    {"attention": "softmax", "sink": "learned", "keys": "full"},
    {"prompt_format": "interleaved", "momentum": 0.5},
], ids=lambda config: ", ".join(f"{k}={v}" for k, v in config.items()) or "plain")  # fmt: skip
@pytest.mark.parametrize("reads_junk", [False, True])
def test_all_kinds_of_models_keep_their_function(config, reads_junk):
    model = random_model(**config)
    hidden = hide(model, seed=1, distractors=2, junk_prompts=PROMPTS if reads_junk else None)
    torch.testing.assert_close(hidden.model.predict(PROMPTS), model.predict(PROMPTS), rtol=1e-7, atol=1e-9)
    assert hidden.model.cfg.n_heads == model.cfg.n_heads + 2


def test_distractors_that_read_junk_affect_only_other_distractors():
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.2, steps=4)
    hidden = hide(model, seed=3, junk_prompts=PROMPTS)
    plain = hide(model, seed=3)
    moved = {}
    for name, each in (("reading", hidden), ("not reading", plain)):
        junk = torch.linalg.qr(each.stream.T, mode="complete").Q[:, model.cfg.d_model :]
        cache = each.model.run_with_cache(PROMPTS)[1]
        stream = cache["blocks.0.hook_resid_post"]
        changed = stream + torch.randn(junk.shape[1], dtype=torch.float64) @ junk.T
        after = [each.model(s, start_at_layer=1, stop_at_layer=4) for s in (stream, changed)]
        torch.testing.assert_close(*(s @ each.stream.T for s in after))  # the model's stream
        moved[name] = ((after[1] - changed) @ junk - (after[0] - stream) @ junk).abs().max().item()
        if name == "reading":  # never larger than the stream
            for layer in range(4):
                stream = cache[f"blocks.{layer}.hook_resid_post"]
                own = (stream @ each.stream.T).square().mean()
                assert 0 < (stream @ junk).square().mean() <= own
    assert moved["reading"] > 1e-3 > 1e-9 > moved["not reading"]


def test_known_models_are_hidden_differently_for_each_seed():
    first, second = (known_models(hidden=True, seed=seed)[0].model for seed in (0, 1))
    assert not torch.allclose(first.W_Q, second.W_Q)


def test_models_of_token_ids_keep_their_function_and_circuit():
    model, ids = induction(), IDS[:16]
    for options in ({}, {"junk_prompts": ids, "distractors": 2}):
        hidden = hide(model, seed=2, **options).model
        torch.testing.assert_close(hidden(ids), model(ids), rtol=0, atol=1e-9)
        assert constructions.weights_circuit(hidden) == constructions.weights_circuit(model)


def test_the_stream_is_the_old_one_rotated_and_what_distractors_write():
    model = constructions.newton(x_dim=3, n_context=8, steps=2, alpha=0.01)
    hidden = hide(model, seed=3, distractors=2)
    torch.testing.assert_close(hidden.stream @ hidden.stream.T, torch.eye(model.cfg.d_model).double())
    old = model.run_with_cache(PROMPTS)[1]["blocks.1.hook_resid_post"]
    new = hidden.model.run_with_cache(PROMPTS)[1]["blocks.1.hook_resid_post"]
    torch.testing.assert_close(new @ hidden.stream.T, old)
    assert (new - old @ hidden.stream).abs().max() > 1e-3


def test_noise_changes_predictions_a_little():
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.1, steps=2)
    expected = model.predict(PROMPTS)
    error = (hide(model, noise=1e-3).model.predict(PROMPTS) - expected).square().mean() / expected.square().mean()
    assert 1e-9 < error < 1e-3


def induction() -> HookedTransformer:
    return constructions.induction(d_vocab=4, n_ctx=6)


def rank(model: HookedTransformer, tokens: torch.Tensor) -> int:
    _, cache = model.run_with_cache(tokens)
    streams = torch.cat([value.flatten(0, 1) for name, value in cache.items() if "resid" in name])
    return int(torch.linalg.matrix_rank(streams))


def test_a_stream_as_wide_as_the_used_subspace_is_exact():
    model = induction()
    needed = rank(model, IDS)
    assert needed < model.cfg.d_model
    narrow = compress(model, IDS, d_model=needed)
    assert narrow.model.cfg.d_model == needed
    torch.testing.assert_close(narrow.model(IDS), model(IDS), rtol=0, atol=1e-10)
    assert narrow.projected < 1e-20
    torch.testing.assert_close(narrow.stream.T @ narrow.stream, torch.eye(needed).double())
    # the streams are the projected ones
    ours, theirs = (each.run_with_cache(IDS)[1]["blocks.1.hook_resid_post"] for each in (narrow.model, model))
    torch.testing.assert_close(ours, theirs @ narrow.stream, rtol=0, atol=1e-10)
    assert compress(model, IDS, d_model=needed - 1).projected > 1e-6


def test_the_error_of_a_projection_is_that_of_its_outputs():
    model = induction()
    narrow = compress(model, IDS, d_model=rank(model, IDS) - 4)
    assert narrow.projected == pytest.approx((narrow.model(IDS) - model(IDS)).square().mean().item())


@pytest.mark.parametrize("config", [
    {"d_mlp": 5, "act_fn": "relu", "attention": "softmax", "sink": "learned"},
    {"mlp_location": "input", "d_mlp": 4},
    {"recurrent": True, "damping": 0.5},
    {"prompt_format": "interleaved", "positional_embedding_type": "sinusoidal", "d_pos": 6},
], ids=str)  # fmt: skip
def test_a_projection_of_full_width_changes_no_predictions(config):
    model = random_model(**{"d_model": 12, **config})
    narrow = compress(model, PROMPTS, d_model=12)
    torch.testing.assert_close(narrow.model.predict(PROMPTS), model.predict(PROMPTS))
