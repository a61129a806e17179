"""Interchange for token models: find the subspace of a layer that carries a variable of a causal model of the task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.base.arguments import Count, Positive, check_fields, checked
from mechicl.base.precision import at_least_float32
from mechicl.base.progress import progress_bar
from mechicl.models import HookedTransformer
from mechicl.models.opening.adapter import check_eval_mode, refuse_padding
from mechicl.statistics import Result
from mechicl.statistics.results import NOT_SAMPLES, SHARE

BATCH_SIZE = 32
"""Pairs per step of the fit."""
MARGIN = 8.0
"""Logits are scaled up for the fit until the best is this far above the second on average. An exact exchange then has
almost no loss; otherwise the fit prefers subspaces that exaggerate the logits."""


@dataclass(frozen=True)
class CausalModel:
    """A causal model of a task on tokens: variables that are read off a prompt, and the output that they determine.

    Attributes:
        variables: by name, a function of a prompt's token ids that returns the variable's value.
        output: function of all values by name that returns the token id of the answer.
        read: position at which a model's logits give the answer; by default the last.

    Example:
        >>> last = CausalModel({"token": lambda ids: int(ids[-2])}, lambda values: values["token"])
    """

    variables: Mapping[str, Callable[[Tensor], Any]]
    output: Callable[[Mapping[str, Any]], int]
    read: int = -1

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def values(self, ids: Int[Tensor, " pos"]) -> dict[str, Any]:
        """Return the value of each variable in a prompt, by name."""
        return {name: _plain(read(ids)) for name, read in self.variables.items()}

    @checked
    def interchange(self, base: Int[Tensor, " pos"], source: Int[Tensor, " pos"], variable: str) -> int:
        """Return the answer's token id for a prompt `base`, with one variable's value taken from another prompt."""
        if variable not in self.variables:
            raise ValueError(f"variable must be one of {list(self.variables)}, got {variable!r}")
        return self.answer(self.values(base) | {variable: _plain(self.variables[variable](source))})

    def answer(self, values: Mapping[str, Any]) -> int:
        """Return the answer's token id for values of all variables."""
        answer = _plain(self.output(values))
        if not isinstance(answer, Integral) or answer < 0:
            raise ValueError(f"output must return a token id, 0 or more, got {answer!r}")
        return int(answer)


