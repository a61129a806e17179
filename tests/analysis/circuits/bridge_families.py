"""Families whose edges can be cut: `python -m tests.analysis.circuits.bridge_families` prints the table of the page."""

import warnings

import torch

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import is_parallel, list_key_heads
from tests.families import FAMILIES, open_family, token_ids


@torch.no_grad()
def describe(name: str) -> tuple[str, str, str]:
    """Return what an MLP reads, keys of heads, and what makes heads interact; or why a family is refused."""
    bridge, _ = open_family(name)
    adapter = ModelAdapter(bridge, "positions")
    tokens, others = token_ids(0, 3), token_ids(1, 3)
    try:
        graph = EdgeGraph(adapter, tokens, record_writes(adapter, others))
    except ValueError as error:
        reasons = {
            "not the sum": "normalises its stream",
            "no attention": "layers without attention",
            "single stack": "two stacks",
        }
        (reason,) = (reason for words, reason in reasons.items() if words in str(error))
        return f"refused: {reason}", "", ""
    for kept, expected in ((True, bridge(tokens)), (False, bridge(others))):
        out = graph.run(torch.full((len(graph.edges),), kept))
        assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    meeting = "a norm over all heads" if graph.parts.heads_interact else "nothing"
    mlp = "the stream before its layer" if is_parallel(bridge) else "the stream after its layer's heads"
    return mlp, "shared" if len(list_key_heads(bridge)) < bridge.cfg.n_heads else "one per head", meeting


def main() -> None:
    """Print the table of docs/how-to/families.md."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in FAMILIES:
            rows.setdefault(describe(name), []).append(name)
    print("| family | an MLP reads | keys and values | what couples the heads of a layer |\n|---|---|---|---|")
    for row, names in rows.items():
        print(f"| {', '.join(names)} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
