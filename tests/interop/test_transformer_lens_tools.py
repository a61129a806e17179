"""TransformerLens' tools on our models: as plain loops over hooks say, and as on a GPT-2 bridge of the same weights."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens.tools.analysis import (
    EdgeAttributionConfig,
    JacobianLens,
    SubspaceInterchange,
    attention_head_subspace_affinity,
    attribution_patch,
    collect_activations,
    faithfulness,
    fit_das,
    get_act_patch_direct_path_all_sources,
    intervened_logits,
    logit_lens,
    random_basis,
    reinitialized,
)

from mechicl.models import HookedTransformer, HookedTransformerConfig
from mechicl.models.pretrained.loading import from_transformers
from tests.families import open_family
from tests.strategies import random_model

KINDS = {"mlp": {}, "attn_only": {"attn_only": True}}
OTHER_KINDS = KINDS | {
    "rotary": {"positional_embedding_type": "rotary", "normalization_type": "RMS", "gated_mlp": True},
    "no norm": {"normalization_type": None, "attn_only": True},
}
EDGES = EdgeAttributionConfig("edge")


def model_of(kind: str) -> Any:
    """A small transformer with random weights."""
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 11, "act_fn": "gelu_new"}
    return random_model(HookedTransformerConfig(**sizes, dtype="float64", **OTHER_KINDS[kind])).eval()


def pair() -> tuple[Tensor, Tensor]:
    """Two prompts and two others."""
    clean, corrupted = torch.randint(11, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    return clean, corrupted


def metric(logits: Tensor) -> Tensor:
    """A number for one prompt, or the mean over several."""
    return (logits[:, -1, 3] - logits[:, -1, 5] * logits[:, 2, 1].tanh()).mean()


def pair_of_models(kind: str) -> tuple[Any, Any]:
    """A model, and a bridge of a GPT-2 with its weights, whose MLPs write 0 where the model has none."""
    bridge, gpt2 = open_family("GPT-2")
    if kind == "attn_only":
        for each in (bridge.original_model, gpt2):
            for block in each.transformer.h:
                block.mlp.c_proj.requires_grad_(False).weight.zero_()
                block.mlp.c_proj.bias.zero_()
    model = from_transformers(HookedTransformer, gpt2)
    if kind == "mlp":
        return model, bridge
    bare = HookedTransformer(model.cfg.replace(attn_only=True, d_mlp=None)).eval()
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    return bare, bridge


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def slope(model: Any, tokens: Tensor, name: str, edit: Callable[[Tensor, float], Tensor]) -> float:
    """The derivative of the metric to how much of an edit is made at a hook, by two runs."""
    with torch.no_grad():
        up, down = (
            metric(model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook, by=by: edit(value.clone(), by))]))
            for by in (1e-5, -1e-5)
        )
    return (up - down).item() / 2e-5


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_attributions_of_nodes_are_slopes(kind):
    model, (clean, corrupted) = model_of(kind), pair()
    model.set_use_hook_mlp_in(True)  # without an MLP: one that has no neurons
    scores = attribution_patch(model, clean, corrupted, metric).node_scores
    caches = [model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
    for node, score in itertools.islice(scores.items(), 0, None, 5):
        index = (slice(None), node.position) + (() if node.head is None else (node.head,))
        expected = 0.0
        for prompt in range(2):
            change = (caches[0][node.hook_name] - caches[1][node.hook_name])[[prompt]][index]

            def edit(value: Tensor, by: float, index: Any = index, change: Tensor = change) -> Tensor:
                value[index] += by * change
                return value

            expected += slope(model, corrupted[[prompt]], node.hook_name, edit) / 2
        assert score == pytest.approx(expected, abs=1e-7, rel=1e-5), node
    assert len(scores) == 5 * (1 + 2 * (2 + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_as_on_a_bridge_of_the_same_weights(kind):
    (model, bridge), (clean, corrupted) = pair_of_models(kind), pair()
    torch.testing.assert_close(model(clean), bridge(clean), atol=1e-5, rtol=1e-5)
    ours, theirs = (attribution_patch(each, clean, corrupted, metric, EDGES).edge_scores for each in (model, bridge))
    assert list(ours) == list(theirs)
    assert torch.tensor(list(ours.values())).tolist() == pytest.approx(list(theirs.values()), abs=1e-5, rel=1e-3)
    circuit = sorted(ours, key=lambda edge: -abs(ours[edge]))[: len(ours) // 3]
    kept = [faithfulness(each, clean[:1], corrupted[:1], metric, circuit) for each in (model, bridge)]
    assert kept[0].recovered == pytest.approx(kept[1].recovered, rel=1e-3)
    assert kept[0].edge_class_recovered == pytest.approx(kept[1].edge_class_recovered, rel=1e-3, abs=1e-4)
    for role in "QKV":
        affine = [attention_head_subspace_affinity(each, target_role=role) for each in (model, bridge)]
        torch.testing.assert_close(affine[0].scores, affine[1].scores, atol=1e-4, rtol=1e-4)
    for component in ("q", "k", "v"):
        torch.testing.assert_close(
            *(direct_paths(each, clean, corrupted, component) for each in (model, bridge)), atol=1e-4, rtol=1e-4
        )
    read = [logit_lens(each, clean, positions=None).values for each in (model, bridge)]
    torch.testing.assert_close(*read, atol=1e-4, rtol=1e-4)


def direct_paths(model: Any, clean: Tensor, corrupted: Tensor, component: Any) -> Tensor:
    """Return TransformerLens' effects for all pairs of heads."""
    clean_cache, corrupted_cache = (model.run_with_cache(tokens)[1] for tokens in (clean, corrupted))
    return get_act_patch_direct_path_all_sources(
        model, corrupted, clean_cache, corrupted_cache, metric, component, verbose=False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_interchanges(kind):
    model, (bases, sources) = model_of(kind), pair()
    name, positions = "blocks.0.hook_resid_post", torch.tensor([4, 3])

    def last(tokens: Tensor) -> Tensor:
        return model(tokens)[:, -1]

    values = collect_activations(model, name, sources, last, positions=positions)
    _, cache = model.run_with_cache(sources)
    torch.testing.assert_close(values, cache[name][torch.arange(2), positions])
    basis = random_basis(8, 3, seed=0).double()
    swapped = intervened_logits(model, name, SubspaceInterchange(basis), bases, values, last, positions=positions)
    _, base_cache = model.run_with_cache(bases)
    stream = base_cache[name].clone()
    rows = (torch.arange(2), positions)
    stream[rows] += (values - stream[rows]) @ basis @ basis.T
    torch.testing.assert_close(swapped, model(stream, start_at_layer=1)[:, -1])
    learned = fit_das(
        model, name, bases, sources, torch.tensor([1, 2]), last, rank=2, base_positions=positions,
        source_positions=positions, epochs=8, lr=0.1,
    )  # fmt: skip
    assert learned.losses[-1] < learned.losses[0]
    assert all(weight.requires_grad for weight in model.parameters())


def test_unsupported_tools_raise_errors():
    model, (clean, corrupted) = model_of("attn_only"), pair()
    with pytest.raises(ValueError, match="hook_mlp_out"):  # before model.set_use_hook_mlp_in(True)
        attribution_patch(model, clean, corrupted, metric)
    with pytest.raises(ValueError, match="cannot reset"):
        reinitialized(model, seed=0)
    with pytest.raises(TypeError, match="supports TransformerBridge only"):
        JacobianLens.fit(model, ["a text"], corpus="none")
