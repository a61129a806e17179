"""The report on models of many layers, and the scripts that reproduce the figures, on small untrained models."""

import json
from dataclasses import replace

import pytest

from analyses.support.claims import seeds_of, state_claims
from analyses.support.results import Results
from mechicl.checkpoints import CheckpointError, load_checkpoint, save
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.reports import Comparison, Row
from mechicl.reports.layer_matches import LayerMatching
from mechicl.reports.layers import layers_as_text, match_layers
from mechicl.tasks import LinearRegression
from tests.reports import by_quantity, made
from tests.scripts import ANALYSES, import_script

TASK = LinearRegression(x_dim=3, n_context=7, inputs="gaussian")
CFG = TransformerConfig(
    x_dim=3, n_context=7, prompt_format="interleaved", n_layers=3, n_heads=2, d_model=16, d_mlp=16,
    attention="softmax", normalization_type="LN", initializer_range=0.4,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    lstm = HookedLSTM(LSTMConfig(x_dim=3, n_context=7, n_layers=2, d_model=8))
    models = {"transformer": HookedTransformer(CFG, seed=1), "lstm": lstm}
    return {name: str(save(root / name, model, made(TASK, seeds=[0]).record)) for name, model in models.items()}


def test_an_lstm_is_compared_too(folders):
    _, _, data = match_layers(load_checkpoint(folders["lstm"]), n_prompts=30, n_fitting=100)
    assert data["errors"]["Newton"]["layers"] == (0, 1, 2)
    assert len(data["errors"]["Newton"]["mean"][0]) == 23


@pytest.fixture(scope="module")
def of_two_seeds(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    models = [HookedTransformer(CFG, seed=seed) for seed in (1, 2)]
    folder = save(tmp_path_factory.mktemp("seeds") / "gpt2-8l", models, made(TASK, seeds=[4, 7]).record)
    options = {"similarities": ("errors", "weights"), "n_prompts": 20, "n_fitting": 60}
    return Comparison("", "", *match_layers(load_checkpoint(folder), **options))


@pytest.mark.slow
def test_rows_are_over_seeds_if_there_are_several(of_two_seeds):
    rows = by_quantity(of_two_seeds.rows)
    for quantity in (
        "errors: last layer and its best Newton step",
        "errors: layer 3, best Newton minus best ridge path",
        "errors, one readout for all layers: layer 3, best Newton minus best gradient descent",
        "weights: layer 2, best Newton minus best steepest descent",
    ):
        assert (rows[quantity].over.split()[0], seeds_of(rows[quantity])) == ("seeds", 2)
    kinds = [name for name in rows if name.startswith("errors: Newton, growth of the best step")]
    assert [name.rsplit(", ", 1)[1] for name in kinds] == ["seed 4", "seed 7"]
    assert rows["errors: layer 1, nearest family"].over == "2 seeds"
    assert [len(each["errors"]["Newton"]) for each in of_two_seeds.data["by_seed"]] == [4, 4]


def test_a_ridge_path_in_the_models_place_grows_as_newton_would():
    task = LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
    matching = LayerMatching(task, ("errors",), n_prompts=100, n_fitting=8, seed=0, shared=False, resamples=5)
    rows = {row.quantity.rsplit(": ", 1)[1]: row for row in matching.ridge_path_rows(8)}
    assert rows["Newton, growth of the best step with the layer"].measured == "linear"
    assert rows["gradient descent, growth of the best step with the layer"].measured == "exponential"
    ratio = rows["Newton iterations for each doubling of gradient descent steps"].measured
    assert ratio == pytest.approx(2, rel=0.15)


@pytest.mark.slow
def test_an_untrained_model_confirms_no_claim_of_the_paper(of_two_seeds):
    derived = import_script("fu_matching").compare.derived(of_two_seeds)
    for name in ("gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill"):
        saved = Results.read(ANALYSES / "results" / f"fu_matching_{name}.json")
        stated = replace(saved, untrained_rows=[*of_two_seeds.rows, *derived]).claims
        assert len(stated) >= 8
        for claim in stated:
            if "nearest of six" in claim.what or "growth" in claim.what:
                assert claim.untrained_verdict == "differs"


def test_the_verdict_counts_the_layers_of_the_nearest_families():
    nearest = {"1": ["gradient descent"], "2": ["gradient descent"], "3": ["Newton", "ridge path", "OLS"]}
    grows = Row("errors: Newton, growth of the best step with the layer", None, "linear")
    words = layers_as_text(Comparison("", "", [grows], [], {"nearest": {"errors": nearest}}))
    assert "matched best by gradient descent in 2 of 3 layers, ties included" in words
    assert "Newton's best step grows linearly" in words
    assert "a ridge path, which has no iterations" in words
    assert layers_as_text(Comparison("", "", [grows], [], {})) == ""


def test_another_kind_of_model_is_an_error_that_names_it():
    paired = made(TASK, HookedTransformer(TransformerConfig(x_dim=3, n_context=7, n_layers=2)))
    with pytest.raises(CheckpointError, match="made has paired prompts with context keys"):
        match_layers(paired)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fu_matching", "fu_progression", "fu_weights", "fu_probes"])
def test_scripts_run_on_any_interleaved_model(folders, tmp_path, name):
    module = import_script(name)
    options = {"lstm": folders["lstm"]} if name == "fu_progression" else {}
    args = module.compare.options(
        checkpoint=folders["transformer"], out=tmp_path, n_prompts=30, n_fitting=120, **options
    )
    result = module.compare(args)
    assert result.rows
    assert result.sections
    result.write(tmp_path, name)
    assert json.loads((tmp_path / f"{name}.json").read_text())["table"]


def test_scripts_on_several_models_run(folders, tmp_path):
    module = import_script("fu_size")
    args = module.compare.options(
        checkpoints=(folders["transformer"], folders["lstm"]), out=tmp_path, n_prompts=20, n_fitting=60
    )
    result = module.compare(args)
    assert [size["n_layers"] for size in result.data["sizes"].values()] == [3, 2]
    assert {row.measured for row in result.rows if "layers nearer to Newton" in row.quantity} <= {
        f"{k} of {n} layers" for n in (2, 3) for k in range(n + 1)
    }
    assert state_claims("fu_size", result.rows) == []
    module = import_script("fu_lstm")
    args = module.compare.options(transformer=folders["transformer"], lstm=folders["lstm"], out=tmp_path, n_prompts=20)
    rows = module.compare(args).rows
    assert {row.published for row in rows if row.quantity.startswith("similarity")} >= {0.991, 0.831}


def test_order_matters_to_a_causal_model_and_not_to_gradient_descent(folders):
    module = import_script("nertinger_order")
    rows = module.compare(module.compare.options(checkpoints=(folders["transformer"],), n_prompts=20, n_orders=4)).rows
    shares = {row.quantity.split(":")[0]: row.measured for row in rows if "mean square of" in row.quantity}
    assert shares["gradient descent"].high < 1e-10
    assert shares["transformer"].mean > 1e-8
    assert shares["online gradient descent"].mean > 1e-3