def _plain(value: Any) -> Any:
    """A number instead of a tensor with one entry: equal tensors have different hashes."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


@dataclass(frozen=True, eq=False)
class VariableAlignment(Result):
    """How often exchanging a learned subspace acts like exchanging the variable; see `align_variables`.

    Samples are held-out pairs of prompts in which the exchange changes the output of the causal model. An answer is the
    token with the largest logit among the outputs of the causal model.

    Attributes:
        layers: layers whose streams were searched.
        accuracy: 1 where the model's answer is that of the causal model after the exchange, else 0.
        controls: the same for "random targets" (subspaces fitted to random outputs for each pair, judged by such
            outputs), in an "untrained" model if there is one, and for an exchange of the "whole stream".
        bases: orthonormal columns of the learned subspaces.
        n_outputs: number of outputs to choose from; a guess is right for one random target in `n_outputs`.
    """

    variable: str
    layers: tuple[int, ...]
    pos: int
    rank: int
    accuracy: Float[Tensor, "layer pair"] = field(metadata=SHARE)
    controls: dict[str, Float[Tensor, "layer pair"]] = field(metadata=SHARE)
    bases: Float[Tensor, "layer d_model rank"] = field(metadata=NOT_SAMPLES)
    n_outputs: int = 0


@dataclass(frozen=True, eq=False)
class AlignmentFit:
    """Settings of `align_variables`: the subspace, and its fit by Adam.

    Attributes:
        rank: dimension of the subspace. One is enough for a number or for two values; `k` unordered values may need
            `k - 1`.
        n_pairs: pairs for the fit, and for the test.
        untrained: untrained model of the same kind, for the control; by default made from a `HookedTransformer`'s
            config.
    """

    rank: Count = 1
    n_pairs: Count = 512
    epochs: Count = 30
    learning_rate: Positive = 1e-2
    untrained: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@checked(locks=True)
def align_variables(
    model: Any,
    causal: CausalModel,
    variable: str,
    ids: Int[Tensor, "prompt pos"],
    *,
    pos: int = -1,
    layers: Sequence[int] | None = None,
    component: str = "resid_post",
    fit: AlignmentFit = AlignmentFit(),
    progress: bool | None = None,
) -> VariableAlignment:
    """Find, in each layer, a subspace at a position such that exchanging it acts like exchanging a causal variable.

    Tests whether a model represents a variable, and where. Subspaces are fitted by distributed alignment search on
    pairs of prompts from one half of `ids`, and judged on pairs from the other half. A fit can find effects anywhere,
    so two controls are fitted in the same way: one to random outputs, one in an untrained model. Source: Geiger et al.
    2024, "Finding alignments between interpretable causal variables and distributed neural representations"; controls
    after Arora et al. 2024.

    Args:
        model: a model of token ids with hooks, in eval mode.
        causal: `CausalModel(variables, output)` of the task: for each variable a function of a prompt's ids, and a
            function of their values that returns the answer's token id, which should be the model's own on `ids`. The
            model's answer is read at the last position, or at `CausalModel(..., read=pos)`.
        ids: prompts of one length, at least four different ones; repeated ones are used once.
        pos: position of the exchange; by default the last.
        layers: layers to search; all by default.
        component: activation to search, with the width of the stream: "resid_post" (the stream after each layer),
            "resid_pre", "attn_out", "mlp_out", ...
        fit: the dimension of the subspace, numbers of pairs and epochs, ...: `AlignmentFit(rank, n_pairs, ...)`.

    Returns:
        A `VariableAlignment`; `to_dataframe()` has the mean accuracies of each layer, and of the controls, with 95%
        intervals over pairs.

    Example:
        >>> found = align_variables(model, causal, "carry", ids, pos=3, fit=AlignmentFit(rank=2))
        >>> found.to_dataframe()[["layer", "accuracy", "random targets"]]
    """
    if variable not in causal.variables:
        raise ValueError(f"variable must be one of {list(causal.variables)}, got {variable!r}")
    for name, place in (("pos", pos), ("read", causal.read)):
        if not -ids.shape[1] <= place < ids.shape[1]:
            raise ValueError(f"{name} must be a position of the {ids.shape[1]} in ids, got {place}")
    if layers is not None and (not layers or not set(layers) <= set(range(model.cfg.n_layers))):
        raise ValueError(f"layers must be some of 0 to {model.cfg.n_layers - 1}, got {list(layers)}")
    refuse_padding(model, ids)
    ids = ids.unique(dim=0)  # a repeated prompt could be in both halves
    if len(ids) < 4:
        raise ValueError(f"ids must contain at least four different prompts, got {len(ids)}")
    seed, untrained = fit.seed, fit.untrained
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    by_value = sorted(range(len(ids)), key=lambda i: repr(causal.values(ids[i])[variable]))
    halves = ids[by_value[::2]], ids[by_value[1::2]]  # a value that two prompts have is in both
    check_eval_mode(model)
    if untrained is None and isinstance(model, HookedTransformer):
        spread = model.cfg.initializer_range or model.cfg.d_model**-0.5  # 0 in models that are written by hand
        cfg = model.cfg.replace(initializer_range=spread)
        untrained = HookedTransformer(cfg, seed=seed + 1).to(next(model.parameters()).dtype).eval()
    fitting, held_out = (_pairs(causal, variable, half, fit.n_pairs, seed + i) for i, half in enumerate(halves))
    intact = {causal.answer(causal.values(row)) for row in ids}
    classes = torch.tensor(sorted({*intact, *fitting.outputs, *held_out.outputs}))
    n_out = getattr(model.cfg, "d_vocab_out", None) or -1
    n_logits = n_out if n_out > 0 else cast(int, model.cfg.d_vocab)
    if (largest := int(classes.max())) >= n_logits:
        raise ValueError(f"output must return token ids below {n_logits}, got {largest}")
    place = ids.shape[1] + pos if pos < 0 else pos
    layers = tuple(range(model.cfg.n_layers)) if layers is None else tuple(layers)
    from transformer_lens.tools.analysis.interchange import arbitrary_targets  # takes seconds

    search = _Search(classes, place, causal.read, fit)
    right, random = ([get(pairs) for pairs in (fitting, held_out)] for get in (
        lambda pairs: pairs.targets(classes), lambda pairs: arbitrary_targets(pairs.keys(), len(classes), seed)
    ))  # fmt: skip
    found: dict[str, list[Tensor]] = {"accuracy": [], "random targets": [], "untrained": [], "whole stream": []}
    bases = []
    for layer in progress_bar(layers, unit="layer", progress=progress):
        hook = get_act_name(component, layer)
        bases.append(search.fit(model, hook, fitting, right[0]))
        judged = {"accuracy": (model, bases[-1], right[1])}
        judged["whole stream"] = (model, torch.eye(len(bases[-1]), dtype=bases[-1].dtype), right[1])
        judged["random targets"] = (model, search.fit(model, hook, fitting, random[0]), random[1])
        if untrained is not None:
            judged["untrained"] = (untrained, search.fit(untrained, hook, fitting, right[0]), right[1])
        for name, (network, basis, targets) in judged.items():
            found[name].append(search.accuracy(network, hook, basis, held_out, targets))
    stacked = {name: torch.stack(values) for name, values in found.items() if values}
    return VariableAlignment(
        variable, layers, place, fit.rank, stacked.pop("accuracy"), stacked, torch.stack(bases), n_outputs=len(classes)
    )


@dataclass(frozen=True, eq=False)
class _Pairs:
    base: Int[Tensor, "pair pos"]
    source: Int[Tensor, "pair pos"]
    outputs: tuple[int, ...]

    def targets(self, classes: Int[Tensor, " class"]) -> Int[Tensor, " pair"]:
        return torch.searchsorted(classes, torch.tensor(self.outputs))

    def keys(self) -> list[tuple[int, ...]]:
        return [tuple(row) for row in torch.cat([self.base, self.source], dim=1).tolist()]


def _pairs(causal: CausalModel, variable: str, ids: Int[Tensor, "prompt pos"], n: int, seed: int) -> _Pairs:
    generator = torch.Generator().manual_seed(seed)
    base, source = (torch.randint(len(ids), (8 * n,), generator=generator) for _ in range(2))
    outputs, rows = [], []
    for row, (i, j) in enumerate(zip(base.tolist(), source.tolist(), strict=True)):
        output = causal.interchange(ids[i], ids[j], variable)
        if output != causal.answer(causal.values(ids[i])):
            outputs.append(output)
            rows.append(row)
        if len(rows) == n:
            break
    if not rows:
        raise ValueError(f"exchanging {variable!r} between these prompts never changes the output: give other prompts")
    return _Pairs(ids[base[rows]], ids[source[rows]], tuple(outputs))


@dataclass(frozen=True, eq=False)
class _Search:
    """Settings of a search for subspaces at one position, by the logits of the outputs at another one."""

    classes: Int[Tensor, " class"]
    place: int
    read: int
    settings: AlignmentFit

    def logits(self, model: Any, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        return lambda tokens: scale * at_least_float32(model(tokens)[:, self.read, self.classes])

    @torch.enable_grad()
    def fit(self, model: Any, hook: str, pairs: _Pairs, targets: Tensor) -> Float[Tensor, "d_model rank"]:
        from transformer_lens.tools.analysis.interchange import fit_das  # takes seconds

        positions = torch.full((len(targets),), self.place)
        with torch.no_grad():
            best = self.logits(model)(pairs.base[:BATCH_SIZE]).topk(2).values
        scale = max(1.0, MARGIN / max(float((best[:, 0] - best[:, 1]).mean()), 1e-6))
        of = self.settings
        result = fit_das(
            model, hook, pairs.base, pairs.source, targets, self.logits(model, scale), rank=of.rank, epochs=of.epochs,
            lr=of.learning_rate, seed=of.seed, base_positions=positions, source_positions=positions,
            batch_size=BATCH_SIZE,
        )  # fmt: skip
        return result.basis.detach().cpu()

    @torch.no_grad()
    def accuracy(self, model: Any, hook: str, basis: Tensor, pairs: _Pairs, targets: Tensor) -> Float[Tensor, " pair"]:
        from transformer_lens.tools.analysis import interchange

        positions, logits = torch.full((len(targets),), self.place), self.logits(model)
        sources = interchange.collect_activations(model, hook, pairs.source, logits, positions=positions)
        exchange = interchange.SubspaceInterchange(basis)
        found = interchange.intervened_logits(model, hook, exchange, pairs.base, sources, logits, positions=positions)
        return (found.argmax(-1).cpu() == targets).float()
