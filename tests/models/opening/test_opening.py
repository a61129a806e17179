"""Runs, recordings and resumed runs; edits that a model ignores; the graph of edges against an example by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.model_bridge.sources import boot_native

import mechicl
from mechicl.analysis import patch
from mechicl.analysis.circuits import Edge, Node
from mechicl.models import TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.edits import check_edits, without_user_hooks
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import EMBEDDING, list_edges, list_nodes
from mechicl.models.opening.stream_runs import StreamRuns, record_streams
from mechicl.tasks import LinearRegression
from tests.analysis.interventions.oracles import (
    EXACT,
    bridge,
    hook_name,
    inputs,
    model_of,
    pair,
    putting,
    recorded,
    run,
)
from tests.families import open_family, token_ids
from tests.models.modules import NanoGPT
from tests.models.transformer.test_lens import word_tokenizer
from tests.models.wrapping.test_wrapped import PARTS
from tests.strategies import configs, random_model


@pytest.mark.parametrize("batch_size", [2, 100])
def test_recording_in_batches(batch_size):
    model = model_of("gpt")
    prompts = inputs(model, 0, 5)
    adapter = ModelAdapter(model)
    tokens = adapter.encode(prompts)
    names = [hook_name("z", 0), hook_name("pattern", 1), hook_name("z", 0)]
    activations = adapter.record(tokens, names, batch_size)
    assert set(activations) == set(names)
    for name, activation in activations.items():
        assert_close(activation, recorded(model, prompts, name))
        assert not activation.requires_grad
    assert_close(adapter.predict(tokens, batch_size), run(model, prompts))


def test_a_first_token_with_the_id_of_padding_is_read():
    cfg = TransformerConfig(d_vocab=8, n_ctx=6, n_layers=2, d_model=8, d_head=4, default_prepend_bos=False)
    bare, model = random_model(cfg), random_model(cfg)
    model.set_tokenizer(word_tokenizer(eos_token="<eos>"), default_padding_side="left")  # also begins texts and pads
    tokens = torch.tensor([[2, 3, 4, 5], [2, 7, 6, 3]])
    adapter, expected = ModelAdapter(model, "positions"), bare(tokens)
    assert not torch.allclose(model(tokens), expected)  # hidden there
    name = hook_name("z", 1)
    predictions, recorded = adapter.predict_and_record(adapter.encode(tokens), [name], 1)
    assert_close((predictions, recorded[name]), (expected, bare.run_with_cache(tokens)[1][name]))
    assert_close(adapter.run_with_cache(tokens)[0], expected)
    assert_close(adapter.run_cached(tokens)[0], expected)
    for component in ("z", "resid_pre"):
        patched = patch(model, tokens, tokens, component, axes=("layer", "pos"), metrics={}, progress=False).predictions
        assert_close(patched, expected[:, -1].expand_as(patched))


def refuse(model: Any, component: str, layer: int = 1) -> None:
    check_edits(ModelAdapter(model), token_ids(0), [hook_name(component, layer)])


@pytest.mark.parametrize(("family", "component", "message"), [
    *((family, component, rf"ignores edits at 'blocks.1.attn.hook_{component}'.*take 'z'")
      for family in ("GPT-J", "GPT-Neo", "XGLM") for component in ("attn_scores", "pattern")),
    ("OPT", "pattern", r"'blocks.1.attn.hook_pattern' does not fire.*take 'z'"),
])  # fmt: skip
def test_what_a_bridge_only_shows_is_refused(family, component, message):
    model, _ = open_family(family)
    with pytest.raises(ValueError, match=message):
        refuse(model, component)
    refuse(model, "z")


@pytest.mark.parametrize("fields", [{"normalization_type": "LN"}, {"positional_embedding_type": "rotary"}])
def test_a_network_of_transformer_lens_itself(fields):
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 20, "d_mlp": 12}
    model = boot_native({**sizes, "act_fn": "gelu", "seed": 0, **fields}).eval()
    for component in ("resid_mid", "q", "pattern", "z", "post"):
        refuse(model, component)
    with pytest.raises(ValueError, match=r"its scores are computed elsewhere; take 'z'"):
        refuse(model, "attn_scores")


def test_an_edit_without_effect_is_not_refused():
    model = bridge()
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    tokens = token_ids(0)
    for component in ("z", "v", "pattern", "attn_scores", "q", "k"):
        refuse(model, component)
    check_edits(ModelAdapter(model), tokens[:, :1], [hook_name("pattern", layer) for layer in range(3)])  # one key


@pytest.mark.parametrize("component", ["z", "pattern", "resid_mid"])
def test_without_a_graph_noise_tells(component):
    model = bridge()
    vars(model.blocks[1])["forward"] = torch.no_grad()(model.blocks[1].forward)
    refuse(model, component)
    with torch.inference_mode():
        refuse(model, component)


def test_a_stream_that_only_the_mlp_reads_is_refused():
    model = bridge()
    refuse(model, "resid_mid")
    copied = model.blocks[1].ln2.register_forward_pre_hook(lambda module, args: (args[0].clone(), *args[1:]))
    with pytest.raises(ValueError, match=r"'blocks.1.hook_resid_mid' reaches only some of the readers"):
        refuse(model, "resid_mid")
    refuse(model, "resid_mid", 0)
    copied.remove()


def test_a_hook_that_fires_twice_is_refused():
    model = bridge()
    block = model.blocks[1]
    forward = block.forward
    vars(block)["forward"] = lambda *args, **kwargs: forward(forward(*args, **kwargs), **kwargs)
    with pytest.raises(ValueError, match=r"'blocks.1.attn.hook_z' fires 2 times in a run"):
        refuse(model, "z")


def test_hooks_of_the_user_do_not_count_and_stay():
    model, seen = bridge(), []

    def cut(activation: Tensor, hook: Any) -> Tensor:
        seen.append(hook.name)
        return torch.zeros_like(activation)

    assert not ModelAdapter(model).has_user_hooks()
    model.add_hook("blocks.2.hook_resid_post", cut)  # no edit before it has an effect
    assert ModelAdapter(model).has_user_hooks()
    tokens = token_ids(0)
    before = model(tokens)
    seen.clear()
    refuse(model, "z")
    with without_user_hooks(model):
        assert not torch.equal(model(tokens), before)
    assert not seen
    assert torch.equal(model(tokens), before)
    assert seen
    model.reset_hooks()
    assert not torch.equal(model(tokens), before)


def graph_of(model, prompts, others) -> EdgeGraph:
    """A graph whose cut edges carry what another run writes."""
    adapter = ModelAdapter(model)
    return EdgeGraph(adapter, adapter.encode(prompts), record_writes(adapter, adapter.encode(others)))


def check_all_and_none(model, **tolerance):
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    everything = torch.ones(len(graph.edges), dtype=torch.bool)
    assert_close(graph.run(everything), run(model, prompts), **tolerance)
    assert_close(graph.run(~everything), run(model, others), **tolerance)
    assert not model.has_hooks()


@pytest.mark.parametrize("kind", ["gpt", "sink", "linear", "full", "looped", "mixed", "ids"])
@torch.no_grad()
def test_all_edges_are_the_model_and_none_the_reference(kind):
    model = model_of(kind)
    check_all_and_none(model, **EXACT)
    prompts, adapter = inputs(model, 0), ModelAdapter(model)
    # what the nodes write adds up to the final stream
    total = record_writes(adapter, adapter.encode(prompts)).sum(0)
    for block in model.blocks if model.cfg.attn_bias else ():
        total = total + model.cfg.damping * block.attn.b_O
    assert_close(total, recorded(model, prompts, hook_name("resid_post", model.cfg.n_layers - 1)), **EXACT)


@pytest.mark.parametrize("kind", ["gpt", "sink", "linear", "looped", "ids"])
@torch.no_grad()
def test_runs_that_start_from_another_and_leave_nodes_out_are_those_of_all_nodes(kind):
    model = model_of(kind)
    graph, generator = graph_of(model, *pair(model)), torch.Generator().manual_seed(0)
    base = torch.ones(len(graph.edges), dtype=torch.bool)
    for share in (1.0, 0.9, 0.5, 0.2):
        base &= torch.rand(len(base), generator=generator) < share
        kept = base & (torch.rand(4, len(base), generator=generator) < 0.9)
        masks = kept.to(graph.references.dtype)
        expected = graph._trace(masks, slice(None), graph._all, None, None)[1]
        assert_close(graph.run_cuts(kept), expected, **EXACT)
        assert_close(graph.run_cuts(kept, base=base), expected, **EXACT)


@pytest.mark.parametrize("kind", ["gpt", "looped"])
@torch.no_grad()
def test_cutting_all_edges_out_of_a_node_ablates_it(kind):
    model = model_of(kind)
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    for node in graph.nodes[1:]:
        kept = torch.tensor([edge.sender != node for edge in graph.edges])
        component = "mlp_out" if node.head is None else "z"
        where = {} if node.head is None else {"head": node.head}
        values = recorded(model, others, hook_name(component, node.layer))
        assert_close(graph.run(kept), run(model, prompts, [putting(component, node.layer, where, values)]), **EXACT)
    kept = torch.tensor([edge.sender != EMBEDDING for edge in graph.edges])
    stream = recorded(model, others, hook_name("resid_pre", 0))
    replaced = run(model, prompts, [(hook_name("resid_pre", 0), lambda activation, hook: stream)])
    assert_close(graph.run(kept), replaced, **EXACT)


@torch.no_grad()
def test_two_layers_of_one_head_by_hand():
    """softmax(q k) v with each of q, k, v, and the output reading one stream or the other."""
    model = model_of("gpt", n_heads=1, d_mlp=None, normalization_type=None, attn_bias=False, d_head=3)
    prompts, others = pair(model)
    graph = graph_of(model, prompts, others)
    stream, reference = (model.embed_tokens(model.encode(p)) for p in (prompts, others))
    first, second = Node(0, 0), Node(1, 0)

    def head(layer, by):
        attn = model.blocks[layer].attn
        q, k, v = (by[w] @ getattr(attn, f"W_{w.upper()}")[0] for w in ("q", "k", "v"))
        scores = model.cfg.score_scale * q @ k.mT
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v @ attn.W_O[0]

    reference_first = head(0, dict.fromkeys("qkv", reference))
    reference_second = head(1, dict.fromkeys("qkv", reference + reference_first))
    stream_first = head(0, dict.fromkeys("qkv", stream))
    cut = {Edge(first, second, "k"), Edge(EMBEDDING, second, "v"), Edge(first, None), Edge(EMBEDDING, first, "q")}
    first_out = head(0, {"q": reference, "k": stream, "v": stream})
    second_out = head(1, {"q": stream + first_out, "k": stream + reference_first, "v": reference + first_out})
    expected = (stream + reference_first + second_out) @ model.W_U + model.b_U
    kept = torch.tensor([edge not in cut for edge in graph.edges])
    assert_close(graph.run(kept), expected[:, -1], **EXACT)
    only_output = graph.mask([Edge(EMBEDDING, None)])
    assert_close(graph.run(only_output), (stream + reference_first + reference_second)[:, -1] @ model.W_U)
    chain = graph.mask([Edge(EMBEDDING, first, by) for by in "qkv"] + [Edge(first, None)])
    assert_close(graph.run(chain), (reference + stream_first + reference_second)[:, -1] @ model.W_U)


@settings(max_examples=6)
@given(configs(token_clip=None), st.integers(0, 5))
def test_any_config(cfg, seed):
    model = random_model(cfg.replace(dtype="float64"), seed, scale=0.2).eval()
    check_all_and_none(model, atol=1e-8, rtol=1e-6, equal_nan=True)


def test_names_and_numbers_of_nodes_and_edges():
    adapter = ModelAdapter(model_of("gpt"))
    assert list(map(str, list_nodes(adapter.model))) == [
        "embedding", "head 0.0", "head 0.1", "MLP 0", "head 1.0", "head 1.1", "MLP 1",
    ]  # fmt: skip
    edges = list_edges(adapter.model)
    # heads of layer 0: 2 * 3 ways * 1; MLP 0: 3; heads of layer 1: 2 * 3 * 4; MLP 1: 6; output: 7
    assert len(edges) == len(set(edges)) == 6 + 3 + 24 + 6 + 7
    assert str(edges[0]) == "embedding → head 0.0 (q)"
    assert str(Edge(Node(1), None)) == "MLP 1 → output"
    graph = graph_of(adapter.model, *pair(adapter.model))
    assert graph.mask(edges[3:5]).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_isolated_points_of_a_module_read_only_themselves(causal):
    """Also in attention without a mask, whose scores do not show that a softmax follows."""
    torch.manual_seed(0)
    net = NanoGPT(causal=causal).eval()
    model = mechicl.wrap(net, encode="interleaved", **PARTS)
    prompts = LinearRegression(x_dim=3, n_context=4).sample(5, seed=1)
    adapter = ModelAdapter(model)
    tokens = adapter.encode(prompts)
    streams = record_streams(adapter, tokens)
    isolated = StreamRuns(adapter, tokens, streams, streams).isolate(range(2))
    points = torch.arange(9) // 2
    others = points[:, None] != points
    others[8] = False

    def hide(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0].masked_fill(others, -torch.inf),)

    blocks: Any = net.blocks
    handles = [block.attn.softmax.register_forward_pre_hook(hide) for block in blocks]
    expected = model.predict(prompts)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(isolated, expected)
    assert not torch.allclose(isolated, model.predict(prompts), atol=1e-4)
