"""Scores of edges against TransformerLens' attribution patching, which is edge attribution with the roles swapped."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

from mechicl.analysis.circuits.scores import score_edges
from mechicl.models import HookedTransformerConfig
from mechicl.models.opening.edges import EMBEDDING, Edge, Node
from tests.families import FAMILIES, open_family, token_ids
from tests.strategies import random_model


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
