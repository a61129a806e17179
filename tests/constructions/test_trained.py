"""Trained models contain the algorithms that they were trained to, plain and hidden, and are made as it is written."""

import dataclasses
import json

import pytest
import torch

from mechicl import analysis
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import hide, known_models
from mechicl.constructions.known import KnownModel
from mechicl.constructions.trained import RECIPES
from mechicl.models import HookedTransformer


@pytest.mark.parametrize("known", known_models(trained=True), ids=lambda known: known.name)
def test_trained_models_contain_what_they_were_trained_to(known):
    prompts = known.task.sample(200, seed=5, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=6)
    for model, hypothesis in ((known.model, known.hypothesis), turned(known)):
        assert isinstance(model, HookedTransformer)
        result = analysis.interchange(model, hypothesis, prompts, sources, progress=False)
        assert result.score.mean >= 0.99, result.cells[result.weakest]
        assert result.effects.mean >= 0.99
    fresh = HookedTransformer(known.model.cfg, seed=1).double()
    control = analysis.interchange(fresh, known.hypothesis, prompts, sources, progress=False)
    assert control.r2[0].mean < 0.1


def turned(known: KnownModel) -> tuple[HookedTransformer, Hypothesis]:
    disguise = hide(known.model, seed=1)
    turned = {name: disguise.stream.T @ columns for name, columns in known.hypothesis.subspaces.items()}
    return disguise.model, dataclasses.replace(known.hypothesis, subspaces=turned)


@pytest.mark.parametrize("name", RECIPES)
def test_the_record_is_that_of_the_recipe(name):
    checkpoint, recipe = load_checkpoint(name), RECIPES[name]
    assert checkpoint.record["training"] == json.loads(json.dumps(recipe.config.to_dict()))
    assert checkpoint.record["interchange"]["hypothesis"] == recipe.hypothesis.name
    assert min(checkpoint.record["interchange"]["r2"][0].values()) >= 0.99
    assert checkpoint.record["command"] == f"python analyses/train_known.py {name} checkpoints/{name}"
