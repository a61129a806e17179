"""`EdgeGraph`: a transformer as a graph, in which each head and MLP reads the outputs of earlier nodes over edges."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechicl.base.memory import Budget
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.parts import take_apart
from mechicl.models.opening.sites import Edge, Node, list_edges, list_nodes, list_reached

_CACHE_SIZE = 2**25
"""Upper bound in bytes on a batch of runs, unless one run takes more: larger batches leave the processor's caches."""


class NoGradient(ValueError):
    """A metric that is not differentiable in the predictions."""


@dataclass(frozen=True)
class Stage:
    """Receivers that are computed together: the heads of a layer, its MLP, or the output."""

    layer: int  # their layer; the number of layers for the output
    kind: str  # "heads", "mlp" or "output"
    n_senders: int  # number of nodes that they read: the first ones in order of computation
    place: int  # index of the stage's first node
    # indices of the edges into the stage by "q", "k", "v" or "", one row per receiver.
    edges: Mapping[str, Int[Tensor, "receiver sender"]]

    @property
    def n_receivers(self) -> int:
        """Number of receivers: heads that share keys and values have fewer rows of edges by "k" and "v"."""
        return max(map(len, self.edges.values()))

    @property
    def nodes(self) -> slice:
        """The numbers of the receivers among all nodes; the output comes after them."""
        return slice(self.place, self.place + self.n_receivers)

    def numbers(self) -> list[int]:
        """List the indices of all edges into the stage."""
        return [int(number) for rows in self.edges.values() for number in rows.flatten()]


