"""The search for a circuit: the fewest heads, MLPs and edges that carry a metric when everything else is ablated."""

from typing import Any, Literal, get_args

from torch import Tensor

from mechicl.analysis.circuits.measures import measure_parts
from mechicl.analysis.circuits.node_search import (
    PartialModel,
    search_by_attribution,
    search_edges,
    search_greedily,
)
from mechicl.analysis.circuits.results import Circuit
from mechicl.analysis.interventions.ablation import Method
from mechicl.analysis.interventions.metrics import Inputs, Metrics
from mechicl.memory import MEMORY
from mechicl.progress import progress_bar
from mechicl.prompts import At

Search = Literal["greedy", "attribution"]


def find_circuit(
    model: Any,
    prompts: Inputs,
    metrics: Metrics = None,
    *,
    search: Search = "greedy",
    method: Method = "mean",
    reference: Inputs | None = None,
    tolerance: float = 0.05,
    edges: bool = True,
    at: At = "query",
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Circuit:
    """The heads and MLPs that a metric needs, and the edges between them, verified by ablating everything else.

    Nodes: "greedy" ablates one after the other, always the one whose loss changes the mean metric least, until the
    next would move it by more than `tolerance` of what ablating everything does. "attribution" orders nodes by one
    gradient and keeps as few of the first as the tolerance allows: quicker, and blind to what only shows together.
    Edges (our transformers only): among the nodes kept, the least important are cut, in the order of what cutting each
    alone does, up to a place where the metric has moved by `tolerance` once more (found by bisection: there may be
    fewer edges that would do). What is found depends on the prompts; `measure_circuit` says how good it is on others.
    `prompts`, `method`, `reference`, `at`, `seed` and `progress` are as for `ablate`.

    Args:
        model: ours; without edges any of TransformerLens' protocol.
        metrics: one metric, as for `patch`; by default the squared "loss".
        search: see above.
        tolerance: of the mean metric, relative to the change when everything is ablated.
        edges: whether to look for edges too: a run for each edge between the nodes that are kept.
        memory: bound in bytes on the sweeps over nodes; edges need what one run of all prompts takes a few times.

    Raises:
        ValueError: as for `ablate`; several metrics, a tolerance that is not positive, an unknown search, a metric
            that does not change when everything is ablated, or edges of a model of another kind.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (32, 16)).repeat(1, 2)
        >>> find_circuit(induction, ids, next_token_loss(ids[:, 0])).heads
        [(0, 0), (1, 0)]

    Source: Wang et al. 2023, section 4, and Marks et al. 2024, section 4 (faithfulness and completeness as shares);
    Conmy et al. 2023 (edges); Syed et al. 2023 (attribution).
    """
    if search not in get_args(Search):
        raise ValueError(f"search={search!r} is not one of {get_args(Search)}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    with progress_bar(unit="run", desc="circuit", progress=progress) as bar:
        partial = PartialModel(
            model, prompts, metrics, at=at, method=method, reference=reference, seed=seed, memory=memory,
            with_edges=edges, advance=bar.update,
        )  # fmt: skip
        full, ablated = partial.metric_without([[], partial.nodes])
        scale = (full - ablated).mean().abs().item()
        if not scale > 1e-6 * (full.abs().mean().item() + 1e-30):
            raise ValueError(
                f"{partial.metric_name!r} does not change when every head and MLP is ablated: there is nothing to find"
            )

        def shift(metric: Tensor, origin: Tensor = full) -> float:
            return abs((metric - origin).mean().item()) / scale

        kept = (search_greedily if search == "greedy" else search_by_attribution)(partial, shift, tolerance)
        return measure_parts(partial, kept, search_edges(partial, kept, shift, tolerance) if edges else [])
