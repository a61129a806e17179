"""Scores of edges by finite differences, and searches against plain loops and in models whose circuits are known."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

from mechicl import constructions
from mechicl.analysis import Replacement, next_token_loss
from mechicl.analysis.circuits import EMBEDDING, Edge, Node, find_circuit, score_edges
from mechicl.constructions import hide, weights_circuit
from mechicl.interop import from_tracr
from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from mechicl.models.opening.sites import list_edges
from mechicl.tasks import LinearRegression
from tests.analysis.circuits import oracles
from tests.analysis.circuits.oracles import everything, run_edges, write_all, zeros
from tests.analysis.interventions.oracles import model_of
from tests.families import open_family, token_ids
from tests.interop.compiling import compile_program
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


@torch.no_grad()
def test_mask_ig_is_the_mean_derivative_on_the_way_of_all_edges_together():
    scores = score_edges(
        MODEL, IDS, LOSS, scoring="mask-ig", steps=2, method=Replacement("resample", OTHERS), progress=False
    )
    edges, references = list_edges(MODEL)[1::3], write_all(MODEL, OTHERS)
    expected = -sum(derivatives(everything(MODEL, share), references, edges) for share in (0.25, 0.75)) / 2
    assert_close(scores.scores[1::3], expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(("method", "steps"), [("zero", 1), ("resample", 2)])
def test_eap_ig_is_the_gradient_on_the_way_of_the_embedding_times_the_change_between_the_two_runs(method, steps):
    """Hanna et al. 2024, with hooks and autograd: the stream is replaced, and each receiver has a separate stream."""
    clean, corrupted = write_all(MODEL, IDS), zeros(MODEL, IDS) if method == "zero" else write_all(MODEL, OTHERS)
    replacement = Replacement(method, OTHERS if method == "resample" else None)
    scores = score_edges(MODEL, IDS, LOSS, scoring="eap-ig", steps=steps, method=replacement, progress=False)
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


MODELS = {
    "ours": lambda: ours(attn_only=False),
    "attention only": lambda: ours(attn_only=True),
    "GPT-2": lambda: open_family("GPT-2")[0],
    "GPT-NeoX": lambda: open_family("GPT-NeoX")[0],  # its MLPs read the stream before their layer
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
    scored = score_edges(model, corrupted, metric, scoring="eap-ig", steps=1, method=Replacement("resample", clean))
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


# ---- searches ----
FOUR_PROMPTS, FOUR_OTHERS = (torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
LOSS_OF_FOUR = next_token_loss(FOUR_OTHERS[:, 0])


def shifts_of(references):
    """Distance of the mean loss with some edges from the whole model's, on the scale of cutting all edges."""
    edges = list_edges(MODEL)

    @torch.no_grad()
    def mean_loss(kept):
        weights = {edge: float(edge in kept) for edge in edges}
        return LOSS_OF_FOUR(run_edges(MODEL, FOUR_PROMPTS, references, weights)[:, -1]).mean()

    whole, nothing = mean_loss(set(edges)), mean_loss(set())
    return lambda kept: ((mean_loss(kept) - whole).abs() / (nothing - whole).abs()).item()


@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_acdc_is_the_plain_greedy_loop(tolerance):
    shift = shifts_of(write_all(MODEL, FOUR_OTHERS))
    kept, moved = set(list_edges(MODEL)), 0.0
    for receivers in reversed(stages()):
        for edge in reversed([edge for edge in list_edges(MODEL) if (edge.receiver, edge.by) in receivers]):
            now = shift(kept - {edge})
            if now - moved < tolerance:
                kept, moved = kept - {edge}, now
    circuit = find_circuit(
        MODEL, FOUR_PROMPTS, LOSS_OF_FOUR, search="acdc", method=Replacement("resample", FOUR_OTHERS),
        tolerance=tolerance, effects=False, progress=False,
    )  # fmt: skip
    assert 0 < len(circuit.edges) < len(list_edges(MODEL))
    assert set(circuit.edges) == connected(kept)


def stages():
    """Receivers that read at the same time, in order of computation."""
    receivers = dict.fromkeys((edge.receiver, edge.by) for edge in list_edges(MODEL))
    by_stage = {}
    for receiver, by in receivers:
        key = (99, 0) if receiver is None else (receiver.layer, receiver.head is None)
        by_stage.setdefault(key, []).append((receiver, by))
    return [by_stage[key] for key in sorted(by_stage)]


def connected(edges):
    """The edges that lead to the output."""
    kept = set()
    while True:
        more = {e for e in edges - kept if e.receiver is None or e.receiver in {other.sender for other in kept}}
        if not more:
            return kept
        kept |= more


