"""nnsight and pyvene on our models and on wrapped ones, against hooks; skipped if they are not installed."""

from typing import Any

import pytest
import torch

from tests.models.kinds import KINDS, TASK

PROMPTS = TASK.sample(4, seed=0)
pytestmark = pytest.mark.slow
POINT = "blocks.0.hook_resid_post"
PLACES = [("transformer", POINT), ("lstm", POINT), ("wrapped", POINT), ("wrapped", "module.blocks.0")]


def part_of(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def with_hook(name: str, hook: Any) -> torch.Tensor:
    return KINDS[name]().run_with_hooks(PROMPTS, fwd_hooks=[(POINT, hook)])


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_nnsight(name: str, path: str):
    nnsight = pytest.importorskip("nnsight")
    model = KINDS[name]()
    tokens, expected = model.encode(PROMPTS), with_hook(name, lambda stream, hook: 2 * stream)
    stream = model.run_with_cache(tokens)[1][POINT]
    plain, traced = model(tokens), nnsight.NNsight(model)
    with traced.trace(tokens):
        saved = part_of(traced, path).output.save()
        unedited = traced.output.save()
    torch.testing.assert_close(saved, stream)
    torch.testing.assert_close(unedited, plain)
    with traced.trace(tokens):
        part_of(traced, path).output = 2 * part_of(traced, path).output
        edited = traced.output.save()
    torch.testing.assert_close(edited, expected)
    torch.testing.assert_close(model(tokens), plain)


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_pyvene(name: str, path: str):
    pyvene = pytest.importorskip("pyvene")
    cards = pytest.importorskip("pyvene.models.intervenable_modelcard")
    model = KINDS[name]()
    cards.type_to_dimension_mapping[type(model)] = {}  # which pyvene needs for a model that it does not know
    tokens, keyword = model.encode(PROMPTS), "tokens" if name == "wrapped" else "input"
    source = model.run_with_cache(tokens.flip(0))[1][POINT]
    component = path.replace(".0", "[0]") + ".output"
    config = pyvene.IntervenableConfig([{"component": component, "intervention_type": pyvene.VanillaIntervention}])
    edited = pyvene.IntervenableModel(config, model=model)
    positions = {"sources->base": list(range(tokens.shape[1]))}
    _, outputs = edited({keyword: tokens}, [{keyword: tokens.flip(0)}], unit_locations=positions)
    torch.testing.assert_close(outputs, with_hook(name, lambda stream, hook: source))