def list_stages(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[Stage]:
    """List the stages of a model in order of computation, the output last."""
    place = {node: i for i, node in enumerate(nodes)}
    n_layers = 1 + max(node.layer for node in nodes)
    by_stage: dict[tuple[int, bool], dict[str, dict[Node | None, list[int]]]] = {}
    for number, edge in enumerate(edges):
        receiver = edge.receiver
        key = (n_layers, False) if receiver is None else (receiver.layer, receiver.head is None)
        by_stage.setdefault(key, {}).setdefault(edge.by, {}).setdefault(receiver, []).append(number)
    stages = []
    for (layer, is_mlp), ways in sorted(by_stage.items()):
        rows = {by: torch.tensor(list(receivers.values())) for by, receivers in ways.items()}
        first = next(iter(rows.values()))[0].tolist()  # the edges into the first receiver
        receiver = edges[first[0]].receiver
        kind = "output" if receiver is None else "mlp" if is_mlp else "heads"
        stages.append(Stage(layer, kind, len(first), len(nodes) if receiver is None else place[receiver], rows))
    return stages


class EdgeGraph:
    """Runs of a model with some edges cut: these carry the sender's output in a reference run.

    With no edge cut the runs are the model's; with all cut each node reads the reference's stream. `references` are the
    nodes' outputs over cut edges, `[node prompt pos d_model]` (`record_writes`); `embedded` is the first stream
    (default: the embedded tokens); `edges` are the model's, if they are known. `settings.memory` bounds runs, beyond
    the model, its tokens, references and nodes' outputs.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokens: Tensor,
        references: Float[Tensor, "node prompt pos d_model"],
        *,
        embedded: Float[Tensor, "prompt pos d_model"] | None = None,
        edges: list[Edge] | None = None,
    ):
        self.parts = take_apart(adapter)
        if embedded is not None:  # only the number of tokens matters
            tokens = tokens[:1].expand(len(embedded), *tokens.shape[1:])
        with torch.no_grad():
            stream = self.parts.embed(tokens)  # also records how a bridge calls its parts
        self.embedded = stream if embedded is None else embedded
        self.tokens, self.references, self.budget = tokens, references, Budget()
        self.nodes = list_nodes(adapter.model)
        self.edges = list_edges(adapter.model) if edges is None else edges
        self.stages = list_stages(self.nodes, self.edges)
        self._remembered: tuple[Tensor, Tensor] | None = None

    def run(self, kept: Bool[Tensor, "edge"]) -> Tensor:
        """Predict with all but some edges cut."""
        return self.run_cuts(kept[None])[0]

    def run_cuts(
        self, kept: Bool[Tensor, "cut edge"], *, base: Bool[Tensor, "edge"] | None = None
    ) -> Float[Tensor, "cut prompt ..."]:
        """Predict in one run per row; see `iterate_cuts`."""
        return torch.cat([predictions for _, predictions in self.iterate_cuts(kept, base=base)])

    def iterate_cuts(
        self, kept: Bool[Tensor, "cut edge"], *, base: Bool[Tensor, "edge"] | None = None
    ) -> Iterator[tuple[slice, Float[Tensor, "cut prompt ..."]]]:
        """Yield slices of rows with predictions of runs with only a row's edges.

        Nodes that the predictions do not depend on are left out. Nodes whose inputs are those of a run with only the
        edges `base`, which has to contain all rows' edges, are computed once.
        """
        n_prompts = len(self.tokens)
        before = None if base is None else self._changes(base)
        step = max(self._rows(self._all) // max(n_prompts, 1), 1)
        for first in range(0, len(kept), step):
            masks = kept[first : first + step]
            plan, weights = self._plan(masks, base), masks.to(self.references.dtype)
            rows = max(self._rows(plan) // len(masks), 1)
            batches = (slice(i, i + rows) for i in range(0, n_prompts, rows))
            with torch.no_grad():  # inside the loop, so that the caller is not affected between two steps
                predictions = [self._trace(weights, prompts, plan, before, None)[1] for prompts in batches]
            yield slice(first, first + len(masks)), torch.cat(predictions, 1)

    @property
    def whole(self) -> Float[Tensor, "node prompt pos d_model"]:
        """Each node's output in a run of the whole model, minus that in the reference."""
        return self._changes(torch.ones(len(self.edges), dtype=torch.bool, device=self.references.device))

    @cached_property
    def reached(self) -> list[list[Node | None]]:
        """The nodes whose output each edge can change: its receiver, and heads that depend on the receiver's input."""
        model = self.parts.model
        self.parts.embed(self.tokens[:1])  # after which a bridge knows whether heads interact
        reached: list[list[Node | None]] = []
        for edge in self.edges:
            nodes: list[Node | None] = [*list_reached(model, edge)]
            if edge.by and edge.receiver and self.parts.heads_interact:
                nodes = [Node(edge.receiver.layer, head) for head in range(model.cfg.n_heads)]
            reached.append(nodes or [None])
        return reached

    def mask(self, edges: Sequence[Edge]) -> Bool[Tensor, "edge"]:
        """True for these edges."""
        chosen = set(edges)
        return torch.tensor([edge in chosen for edge in self.edges], device=self.tokens.device)

    def gradients(
        self,
        kept: Float[Tensor, "edge"],
        objective: Callable[[Tensor, slice], Float[Tensor, "prompt"]],
        *,
        changes: Float[Tensor, "node prompt pos d_model"] | None = None,
    ) -> Float[Tensor, "edge prompt"]:
        """Differentiate an objective with respect to the kept share of each edge, `[edge prompt]`.

        Receivers read the reference's stream plus each sender's change, scaled by `kept` in [0, 1]; gradients are
        multiplied by `changes` (default: this run's). The objective maps predictions and a slice of prompts to numbers.
        """
        per_edge = torch.zeros(len(self.edges), len(self.tokens), dtype=self.references.dtype, device=kept.device)
        rows = self._rows(self._all, backward=True)
        for first in range(0, len(self.tokens), rows):
            prompts = slice(first, first + rows)
            probes: dict[tuple[int, str], Tensor] = {}

            def probe(stage: int, by: str, reads: Tensor, probes: dict[tuple[int, str], Tensor] = probes) -> Tensor:
                probes[stage, by] = zeros = torch.zeros_like(reads, requires_grad=True)
                return reads + zeros

            with torch.enable_grad():
                writes, out = self._trace(kept[None].to(self.references), prompts, self._all, None, probe)
                value = objective(out[0], prompts)
                if not value.requires_grad:
                    raise NoGradient("the metric has no gradient in the predictions: 'exact' and 'acdc' need none")
                gradients = torch.autograd.grad(value.sum(), list(probes.values()), allow_unused=True)
            weighed = writes[0].detach() if changes is None else changes[:, prompts]
            for (number, by), gradient in zip(probes, gradients, strict=True):
                stage = self.stages[number]
                if gradient is not None:  # [receiver cut prompt pos d_model]
                    senders = weighed[: stage.n_senders]
                    scores = einsum(gradient[:, 0], senders, "r prompt pos d, s prompt pos d -> r s prompt")
                    per_edge[stage.edges[by].flatten(), prompts] = scores.flatten(0, 1)
        return per_edge

    # ---- one run ----

    @cached_property
    @torch.no_grad()
    def _streams(self) -> list[Tensor]:
        same = self.references.stride(1) == 0
        references = self.references[:, :1] if same else self.references
        place = {stage.layer: stage.place for stage in self.stages if stage.kind == "heads"}
        streams = []
        for stage in self.stages:
            stream = references[: stage.n_senders].sum(0)
            for layer in (layer for layer, first in place.items() if first < stage.n_senders):
                stream = stream + self.parts.attention_bias(layer)
            streams.append(stream.expand(self.references.shape[1:]))
        return streams

    def _plan(self, kept: Bool[Tensor, "cut edge"], base: Bool[Tensor, "edge"] | None) -> list[bool]:
        """True for each stage that has to be computed: the output depends on it, and it differs from base.

        Without a base, all that the output depends on.
        """
        used = kept.any(0).cpu().numpy()
        cut = (torch.ones_like(kept) if base is None else kept != base).any(0).cpu().numpy()
        needed, differs = (np.zeros(len(self.nodes) + 1, dtype=bool) for _ in range(2))
        needed[-1] = True  # the output
        for stage, tables in zip(reversed(self.stages), reversed(self._tables), strict=True):
            if needed[stage.nodes].any():
                for table in tables:
                    needed[: stage.n_senders] |= used[table].any(0)
        plan = []
        for stage, tables in zip(self.stages, self._tables, strict=True):
            changed = [(cut[table] | (used[table] & differs[: stage.n_senders])).any() for table in tables]
            differs[stage.nodes] = any(changed) or stage.kind == "output"
            plan.append(bool((differs & needed)[stage.nodes].any()))
        return plan

    @cached_property
    def _tables(self) -> list[list[np.ndarray]]:
        return [[table.numpy() for table in stage.edges.values()] for stage in self.stages]

    def _trace(
        self,
        masks: Float[Tensor, "cut edge"],
        prompts: slice,
        plan: Sequence[bool],
        before: Float[Tensor, "node prompt pos d_model"] | None,
        probe: Callable[[int, str, Tensor], Tensor] | None,
    ) -> tuple[Float[Tensor, "cut node prompt pos d_model"], Tensor]:
        """The outputs of the planned nodes, minus the reference, and the predictions `[cut prompt ...]`.

        Outputs of all other nodes are those of `before`; without it the embedding's comes first.
        """
        references, n_cuts = self.references[:, prompts], len(masks)
        shared = references[:0] if before is None else before[:, prompts]
        changes = _Changes(shared, n_cuts, self._planned(plan, before is None))
        if before is None:
            changes.add((self.embedded[prompts] - references[0]).expand(1, n_cuts, -1, -1, -1))
        for number, stage in enumerate(self.stages):
            if not plan[number]:
                continue
            tables = list(stage.edges.values())
            read = changes.read(masks[:, torch.cat(tables)]) + self._streams[number][prompts]
            reads = {}
            for by, streams in zip(stage.edges, read.split(list(map(len, tables))), strict=True):
                reads[by] = (streams if probe is None else probe(number, by, streams)).flatten(1, 2)
            if stage.kind == "output":
                return changes.written, self.parts.read_out(reads[""][0]).unflatten(0, (n_cuts, -1))
            if stage.kind == "mlp":
                outs = self.parts.mlp(stage.layer, reads[""][0])[None]
            else:
                outs = self.parts.attend(stage.layer, reads["q"], reads["k"], reads["v"])
            changes.add(outs.unflatten(1, (n_cuts, -1)) - references[stage.nodes, None])
        raise AssertionError("there is always an output")

    def _planned(self, plan: Sequence[bool], embedding: bool) -> list[int]:
        stages = itertools.compress(self.stages, plan)
        nodes = [stage.place + i for stage in stages for i in range(stage.n_receivers)]
        return [0] * embedding + nodes[:-1]  # the last one is the output

    @torch.no_grad()
    def _changes(self, kept: Bool[Tensor, "edge"]) -> Float[Tensor, "node prompt pos d_model"]:
        """Each node's output with only these edges kept, minus the reference; the last result is remembered.

        If it had more edges, only nodes that differ from it are computed, and those that the output does not depend on
        keep their values.
        """
        if self._remembered is not None and torch.equal(self._remembered[0], kept):
            return self._remembered[1]
        old, self._remembered = self._remembered, None
        if old is not None and bool((kept <= old[0]).all()):
            plan, changes = self._plan(kept[None], old[0]), old[1]
        else:
            plan, old, changes = self._all, None, self.references.new_empty(self.references.shape)
        rows, mask = self._rows(plan), kept[None].to(self.references.dtype)
        nodes = self._planned(plan, old is None)
        for first in range(0, len(self.tokens), rows):
            prompts = slice(first, first + rows)
            changes[nodes, prompts] = self._trace(mask, prompts, plan, old and old[1], None)[0][0]
        self._remembered = (kept.clone(), changes)
        return changes

    @cached_property
    def _bytes_of_parts(self) -> float:
        return self.parts.bytes_per_row(self.tokens)

    @cached_property
    def _all(self) -> list[bool]:
        """The plan that computes every node."""
        return [True] * len(self.stages)

    def _rows(self, plan: Sequence[bool], *, backward: bool = False) -> int:
        one = self.references[0, :1].numel() * self.references.element_size()
        stages = list(itertools.compress(self.stages, plan))
        readers = [len(stage.edges) * stage.n_receivers for stage in stages]
        reads = 3 * sum(readers) if backward else 6 * max(readers)
        of_parts = self._bytes_of_parts * (len(self.stages) if backward else 1)
        per_row = one * (len(self.nodes) + sum(stage.n_receivers for stage in stages) + reads) + of_parts
        at_most = max(_CACHE_SIZE / per_row, 1) if not backward else 2**31
        return self.budget.rows(per_row, at_most=at_most)


class _Changes:
    """Outputs of nodes minus their outputs in the reference: per run for some nodes, and the same for all others.

    `shared` are those that are the same in all runs, `[node prompt pos d_model]`, which may be none; `nodes` are the
    numbers of the others, in the order in which they are added.
    """

    def __init__(self, shared: Float[Tensor, "node prompt pos d_model"], n_cuts: int, nodes: Sequence[int]):
        self.shared, self.nodes = shared, np.array(nodes, dtype=int)
        self._n_added = 0
        # gradients forbid writing in place
        self._parts: list[Tensor] | None = [] if torch.is_grad_enabled() else None
        self._stored = shared.new_empty(n_cuts, 0 if torch.is_grad_enabled() else len(nodes), *shared.shape[1:])

    @property
    def written(self) -> Float[Tensor, "cut node prompt pos d_model"]:
        return torch.cat(self._parts, 1) if self._parts else self._stored[:, : self._n_added]

    def add(self, changes: Float[Tensor, "node cut prompt pos d_model"]) -> None:
        if self._parts is None:
            self._stored[:, self._n_added : self._n_added + len(changes)] = changes.transpose(0, 1)
        else:
            self._parts.append(changes.transpose(0, 1))
        self._n_added += len(changes)

    def read(self, weights: Float[Tensor, "cut receiver sender"]) -> Float[Tensor, "receiver cut prompt pos d_model"]:
        n_senders, sums = weights.shape[2], []
        own = self.nodes[self.nodes < n_senders]  # the first ones: senders come before receivers
        same = weights.any(0).any(0).cpu().numpy()[: len(self.shared)]
        same[own[own < len(same)]] = False
        if same.any():
            chosen = np.flatnonzero(same)
            shared = self.shared[:n_senders] if len(chosen) == n_senders else self.shared[chosen]
            sums.append(weights[..., chosen].flatten(0, 1) @ shared.flatten(1))
        if len(own) or not sums:
            sums.append((weights[..., own] @ self.written[:, : len(own)].flatten(2)).flatten(0, 1))
        read = sums[0] if len(sums) == 1 else sums[0] + sums[1]
        return read.view(*weights.shape[:2], *self.shared.shape[1:]).transpose(0, 1)