@pytest.mark.parametrize("search", ["exact", "eap-ig", "acdc"])
def test_circuits_are_within_the_tolerance(search):
    circuit = find_circuit(
        MODEL, FOUR_PROMPTS, LOSS_OF_FOUR, search=search, tolerance=0.3, effects=False, progress=False
    )
    shift = shifts_of(zeros(MODEL, FOUR_PROMPTS))(set(circuit.edges))
    # ACDC allows each edge as much
    assert shift <= 0.3 + 1e-9 or search == "acdc"
    moved = (circuit.edges_alone - circuit.full).mean().abs() / (circuit.ablated - circuit.full).mean().abs()
    assert moved.item() == pytest.approx(shift, abs=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_effects_are_distinguished_from_the_rounding_of_any_dtype(dtype):
    planted = constructions.induction(d_vocab=12, n_ctx=24, n_heads=2, previous_token_head=1, induction_head=1, seed=0)
    planted = hide(planted, seed=0).model
    rounded = {name: weight.bfloat16() for name, weight in planted.state_dict().items()}
    exact, model = HookedTransformer(planted.cfg), HookedTransformer(planted.cfg.replace(dtype=dtype))
    exact.load_state_dict(rounded)
    model.load_state_dict(rounded)
    ids = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    options: dict[str, Any] = {"tolerance": 0.02, "effects": False, "progress": False}
    assert find_circuit(model.eval(), ids, **options).edges == find_circuit(exact.eval().double(), ids, **options).edges


def test_one_of_two_redundant_heads_is_kept():
    """Two heads that write the same, of which the output takes the larger: cutting either changes nothing."""
    model = constructions.induction(d_vocab=6, n_ctx=12, n_heads=3, previous_token_head=0, induction_head=1, seed=0)
    twin = constructions.induction(d_vocab=6, n_ctx=12, n_heads=3, previous_token_head=2, induction_head=1, seed=0)
    with torch.no_grad():  # a second previous-token head next to the first, each sharp enough alone
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(model.blocks[0].attn, name)[2] = getattr(twin.blocks[0].attn, name)[2]
        model.blocks[1].attn.W_Q.mul_(20)
    ids = torch.randint(6, (16, 6), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    circuit = find_circuit(model, ids, next_token_loss(ids[:, 0]), tolerance=0.05, progress=False)
    previous = [head for head in circuit.heads if head[0] == 0]
    assert len(previous) == 1
    assert (1, 1) in circuit.heads


def test_circuits_of_the_outputs_have_the_edges_that_any_reference_shows():
    """A head whose query all prompts share is not missed, nor one that a zero would not disturb."""
    model = constructions.induction(d_vocab=12, n_ctx=24, n_heads=4, previous_token_head=2, induction_head=1, seed=0)
    ids = torch.randint(12, (8, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    circuit = find_circuit(model, ids, progress=False)
    assert (circuit.metric, circuit.method) == ("largest change of an output", "any")
    first, second = Node(0, 2), Node(1, 1)
    expected = {*(Edge(EMBEDDING, first, by) for by in "qkv"), Edge(first, second, "k"), Edge(second, None),
                Edge(EMBEDDING, second, "q"), Edge(EMBEDDING, second, "v")}  # fmt: skip
    assert set(circuit.edges) == expected
    assert circuit.faithfulness().mean == pytest.approx(1)


# ---- models whose circuits are known ----
SIZES: dict[str, Any] = {"x_dim": 2, "n_context": 4}
PROMPTS = LinearRegression(**SIZES).sample(24, seed=0, dtype=torch.float64)
CONSTRUCTIONS = {
    "gradient descent": constructions.gradient_descent(**SIZES, step_size=0.1, steps=3),
    "newton": constructions.newton(**SIZES, steps=1, alpha=0.1),
    "copying": constructions.copy_then_gradient_descent(**SIZES, step_size=0.1),
    "softmax": constructions.softmax_gradient_descent(**SIZES, step_size=0.1, score_scale=0.1, sink=True),
}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", list(CONSTRUCTIONS))
def test_edges_of_constructions_on_points_are_those_of_their_weights(name, hidden):
    model = hide(CONSTRUCTIONS[name], seed=1).model if hidden else CONSTRUCTIONS[name]
    circuit = find_circuit(model, PROMPTS, method="any", effects=False, progress=False)
    known = weights_circuit(CONSTRUCTIONS[name])
    assert circuit.edges == known.edges
    assert circuit.nodes == known.nodes
    assert not hidden or len(known.edges) < len(list_edges(model))


@pytest.mark.parametrize("seed", range(2))
def test_one_prompt_is_enough_for_several_random_mixtures(seed):
    model = from_tracr(compile_program("reverse"))
    circuit = find_circuit(
        model, model.sample_ids(1, seed=seed), method=Replacement("any", seed=seed), effects=False, progress=False
    )
    assert circuit.edges == model.true_circuit.edges


def test_prompts_alone_do_not_show_reads_of_zeros():
    """A query's target is unknown, 0: no prompt shows that the output reads it off the token."""
    model = CONSTRUCTIONS["gradient descent"]
    edge = Edge(EMBEDDING, None)
    assert edge in weights_circuit(model).edges
    assert edge not in find_circuit(model, PROMPTS, effects=False, progress=False).edges


def test_a_head_whose_keys_another_one_reads_is_not_in_the_circuit():
    cfg = TransformerConfig(
        d_vocab=8, n_ctx=12, prompt_format="token_ids", n_layers=1, n_heads=4, n_key_value_heads=2, d_model=16,
        attention="softmax", keys="causal", initializer_range=0.6, seed=1,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for head in (0, 2, 3):  # only head 1 writes anything
            model.blocks[0].attn.W_O[head] = 0
    ids = torch.randint(8, (24, 12), generator=torch.Generator().manual_seed(0))
    found = find_circuit(model, ids, next_token_loss(ids[:, 0]), tolerance=0.02, progress=False)
    assert found.heads == [(0, 1)]
