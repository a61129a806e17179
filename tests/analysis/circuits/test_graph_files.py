"""Graph files against the names that EAP-IG gives to all edges of a model."""

import json

import pytest
import torch

from mechicl.analysis.circuits import EMBEDDING, Edge, Node, read_graph, score_edges, write_graph
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.sites import list_edges
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=2, n_context=3)
CONFIG = TransformerConfig(
    x_dim=2, n_context=3, n_layers=2, n_heads=2, d_model=8, d_mlp=8, attention="softmax", prompt_format="interleaved"
)
MODEL = HookedTransformer(CONFIG, seed=0).eval()


class Grouped:
    """The shape of a model whose four heads share keys and values in pairs."""

    class cfg:
        n_layers, n_heads, n_key_value_heads, d_model, parallel_attn_mlp, attn_only = 1, 4, 2, 8, False, True

    hook_dict: dict[str, object] = {}  # noqa: RUF012


def names_of_eap_ig(n_layers: int, n_heads: int) -> set[str]:
    """List the edges as EAP-IG does: every earlier writer to each head by q, k and v, to the MLP, and to the logits."""
    stream, names = ["input"], set()
    for layer in range(n_layers):
        heads = [f"a{layer}.h{head}" for head in range(n_heads)]
        names |= {f"{sender}->{head}<{by}>" for sender in stream for head in heads for by in "qkv"}
        stream += heads
        names |= {f"{sender}->m{layer}" for sender in stream}
        stream.append(f"m{layer}")
    return names | {f"{sender}->logits" for sender in stream}


def test_files_name_all_edges_and_are_read_as_they_were_written(tmp_path):
    scores = score_edges(MODEL, TASK.sample(4, seed=0), progress=False)
    circuit = scores.strongest(5)
    data = json.loads(write_graph(tmp_path / "importances.json", MODEL, scores, circuit).read_text())
    assert data["edges"].keys() == names_of_eap_ig(2, 2)
    assert data["cfg"] == {"n_layers": 2, "n_heads": 2, "d_model": MODEL.cfg.d_model, "parallel_attn_mlp": False}
    first, mean = circuit[0], scores.scores.double().mean(1)
    sender = "input" if first.sender == EMBEDDING else str(first.sender).replace("head ", "a").replace("MLP ", "m")
    assert any(name.startswith(sender.replace(".", ".h")) for name, edge in data["edges"].items() if edge["in_graph"])
    found = read_graph(tmp_path / "importances.json", MODEL)
    assert set(found.edges) == set(circuit)
    values = torch.tensor([found.scores[edge] for edge in scores.edges], dtype=torch.float64)
    torch.testing.assert_close(values, mean)


def test_an_edge_to_shared_keys_is_written_for_every_head(tmp_path):
    edges = list_edges(Grouped)
    assert len(edges) == 4 + 2 * 2 + 5  # queries of 4 heads, keys and values of 2 groups, 5 nodes to the read-out
    shared = Edge(EMBEDDING, Node(0, 2), "k")
    scores = {edge: float(i) for i, edge in enumerate(edges)}
    written = json.loads(write_graph(tmp_path / "graph.json", Grouped, scores, [shared]).read_text())["edges"]
    parts = [written[f"input->a0.h{head}<k>"] for head in (2, 3)]
    assert parts == 2 * [{"score": scores[shared] / 2, "in_graph": True}]
    found = read_graph(tmp_path / "graph.json", Grouped)
    assert found.scores == scores
    assert found.edges == (shared,)
    assert found.nodes == (EMBEDDING, Node(0, 2), Node(0, 3))


@pytest.mark.parametrize(("change", "message"), [
    (lambda data: data.pop("nodes"), "must contain cfg, nodes and edges"),
    (lambda data: data["cfg"].update(n_heads=3), "n_heads=3, the model 2"),
    (lambda data: data["edges"].update({"input->a7.h0<q>": {"score": 0.0}}), "does not have: 'input->a7"),
    (lambda data: data["edges"].update({"input->m0": {"score": "high"}}), "input->m0 must be a finite number"),
])  # fmt: skip
def test_damaged_files_are_refused(tmp_path, change, message):
    path = write_graph(tmp_path / "graph.json", MODEL, dict.fromkeys(list_edges(MODEL), 0.0))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        read_graph(path, MODEL)
