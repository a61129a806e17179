"""Scores of edges are derivatives, by finite differences of plain loops over edges."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

from mechicl import constructions
from mechicl.analysis import next_token_loss
from mechicl.analysis.circuits import EMBEDDING, Edge, Node, score_edges
from mechicl.analysis.circuits.problem import make_problem
from mechicl.models import HookedTransformerConfig
from mechicl.models.opening.edges import list_edges
from tests.analysis.circuits import oracles
from tests.analysis.circuits.oracles import everything, run_edges, write_all, zeros
from tests.analysis.interventions.oracles import model_of
from tests.families import FAMILIES, open_family, token_ids
from tests.strategies import random_model

N, STEP = 3, 1e-5
MODEL = model_of("ids", n_layers=2)
IDS, OTHERS = (torch.randint(6, (N, 5), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
LOSS = next_token_loss(OTHERS[:, 0])


def loss_at(weights, references):
    return LOSS(run_edges(MODEL, IDS, references, weights)[:, -1]).detach()


def derivatives(weights, references, edges):
    """Derivatives of each prompt's loss with respect to the weight of each edge, by central differences."""
    rows = []
    for edge in edges:
        up, down = ({**weights, edge: weights[edge] + sign * STEP} for sign in (1, -1))
        rows.append((loss_at(up, references) - loss_at(down, references)) / (2 * STEP))
    return torch.stack(rows)


def references_of(method):
    return zeros(MODEL, IDS) if method == "zero" else write_all(MODEL, OTHERS)


