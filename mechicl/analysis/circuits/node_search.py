"""How nodes are looked for: the metric of a model with some nodes ablated, and the order to try them in."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.objectives import Objective, OneMetric, check_objective, evaluate, name_metric
from mechicl.analysis.circuits.problem import read_inputs
from mechicl.analysis.interventions.ablation import Method, record_replacements
from mechicl.analysis.interventions.attribution import linearize_metrics
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.analysis.interventions.runs import Experiment
from mechicl.base.memory import Budget
from mechicl.models.opening.edges import Node, list_nodes
from mechicl.models.opening.sites import Site, check_hook
from mechicl.prompts import At


class PartialModel:
    """A model of which only some heads and MLPs run; the others are ablated.

    Args:
        advance: called after each run.

    The others as for `find_circuit`, which says what is refused too.
    """

    def __init__(
        self,
        model: Any,
        prompts: Inputs,
        metrics: OneMetric,
        *,
        at: At | None,
        method: Method,
        reference: Inputs | None,
        seed: int,
        memory: float,
        advance: Callable[[], Any],
    ):
        adapter, tokens = read_inputs(model, prompts, metrics, at)
        check_hook(model, "blocks.0.attn.hook_z")
        name, metric = name_metric(metrics, prompts, adapter.at)
        named = {name: lambda predictions: evaluate(name, metric, predictions, self._baseline.predictions)}
        self.adapter, self.tokens, self._advance = adapter, tokens, advance
        self.method: Method = method
        self.nodes = [node for node in list_nodes(adapter.model) if node.layer >= 0]
        self._experiment = Experiment(adapter, tokens, named, False, Budget(memory))
        names = sorted({site_of(node).hook_name for node in self.nodes})
        self._replacements = record_replacements(adapter, tokens, names, method, reference, seed, Budget(memory))
        # at most the metric without each node, and some more, in four copies
        self._baseline = self._experiment.run_baseline(4 * (len(self.nodes) + 4), self._replacements)
        whole = self._baseline.predictions
        self._full = evaluate(name, metric, whole, whole)
        (ablated,) = self._run([self.nodes], name)
        self.objective = check_objective(Objective(name, metric, whole, self._full, ablated))

    def metric_without(self, groups: Sequence[Sequence[Node]]) -> list[Float[Tensor, "prompt"]]:
        """The metric with each group of nodes ablated."""
        ablated = iter(self._run([group for group in groups if group], self.objective.name))
        return [next(ablated) if group else self._full for group in groups]

    def shifts_without(self, groups: Sequence[Sequence[Node]]) -> list[float]:
        """How far the metric is from the whole model's with each group of nodes ablated."""
        return [self.objective.shift(values) for values in self.metric_without(groups)]

    def _run(self, groups: Sequence[Sequence[Node]], name: str) -> list[Float[Tensor, "prompt"]]:
        cells = [tuple(site_of(node) for node in group) for group in groups]
        return [*self._experiment.run_cells(self._baseline, cells, self._replacements, self._advance).values[name]]

    def estimate_effects(self) -> dict[Node, float]:
        """How much ablating each node would move the mean metric, to first order; all prompts are in memory at once."""
        if self.objective.metric is None:
            raise ValueError(
                "how far outputs are from the whole model's has no gradient there: for search='attribution' give "
                "metrics=, or take search='exact'"
            )
        named = self._experiment.metrics
        _, _, changes = linearize_metrics(self.adapter, self.tokens, self._replacements, named)
        effects = {}
        for node in self.nodes:
            change = changes[self.objective.name][site_of(node).hook_name]  # [prompt pos ...]
            change = change if node.head is None else change[:, :, node.head]
            effects[node] = change.flatten(1).sum(1).mean().abs().item()
        return effects


def site_of(node: Node) -> Site:
    """Where a node's output is."""
    return Site("mlp_out", node.layer) if node.head is None else Site("z", node.layer, head=node.head)


def search_greedily(partial: PartialModel, tolerance: float) -> list[Node]:
    """The nodes that are left when the one that matters least is taken away, as long as one matters little enough."""
    kept = list(partial.nodes)
    while kept:
        ablated = [node for node in partial.nodes if node not in kept]
        shifts = partial.shifts_without([[*ablated, node] for node in kept])
        least = min(range(len(kept)), key=shifts.__getitem__)
        if shifts[least] > tolerance:
            break
        del kept[least]
    return kept


def search_by_attribution(partial: PartialModel, tolerance: float) -> list[Node]:
    """As few of the nodes as the tolerance allows, in the order of a first-order estimate of what they do."""
    effects = partial.estimate_effects()
    order = sorted(partial.nodes, key=effects.__getitem__)  # least important first
    shifts = partial.shifts_without([order[:n] for n in range(len(order) + 1)])
    n_ablated = max(n for n, moved in enumerate(shifts) if moved <= tolerance)
    return [node for node in partial.nodes if node not in order[:n_ablated]]