@pytest.mark.parametrize("method", ["zero", "resample"])
@torch.no_grad()
def test_one_step_of_eap_ig_is_the_derivative_at_the_whole_model(method):
    reference = OTHERS if method == "resample" else None
    scores = score_edges(
        MODEL, IDS, LOSS, scoring="eap-ig", steps=1, method=method, reference=reference, progress=False
    )
    edges = list_edges(MODEL)[::3]
    expected = -derivatives(everything(MODEL), references_of(method), edges)
    assert scores.edges == tuple(list_edges(MODEL))
    assert_close(scores.scores[::3], expected, atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_mask_ig_is_the_mean_derivative_on_the_way_of_all_edges_together():
    scores = score_edges(
        MODEL, IDS, LOSS, scoring="mask-ig", steps=2, method="resample", reference=OTHERS, progress=False
    )
    edges, references = list_edges(MODEL)[1::3], write_all(MODEL, OTHERS)
    expected = -sum(derivatives(everything(MODEL, share), references, edges) for share in (0.25, 0.75)) / 2
    assert_close(scores.scores[1::3], expected, atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_many_steps_of_mask_ig_add_up_to_the_whole_effect():
    options = {"method": "resample", "reference": OTHERS, "progress": False}
    scores = score_edges(MODEL, IDS, LOSS, scoring="mask-ig", steps=50, **options)
    references = write_all(MODEL, OTHERS)
    effect = loss_at(everything(MODEL, 0.0), references) - loss_at(everything(MODEL), references)
    assert_close(scores.scores.sum(0), effect, atol=1e-3, rtol=1e-3)


def test_eap_ig_is_the_gradient_on_the_way_of_the_embedding_times_the_change_between_the_two_runs():
    """Hanna et al. 2024, with hooks and autograd: the stream is replaced, and each receiver has a separate stream."""
    steps, clean, corrupted = 2, write_all(MODEL, IDS), write_all(MODEL, OTHERS)
    scores = score_edges(
        MODEL, IDS, LOSS, scoring="eap-ig", steps=steps, method="resample", reference=OTHERS, progress=False
    )
    edges = list_edges(MODEL)
    expected = torch.zeros(len(edges), N, dtype=torch.float64)
    for step in range(1, steps + 1):
        between = corrupted[EMBEDDING] + step / steps * (clean[EMBEDDING] - corrupted[EMBEDDING])
        gradients = receiver_gradients(between)
        for number, edge in enumerate(edges):
            change = corrupted[edge.sender] - clean[edge.sender]
            expected[number] += (gradients[edge.receiver, edge.by] * change).sum((1, 2)) / steps
    assert_close(scores.scores, expected.detach(), atol=1e-8, rtol=1e-6)


def receiver_gradients(embedded):
    """The loss' gradients with respect to the inputs of each receiver, given the stream before the first layer."""
    probes = {(edge.receiver, edge.by): torch.zeros_like(embedded, requires_grad=True) for edge in list_edges(MODEL)}

    stream, model = embedded.detach(), MODEL
    for layer, block in enumerate(model.blocks):
        heads = []
        for head in range(model.cfg.n_heads):
            node = next(n for n, by in probes if n is not None and n.layer == layer and n.head == head and by == "q")
            heads.append(oracles.write_head(block, head, *(stream + probes[node, by] for by in "qkv")))
        stream = stream + sum(heads) + oracles.attention_bias(block)
        mlp = next((n for n, by in probes if n is not None and n.layer == layer and n.head is None), None)
        if mlp is not None:
            stream = stream + model.cfg.damping * block.mlp(block.ln2(stream + probes[mlp, ""]))
    loss = LOSS(model.read_out(stream + probes[None, ""])[:, -1]).sum()
    return dict(zip(probes, torch.autograd.grad(loss, list(probes.values())), strict=True))


@torch.no_grad()
def test_batches_of_prompts_do_not_change_scores():
    whole = score_edges(MODEL, IDS, LOSS, scoring="mask-ig", method="mean", progress=False)
    problem = make_problem(
        MODEL, IDS, LOSS, method="mean", reference=None, at=None, seed=0, memory=2**30
    )  # fmt: skip
    needed = problem.graph._rows(backward=True)
    assert needed >= N
    for memory in (2**19, 2**20, 2**21):
        try:
            parts = score_edges(MODEL, IDS, LOSS, scoring="mask-ig", method="mean", memory=memory, progress=False)
        except ValueError:
            continue
        assert_close(parts.scores, whole.scores, atol=1e-12, rtol=1e-10)
        return
    pytest.fail("no bound was small enough to take prompts in parts")


def test_scores_of_the_outputs_themselves_rank_a_planted_circuit_first():
    model = constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)
    ids = torch.randint(12, (16, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    scores = score_edges(model, ids, progress=False)
    assert (scores.scores >= 0).all()
    names = {str(edge) for edge in scores.strongest(7)}
    assert {"head 0.2 → head 1.1 (k)", "head 1.1 → output", "embedding → head 1.1 (v)"} <= names
    assert scores.to_dataframe()["edge"].tolist()[0] == str(scores.strongest(1)[0])
    assert "scored by mask-ig" in str(scores)


# ---- against TransformerLens, whose attribution patching swaps the two runs ----


def ours(attn_only: bool) -> Any:
    """One of our transformers."""
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": 20, "act_fn": "gelu"}
    return random_model(HookedTransformerConfig(**sizes, attn_only=attn_only)).eval()


def all_heads(name: str) -> Any:
    """A tiny model of a family in which every head has its own keys and values."""
    family = FAMILIES[name]
    try:
        FAMILIES[name] = dataclasses.replace(family, sizes=family.sizes | {"num_key_value_heads": 2})
        return open_family(name)[0]
    finally:
        FAMILIES[name] = family


MODELS = {
    "ours": lambda: ours(attn_only=False),
    "attention only": lambda: ours(attn_only=True),
    "GPT-2": lambda: open_family("GPT-2")[0],
    "GPT-NeoX": lambda: open_family("GPT-NeoX")[0],  # its MLPs read the stream before their layer
    "Llama": lambda: all_heads("Llama"),
    "Gemma": lambda: all_heads("Gemma"),
    "Qwen3": lambda: all_heads("Qwen3"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_edge_attributions_are_those_of_transformer_lens(name):
    """There the gradient is the corrupted run's, and the change leads to the clean run, which our cut edges carry."""
    model, clean, corrupted = MODELS[name](), token_ids(0, 3), token_ids(1, 3)

    def metric(logits: Tensor) -> Tensor:
        return logits[..., 3] - logits[..., 5] * logits[..., 7].tanh()

    theirs = attribution_patch(
        model, clean, corrupted, lambda logits: metric(logits[0, -1]), EdgeAttributionConfig("edge")
    ).edge_scores
    scored = score_edges(model, corrupted, metric, scoring="eap-ig", steps=1, method="resample", reference=clean)
    scores = dict(zip(scored.edges, scored.scores.mean(1).tolist(), strict=True))
    summed: dict[Edge, float] = {}
    for (writer, reader), score in theirs.items():  # theirs are of one position each
        if not (name == "attention only" and "mlp" in writer.kind + reader.kind):
            summed[edge_of(writer, reader)] = summed.get(edge_of(writer, reader), 0.0) + score
        else:
            assert score == 0
    assert set(summed) == set(scores)
    largest = max(map(abs, summed.values()))
    assert largest > 1e-3
    for edge, score in summed.items():
        assert scores[edge] == pytest.approx(score, abs=1e-5 * largest), str(edge)


def edge_of(writer: Any, reader: Any) -> Edge:
    """The same edge by our names."""
    sender = EMBEDDING if writer.kind == "embed" else Node(writer.layer, writer.head)
    if reader.kind == "logits":
        return Edge(sender, None)
    return Edge(sender, Node(reader.layer, reader.head), "" if reader.kind == "mlp_in" else reader.kind[0])
